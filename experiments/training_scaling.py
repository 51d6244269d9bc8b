"""Tokens a second of `phasewise train`'s loop on any number of GPUs, under DDP and FSDP2.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node N -m experiments.training_scaling results/parallel/training-xN.json

Each process has as many rows as the one process alone has (weak scaling), so that at every N a GPU does the same
arithmetic; what is lost is lost to the exchange. NVLink multicast stays off: the recipe says whether it was.
Without a GPU the same runs through gloo, which shows that it works and no more; give a small --context then.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import torch

from experiments.several_gpus import Rows, fresh, now, peak
from experiments.training_speed import Sizes, corpus
from phasewise.bench.gpt2 import VOCABULARY
from phasewise.bench.timing import Time
from phasewise.train.loop import sitting
from phasewise.train.processes import Processes, join, leave
from phasewise.train.recipe import RunRecipe, Weights
from phasewise.train.speed import utilisation

SEED = 0
WARM_UP = 4
"""Steps; the first compile, and DDP lays out its buckets anew after one."""


@dataclass(frozen=True)
class Case:
    """A model of a named size, how processes share it, how many they are, and the rows of each."""

    size: str
    sharding: Weights
    processes: int
    rows: int


@dataclass(frozen=True)
class Timing:
    """The length of a row, and how many samples of how many steps are timed."""

    context: int
    samples: int
    steps: int


def cases(
    sizes: Sequence[str], rows: Sequence[int], shardings: Sequence[Weights], processes: int
) -> Iterator[Case]:
    """Of one process there is nothing to share."""
    for sharding in shardings if processes > 1 else ("replicated",):
        for size, each in zip(sizes, rows, strict=True):
            yield Case(size, sharding, processes, each)


def measured(case: Case, timing: Timing, here: Processes, folder: Path) -> dict[str, Any]:
    """Tokens a second, MFU, milliseconds a step with their spread, memory, and what was lost first and last."""
    given = RunRecipe(
        size=case.size, sharding=case.sharding, context=timing.context, batch_size=case.rows * case.processes,
        seed=SEED, steps=10_000, checkpoint_every=10_000, warmup=100, learning_rate=6e-4,
        final_learning_rate=6e-5, beta2=0.95, precision="bfloat16", compile=True,
    ).training(vocab_size=VOCABULARY)  # fmt: skip
    fresh(here.device)
    samples: list[float] = []
    started = now(here.device)
    with sitting(given, corpus(Sizes(), 4 * timing.context), folder, device=here) as this:
        steps = this.steps()
        for _ in islice(steps, WARM_UP):
            pass
        ready = now(here.device) - started
        for _ in range(timing.samples):
            started = now(here.device)
            for _ in islice(steps, timing.steps):
                pass
            samples.append((now(here.device) - started) * 1000 / timing.steps)
        losses = this.losses
    time = Time.of(samples)
    speed = given.batch_size * timing.context * 1000 / time.median
    return {
        "tokens_per_second": speed,
        "mfu": utilisation(given.model, timing.context, speed / case.processes, here.device),
        "ms_per_step": asdict(time),
        "seconds_to_ready": ready,
        "peak_gib": peak(here.device),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main(
    out: Path, sizes: Sequence[str], rows: Sequence[int], shardings: Sequence[Weights], timing: Timing
) -> None:
    here = join("cuda" if torch.cuda.is_available() else "cpu")
    kept = Rows(
        out,
        {
            "what": "training steps of phasewise train's loop; as many rows a process at every number of processes",
            "encoding": "rope", "vocabulary": VOCABULARY, "data": "zipf", "precision": "bfloat16", "compile": True,
            "warm_up": WARM_UP, "seeds": [SEED], **asdict(timing),
        },
        here,
    )  # fmt: skip
    for case in cases(sizes, rows, shardings, here.size):
        if case in kept:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(here.gather(name)[0])  # the first one's, for all
            try:
                found = measured(case, timing, here, folder)
            except RuntimeError as error:  # one that fails is recorded as failed, and the others are measured
                found = {"failed": repr(error)[:2000]}
            kept.add(case, found)
    leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.training_scaling", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", nargs="+", default=["124M", "355M"])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 32], help="of each process, by size")
    parser.add_argument("--shardings", nargs="+", choices=get_args(Weights), default=get_args(Weights))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="in a sample")
    given = parser.parse_args()
    main(
        given.out, given.sizes, given.rows, given.shardings, Timing(given.context, given.samples, given.steps)
    )
