"""Rows shared by several GPUs: tokens a second, peak memory, and losses beside those of one GPU.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node N -m experiments.context_parallel results/parallel/h200-xN.json

Each case is a training of a few steps by the ordinary trainer, every row shared by all N processes, or taken whole
by the first of them ("alone"). A case is written as soon as it is measured, and a second call takes up those that
are not. NVLink multicast stays off (NCCL_NVLS_ENABLE=0): the recipe says whether it was. Without a GPU the same runs
through gloo, which shows that it works and no more; give small --lengths and a small --width then.
"""

import argparse
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from phasewise.data import Corpus, load
from phasewise.encodings import named
from phasewise.model import ModelConfig
from phasewise.record import record
from phasewise.train.prefetch import ahead
from phasewise.train.processes import Processes, join, leave
from phasewise.train.recipe import TrainRecipe
from phasewise.train.trainer import Trainer

WARM_UP, TIMED = 1, 3


@dataclass(frozen=True)
class Case:
    """encoding at length, by all processes or one; recompute: blocks are computed again in the backward pass."""

    encoding: str
    length: int
    processes: int
    recompute: bool


def cases(encodings: list[str], lengths: list[int], processes: int) -> Iterator[Case]:
    """All sharing processes first, shorter lengths first, and one process last: what matters most comes first."""
    for length in lengths:
        for encoding in encodings:
            yield Case(encoding, length, processes, recompute=True)
    for encoding in encodings:
        yield Case(encoding, lengths[0], processes, recompute=False)
    if processes > 1:
        for length in lengths:
            for encoding in encodings:
                yield Case(encoding, length, 1, recompute=True)


def measured(case: Case, corpus: Corpus, model: ModelConfig, here: Processes) -> dict[str, object]:
    """Losses and gradient norms of the first steps, tokens a second, and the most memory that a process used."""
    cuda = here.device.type == "cuda"
    who = here if case.processes > 1 else Processes(rank=0, size=1, device=here.device)
    recipe = TrainRecipe(
        model=model.model_copy(update={"encoding": named(case.encoding)}),
        seed=0,
        context=case.length,
        batch_size=1,
        steps=WARM_UP + TIMED,
        warmup=0,
        precision="bfloat16" if cuda else "float32",
        recompute=case.recompute,
        context_processes=case.processes,
    )
    gc.collect()  # a trainer's blocks refer to themselves
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer, readings, seconds = Trainer(recipe, who), [], []
    with ahead(recipe, corpus, who, start=0) as steps:
        for step, parts in enumerate(steps):
            if cuda:
                torch.cuda.synchronize()
            started = perf_counter()
            readings.append(trainer.step(step, parts).tolist())
            seconds.append(perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    losses, norms = zip(*readings, strict=True)
    return {
        "losses": losses,
        "gradient_norms": norms,
        "seconds": seconds[WARM_UP:],
        "tokens_per_second": case.length / median(seconds[WARM_UP:]),
        "peak_gib": peak,
    }


def main(out: Path, encodings: list[str], lengths: list[int], width: int, layers: int, heads: int) -> None:
    here = join("cuda" if torch.cuda.is_available() else "cpu")
    corpus = load("austen")
    model = ModelConfig(
        vocab_size=corpus.vocab_size, width=width, layers=layers, heads=heads, encoding=named("nope")
    )
    rows = json.loads(out.read_text())["values"] if out.exists() else []
    known = [row["case"] for row in rows]
    for case in cases(encodings, lengths, here.size):
        if asdict(case) in known:
            continue
        found: dict[str, object] = {}
        if case.processes > 1 or here.first:
            try:
                found = measured(case, corpus, model, here)
            except torch.OutOfMemoryError:
                found = {"out_of_memory": True}
        every = [some for some in here.gather(found) if some]
        peaks = [some["peak_gib"] for some in every if some.get("peak_gib") is not None]
        rows.append({"case": asdict(case), **every[0], **({"peak_gib": max(peaks)} if peaks else {})})
        if here.first:
            record(
                out,
                recipe={
                    "model": model.model_dump(mode="json", exclude={"encoding"}),
                    "batch_size": 1,
                    "warm_up": WARM_UP,
                    "timed": TIMED,
                    "seeds": [0],
                    "processes": here.size,
                    "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE"),
                },
                values=rows,
                device=here.device,
            )
            shown = {
                name: value for name, value in rows[-1].items() if name in ("tokens_per_second", "peak_gib")
            }
            print(case, shown, flush=True)
    leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--encodings", nargs="+", default=["rope", "pope", "tapa"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[65_536, 262_144])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    main(**vars(parser.parse_args()))
