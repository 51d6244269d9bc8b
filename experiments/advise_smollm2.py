"""Advice for SmolLM2-135M-Instruct at four times its length, measured, into results/advise/smollm2.json.

Run with the folder of the checkpoint (a .gguf, or what `experiments.inspect_smollm2` converts), its tokenizer.json,
and a folder of long texts, each file a document: `python -m experiments.advise_smollm2 CHECKPOINT TOKENIZER TEXTS`.
A second part measures ramps of several widths, with and without YaRN's factor, on part of the same tokens.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import numpy as np
import torch

from phasewise.data import Corpus, load
from phasewise.frequencies import Explicit, Geometric
from phasewise.hf.language_model import open_language_model
from phasewise.interrupt import interruptible
from phasewise.lens.advise.advice import Advice, Wanted, advise
from phasewise.lens.advise.measured import Bench, Trial
from phasewise.record import record

TRAINED, WANTED = 8192, 32_768
MOST_TURNS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
RESULT = Path("results/advise/smollm2.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("checkpoint", "tokenizer", "texts"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--length", type=int, default=WANTED)
    parser.add_argument("--trained", type=int, default=TRAINED)
    parser.add_argument("--examples", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after, keeping what is done")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    corpus = load(f"text:{given.texts}", tokenizer=str(given.tokenizer))
    documents = {name: split.lengths.tolist() for name, split in corpus.splits.items()}
    recipe = {
        **{name: value.name if isinstance(value, Path) else value for name, value in vars(given).items()},
        "seconds": str(given.seconds),
        "texts": sorted(path.name for path in given.texts.iterdir()),
        "tokens of documents": documents,
    }
    trial = Trial(tokens=given.tokens, examples=given.examples)
    wanted = Wanted(length=given.length, trained_length=given.trained, measure=trial)
    started = monotonic()
    with interruptible() as stop:
        found = advise(
            given.checkpoint,
            corpus,
            wanted,
            dtype=given.dtype,
            device=given.device,
            stop=lambda: stop() or monotonic() - started > given.seconds,
        )
        write(given.out, recipe, found, {}, given.device)
        said(found)
        print(f"{monotonic() - started:.0f} s", flush=True)
        more: dict[str, list[float]] = {}
        for name, losses in ramps(given, corpus):
            more[name] = losses
            write(given.out, recipe, found, more, given.device)
            print(name, losses, flush=True)
            if stop() or monotonic() - started > given.seconds:
                break


def write(path: Path, recipe: dict, found: Advice, more: dict, device: str) -> None:
    values = {"advice": found.model_dump(mode="json"), "ramps": more}
    record(path, recipe=recipe, values=values, device=device)


def ramps(given: argparse.Namespace, corpus: Corpus) -> Iterator[tuple[str, list[float]]]:
    """Loss at the trained and the wanted length, by the turns from which rates are kept and the factor."""
    model = open_language_model(given.checkpoint, dtype=given.dtype, device=given.device)
    rule, channels = model.frequencies, model.channels
    assert isinstance(rule, Geometric)
    assert channels is not None
    rates = rule.rates(channels).numpy()
    stretch = given.length / given.trained
    lengths = (given.trained, given.length)
    trial = Trial(tokens=max(given.length, given.tokens // 2), lengths=lengths, examples=0)
    bench = Bench(
        model,
        corpus,
        trial,
        trained=given.trained,
        wanted=given.length,
        device=torch.device(given.device),
    )
    turns = rates * given.trained / (2 * math.pi)
    for most in MOST_TURNS:
        kept = np.log(turns) / math.log(most) if most > 1 else (turns >= 1).astype(float)
        slowed = rates / stretch ** np.clip(1 - kept, 0, 1)
        for factor in (1.0, 0.1 * math.log(stretch) + 1):
            ramp = Explicit(values=tuple(slowed.tolist()), attention=factor)
            measured = bench.measure(ramp, lambda: None)
            yield f"{most:g} turns, factor {factor:.4f}", [measured.loss(length) for length in lengths]


def said(found: Advice) -> None:
    for one in found.options:
        losses = one.measured and [round(loss.loss, 4) for loss in one.measured.losses]
        print(one.option.kind, one.option.rank, losses, one.measured and one.measured.found(found.wanted))
    print(found.verdict.kind, *found.verdict.reasons, *found.disagreements, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
