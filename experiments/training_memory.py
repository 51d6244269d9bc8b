"""Memory of a training step by length: `python -m experiments.training_memory results/training/memory-h200.json`.

Without a file, the table of docs/train.md is written from that one.

One row of the length, a model of 25 million parameters without its vocabulary of 8192, bfloat16 on float32 weights,
blocks as they are written and computed again in the backward pass. Each figure is written when it is measured.
"""

import gc
import json
from pathlib import Path
from typing import Any

import torch

from experiments.command import parser
from experiments.readme_figure import with_table
from phasewise.data import batch
from phasewise.data.corpus import Corpus, Documents
from phasewise.device import usable
from phasewise.encodings import named
from phasewise.model import ModelConfig
from phasewise.record import record
from phasewise.train.prefetch import ahead
from phasewise.train.processes import Processes
from phasewise.train.recipe import TrainRecipe
from phasewise.train.sizes import SIZES
from phasewise.train.trainer import Trainer

ENCODINGS, LENGTHS = ("rope", "pope", "tapa"), tuple(2**power for power in range(10, 18))
VOCABULARY = 8192
GIB = 2**30
RESULT, PAGE = Path("results/training/memory-h200.json"), Path("docs/train.md")


def recipe(encoding: str, length: int, *, recompute: bool, size: str = "25M") -> TrainRecipe:
    """The recipe of one step."""
    model = ModelConfig.model_validate(
        {**SIZES[size]._asdict(), "activation": "gelu", "vocab_size": VOCABULARY, "encoding": named(encoding)}
    )
    return TrainRecipe(
        model=model,
        context=length,
        batch_size=1,
        steps=2,
        warmup=1,
        precision="bfloat16",
        recompute=recompute,
    )


def peak(given: TrainRecipe, device: torch.device) -> float:
    """GiB that two steps hold at most, weights and optimizer among them."""
    tokens = torch.randint(VOCABULARY, (2 * given.context,)).numpy()
    documents = Documents.join([tokens], vocab_size=VOCABULARY)
    corpus = Corpus("random", "made", "none needed", "token", VOCABULARY, "", {"train": documents}, str)
    assert batch(corpus, "train", step=0, context=given.context, batch_size=1, seed=0).positions is None
    here = Processes(rank=0, size=1, device=device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(given, here)
    with ahead(given, corpus, here, start=0) as batches:
        for step, parts in enumerate(batches):
            trainer.step(step, parts)
    return torch.cuda.max_memory_allocated(device) / GIB


def main(out: Path) -> None:
    device = usable("cuda")
    measured: dict[str, dict[str, float]] = {}
    for recompute in (False, True):
        for encoding in ENCODINGS:
            name = f"{encoding}, recomputed" if recompute else encoding
            for length in LENGTHS:
                given = recipe(encoding, length, recompute=recompute)
                measured.setdefault(name, {})[str(length)] = peak(given, device)
                record(
                    out,
                    recipe=recipe(encoding, LENGTHS[0], recompute=recompute).model_dump(mode="json"),
                    values={"unit": "GiB at most, one row", "peaks": measured},
                    device=device,
                )
                print(f"{name} {length}: {measured[name][str(length)]:.3f} GiB", flush=True)


def table(document: dict[str, Any]) -> str:
    """The peaks by length, as Markdown."""
    peaks, model = document["values"]["peaks"], document["recipe"]["model"]
    lines = ["| GiB | " + " | ".join(f"{length // 1024}k" for length in LENGTHS) + " |"]
    lines.append("|---|" + "---:|" * len(LENGTHS))
    for name, of_lengths in peaks.items():
        cells = (f"{of_lengths[str(n)]:.2f}" if str(n) in of_lengths else "" for n in LENGTHS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Peak of two steps of one row, weights and optimizer among it; {model['layers']} layers of width "
        f"{model['width']}, bfloat16 on float32 weights, not compiled; recomputed: `--recompute`. `{RESULT}`: commit "
        f"{document['commit'][:10]}, {document['device']}. Rows after the first may hold up to 0.4 GiB that the case "
        "before them had not given back; the run was stopped in the fourth.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = parser("training_memory", __doc__)
    arguments.add_argument("out", type=Path, nargs="?")
    if out := arguments.parse_args().out:
        main(out)
    PAGE.write_text(with_table(PAGE.read_text(), table(json.loads(RESULT.read_text())), "training-memory"))
