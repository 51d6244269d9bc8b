"""Rows shared by several GPUs: tokens a second, peak memory, and losses beside those of one GPU.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node N -m experiments.context_parallel results/parallel/h200-xN.json

Each case is a training of a few steps by the ordinary trainer, every row shared by all N processes; with N = 1, or
without torchrun, by one that has it whole. A case is written as soon as it is measured, and a second call takes up
those that are not. NVLink multicast stays off: the recipe says whether it was. Without a GPU the same runs through
gloo, which shows that it works and no more; give small --lengths and a small --width then.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from experiments.several_gpus import Rows, fresh, now, peak
from phasewise.data import Corpus, load
from phasewise.encodings import named
from phasewise.model import ModelConfig
from phasewise.model.parallel import Sharding
from phasewise.train.prefetch import ahead
from phasewise.train.processes import Processes, join, leave, shared_rows
from phasewise.train.recipe import TrainRecipe
from phasewise.train.trainer import Trainer

WARM_UP = 1
GATHERINGS = 2
"""Of keys and values in a step: forward and backward."""


@dataclass(frozen=True)
class Case:
    """encoding at length, by so many processes; recompute: blocks are computed again in the backward pass."""

    encoding: str
    length: int
    processes: int
    recompute: bool


def cases(encodings: list[str], lengths: list[int], processes: int) -> Iterator[Case]:
    """Shorter lengths first, and what is not recomputed at the shortest alone."""
    for length in lengths:
        for encoding in encodings:
            yield Case(encoding, length, processes, recompute=True)
    for encoding in encodings:
        yield Case(encoding, lengths[0], processes, recompute=False)


def measured(
    case: Case, corpus: Corpus, model: ModelConfig, timed: int, here: Processes
) -> dict[str, object]:
    """Losses and gradient norms of the first steps, tokens a second, and the most memory that a process used."""
    recipe = TrainRecipe(
        model=model.model_copy(update={"encoding": named(case.encoding)}),
        seed=0,
        context=case.length,
        batch_size=1,
        steps=WARM_UP + timed,
        warmup=0,
        precision="bfloat16" if here.device.type == "cuda" else "float32",
        recompute=case.recompute,
        context_processes=case.processes,
    )
    fresh(here.device)
    trainer, readings, seconds = Trainer(recipe, here), [], []
    with ahead(recipe, corpus, here, start=0) as steps:
        for step, parts in enumerate(steps):
            started = now(here.device)
            readings.append(trainer.step(step, parts).tolist())
            seconds.append(now(here.device) - started)
    memory = peak(here.device)
    losses, norms = zip(*readings, strict=True)
    sharding = shared_rows(recipe, here)
    alone = 0.0 if sharding is None else exchange(sharding, recipe, here.device)
    return {
        "losses": losses,
        "gradient_norms": norms,
        "seconds": seconds[WARM_UP:],
        "tokens_per_second": case.length / median(seconds[WARM_UP:]),
        "exchange_seconds": alone,
        "peak_gib": memory,
    }


def exchange(sharding: Sharding, recipe: TrainRecipe, device: torch.device, *, repeats: int = 3) -> float:
    """Seconds that all exchanges of keys, values and their gradients in one step take when nothing else runs."""
    model, narrow = recipe.model, torch.bfloat16 if recipe.precision == "bfloat16" else torch.float32
    shape = 1, recipe.context, model.kv_heads, model.head_dim
    whole = torch.randn(shape, device=device, dtype=narrow).transpose(1, 2)
    mine = sharding.layout.split(whole, dim=2)
    seconds = []
    for _ in range(repeats + 1):
        started = now(device)
        for _ in range(2):  # keys and values
            for _ in range(GATHERINGS):
                sharding.gather(mine, dim=2)
            sharding.reduce(whole, dim=2)
        seconds.append(now(device) - started)
    return model.layers * median(seconds[1:])


def main(
    out: Path, encodings: list[str], lengths: list[int], width: int, layers: int, heads: int, timed: int
) -> None:
    here = join("cuda" if torch.cuda.is_available() else "cpu")
    corpus = load("austen")
    model = ModelConfig(
        vocab_size=corpus.vocab_size, width=width, layers=layers, heads=heads, encoding=named("nope")
    )
    kept = Rows(
        out,
        {
            "model": model.model_dump(mode="json", exclude={"encoding"}),
            "batch_size": 1,
            "warm_up": WARM_UP,
            "timed": timed,
            "seeds": [0],
        },
        here,
    )
    for case in cases(encodings, lengths, here.size):
        if case in kept:
            continue
        try:
            found = measured(case, corpus, model, timed, here)
        except torch.OutOfMemoryError:
            found = {"out_of_memory": True}
        kept.add(case, found)
    leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.context_parallel", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--encodings", nargs="+", default=["rope", "pope", "tapa"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[65_536, 262_144])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--timed", type=int, default=3, help="steps timed, after one that is not")
    main(**vars(parser.parse_args()))
