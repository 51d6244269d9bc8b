"""Steps a second of the Indirect Indexing model: the ordinary loop, and models side by side, in one run.

    python -m experiments.small_model_speed results/small-models/speed.json

The ordinary loop takes the recipe as it stands (bfloat16 products, compiled blocks) and in plain float32. Times
are medians over blocks of steps, after a first block that compiles and captures; batches are made on the CPU in
the same process in every case.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

from experiments import papers
from phasewise.data import load
from phasewise.device import usable
from phasewise.record import record
from phasewise.train.loop import train
from phasewise.train.recipe import TrainRecipe
from phasewise.train.side_by_side import train_side_by_side

BLOCK, BLOCKS = 50, 5


class Enough(Exception):
    """All blocks are timed."""


class Clock:
    """Seconds between the ends of blocks; raises Enough after the last."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def tick(self) -> None:
        self.ends.append(perf_counter())
        if len(self.ends) > BLOCKS:
            raise Enough

    @property
    def steps_per_second(self) -> float:
        spans = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        return BLOCK / statistics.median(spans)


def ordinary(recipe: TrainRecipe, device: str) -> float:
    clock = Clock()

    def on_step(steps: int, _loss: float) -> None:
        if steps % BLOCK == 0:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        try:
            train(recipe, load("indirect-indexing"), Path(folder), device=usable(device), on_step=on_step)
        except Enough:
            return clock.steps_per_second
    raise ValueError(f"{recipe.steps} steps are too few to time: use {BLOCK * (BLOCKS + 1)}")


def together(recipes: Mapping[str, TrainRecipe], device: str) -> float:
    """Model-steps a second of all models together."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        try:
            train_side_by_side(
                recipes,
                load("indirect-indexing"),
                Path(folder),
                device=usable(device),
                block=BLOCK,
                on_block=lambda _steps, _models: clock.tick(),
            )
        except Enough:
            return len(recipes) * clock.steps_per_second
    raise ValueError(f"the recipes have too few steps to time: use {BLOCK * (BLOCKS + 1)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    corpus = load("indirect-indexing")
    pope, rope = (papers.recipe("pope-indirect-indexing", name, corpus) for name in ("pope", "rope"))
    plain = pope.model_copy(update={"precision": "float32", "compile": False})
    many = {
        f"{name}-{seed}": recipe.model_copy(update={"seed": seed})
        for name, recipe in (("pope", pope), ("rope", rope))
        for seed in range(3)
    }
    pope_alone = {"pope-0": many["pope-0"]}
    pope_seeds = {name: recipe for name, recipe in many.items() if name.startswith("pope")}
    told = {"recipe": pope.model_dump(mode="json"), "block": BLOCK, "blocks": BLOCKS}
    values = {}
    for name, measure in {
        "pope, side by side, 1 model": lambda: together(pope_alone, given.device),
        "pope, side by side, 3 seeds": lambda: together(pope_seeds, given.device),
        "pope and rope, side by side, 3 seeds each": lambda: together(many, given.device),
        "pope, ordinary loop": lambda: ordinary(pope, given.device),
        "pope, ordinary loop, float32": lambda: ordinary(plain, given.device),
    }.items():
        values[name] = {"model_steps_per_second": measure()}
        print(name, values[name], flush=True)
        record(given.out, recipe=told, values=values, device=given.device)


if __name__ == "__main__":
    main()
