"""Advice for SmolLM2-135M-Instruct at four times its length, measured, into results/advise/smollm2.json.

One row of 32 768 held-out tokens a setting, in bfloat16: about 7 minutes on one core. The unchanged model also reads
the same tokens in windows of its own length, which is the mark for all. Written after each setting; started again, it
goes on with the settings that are missing. Run with the folder of the checkpoint (a .gguf, or what
`experiments.inspect_smollm2` converts), its tokenizer.json, and a folder of long texts, each file a document:
`python -m experiments.advise_smollm2 CHECKPOINT TOKENIZER TEXTS`.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic

import torch

from phasewise.data import load, windows
from phasewise.evaluate.loss import Measurement, measure
from phasewise.frequencies import AnyFrequencies
from phasewise.hf.language_model import open_language_model
from phasewise.lens.advise.advice import Advice, Wanted, advise
from phasewise.lens.advise.measured import held_out
from phasewise.record import record

TRAINED, WANTED = 8192, 32_768
ORDER = ("fitted grid", "YaRN", "NTK", "PI", "Llama3-style", "base change")
RESULT = Path("results/advise/smollm2.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("checkpoint", "tokenizer", "texts"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--trained", type=int, default=TRAINED)
    parser.add_argument("--length", type=int, default=WANTED)
    parser.add_argument("--read", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no setting after")
    given = parser.parse_args()
    started = monotonic()
    corpus = load(f"text:{given.texts}", tokenizer=str(given.tokenizer))
    texts = sorted(path.name for path in given.texts.iterdir())
    corpus = replace(
        corpus, name=f"text:{', '.join(texts)}, {given.tokenizer.name}"
    )  # alike wherever they lie
    recipe = {
        "checkpoint": "SmolLM2-135M-Instruct",
        "texts": texts,
        "trained": given.trained,
        "length": given.length,
        "read": given.read,
        "dtype": "bfloat16",
    }
    found: dict[str, object] = {"advice": None, "measured": {}}
    if given.out.exists():
        found = json.loads(given.out.read_text(encoding="utf-8"))["values"]
    if found["advice"] is None:
        wanted = Wanted(length=given.length, trained_length=given.trained, measure=None, read=given.read)
        advice = advise(given.checkpoint, corpus, wanted, dtype="bfloat16")
        found["advice"] = advice.model_dump(mode="json")
        record(given.out, recipe=recipe, values=found)
    advice = Advice.model_validate(found["advice"])
    measured = found["measured"]
    assert isinstance(measured, dict)
    print(
        f"predicted: {[one.option.kind for one in advice.options]}, {monotonic() - started:.0f} s", flush=True
    )
    model = open_language_model(given.checkpoint, dtype="bfloat16")
    text = held_out(corpus, "test", wanted=given.length, tokens=given.length)
    for name, rule, length in settings(advice, given.trained, given.length):
        if name in measured:
            continue
        if monotonic() - started > given.seconds:
            break
        served = model if rule is None else model.served(rule)
        batches = windows(text, "test", length=length)
        loss: Measurement = measure(served, batches, length=length, stride=length, device=torch.device("cpu"))
        measured[name] = loss.model_dump(mode="json")
        record(given.out, recipe=recipe, values=found)
        print(f"{name}: {loss.loss:.4f}, {monotonic() - started:.0f} s", flush=True)


def settings(advice: Advice, trained: int, wanted: int) -> Iterator[tuple[str, AnyFrequencies | None, int]]:
    """What to measure, in the order of what it tells."""
    yield "leave alone, own length", None, trained
    yield "leave alone", None, wanted
    rules = {one.option.kind: one.option.rule for one in advice.options}
    for kind in ORDER:
        yield kind, rules[kind], wanted


if __name__ == "__main__":
    main()
