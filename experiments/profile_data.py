"""Profiles of text, music and genome side by side, and what a profile costs, into results/profile.

python -m experiments.profile_data data austen jsb:FILE.npz genome:20.fa.gz text:NOVELS
python -m experiments.profile_data speed
"""

import resource
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
from rich.console import Console

from experiments.command import parser
from phasewise.lens.dependency import dependency, log_spaced
from phasewise.lens.profile import profile
from phasewise.lens.profile_report import label, table
from phasewise.record import record

RESULTS = Path("results/profile")
TOKENS, DOCUMENT, LONGEST = 10_000_000, 50_000, 16_384


def data(names: Sequence[str]) -> None:
    """One file a corpus, named for it."""
    for name in names:
        found = profile([name], console=Console(stderr=True))
        (corpus,) = found.corpora
        Console().print(table(found))
        file = RESULTS / f"{label(corpus).partition('.')[0].replace(':', '-')}.json"
        recipe = {"corpus": label(corpus), "shuffle": found.shuffle, "seed": found.seed}
        # The path is the machine's; source and hash say what was read.
        values = corpus.model_copy(update={"name": label(corpus)}).model_dump(mode="json")
        record(file, recipe=recipe, values=values)


def speed() -> None:
    """10 million tokens of 256 classes at 48 distances, in documents of 50 000."""
    random = np.random.default_rng(0)
    tokens = (random.zipf(1.3, TOKENS) % 256).astype(np.uint8)
    distances = log_spaced(LONGEST)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, processor = perf_counter(), process_time()
    curve = dependency(tokens, np.full(TOKENS // DOCUMENT, DOCUMENT), distances=distances)
    curve.band()
    values = {
        "tokens": TOKENS,
        "distances": len(distances),
        "pairs": int(curve.pairs.sum()),
        "wall_seconds": perf_counter() - wall,
        "processor_seconds": process_time() - processor,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "peak_gib_before": before / 2**20,
    }
    recipe = {"seed": 0, "classes": 256, "document": DOCUMENT, "longest": LONGEST, "cores_used": 1}
    record(RESULTS / "speed.json", recipe=recipe, values=values)
    Console().print(values)


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = parser("profile_data", __doc__)
    arguments.add_argument("part", choices=("data", "speed"))
    arguments.add_argument("sources", nargs="*")
    given = arguments.parse_args()
    data(given.sources) if given.part == "data" else speed()
