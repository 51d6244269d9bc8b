"""Indirect Indexing at the paper's configuration (arXiv 2509.10534, table 1), models trained side by side.

    python -m experiments.indirect_indexing results/indirect-indexing RUN --encodings pope --seeds 0 1 2

The rule, one for every encoding and seed and fixed before a test example was read: the weights that count are
the running average of the last two thousand steps or so, and of the checkpoints, one every 4000 steps, the one
with the highest accuracy on the first 2000 validation examples, the later of equals. Its accuracy on all test
examples is the result; beside it stand the last checkpoint's and those without averaging. A seed counts as
solved from 90 %.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from experiments import papers
from phasewise.data import Corpus, load
from phasewise.device import usable
from phasewise.interrupt import interruptible
from phasewise.model import Transformer
from phasewise.record import record, replacing
from phasewise.train.objective import autocast
from phasewise.train.recipe import TrainRecipe
from phasewise.train.side_by_side import train_side_by_side

RECIPE = "pope-indirect-indexing"
PAPER = {"rope": {"mean": 11.16, "spread": 2.45}, "pope": {"mean": 94.82, "spread": 2.91}}
BLOCK = 100
KEPT = 0.95
"""What a block leaves of the average before it: a memory of 20 blocks, 2000 steps."""
EVERY = 4000
WATCHED = 2000
SOLVED = 0.9
ROWS = 2000


@dataclass(frozen=True)
class Examples:
    """Rows of tokens, int64 [n, T], the place of each row's answer and the answer, int64 [n]."""

    tokens: Tensor
    at: Tensor
    answers: Tensor

    @classmethod
    def of(cls, corpus: Corpus, split: str, device: torch.device, count: int | None = None) -> "Examples":
        documents = corpus.split(split)
        rows = documents.take(np.arange(len(documents) if count is None else count))
        tokens = np.zeros((len(rows), max(map(len, rows)) - 1), dtype=np.int64)
        for row, document in zip(tokens, rows, strict=True):
            row[: len(document) - 1] = document[:-1]
        at = np.array([len(document) - 2 for document in rows])
        answers = np.array([document[-1] for document in rows], dtype=np.int64)
        return cls(*(torch.from_numpy(array).to(device) for array in (tokens, at, answers)))


@torch.no_grad()
def accuracy(model: Transformer, examples: Examples) -> float:
    """The share of examples whose answer is the model's first choice, as trained: matrices in bfloat16 on CUDA."""
    model.eval()
    right = 0
    device = examples.tokens.device
    with torch.compiler.set_stance("force_eager"), autocast(device, device.type == "cuda"):
        for tokens, at, answers in zip(
            *(x.split(ROWS) for x in (examples.tokens, examples.at, examples.answers)), strict=True
        ):
            logits = model(tokens)[torch.arange(len(at), device=device), at]
            right += int((logits.argmax(-1) == answers).sum())
    return right / len(examples.answers)


@dataclass
class Watch:
    """The running average of a model's weights, both's accuracy over the steps, and the best of each."""

    model: Transformer
    watched: Examples
    curve: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, tuple[float, int, dict[str, Tensor]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.average = Transformer(self.model.config).to(self.watched.tokens.device)
        self.average.load_state_dict(self.model.state_dict())

    def block(self, steps: int, last: bool) -> None:
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(weight, 1 - KEPT)
        if steps % EVERY and not last:
            return
        point: dict[str, float] = {"steps": steps}
        for name, model in self.candidates().items():
            point[name] = accuracy(model, self.watched)
            if name not in self.best or point[name] >= self.best[name][0]:
                weights = {key: value.clone() for key, value in model.state_dict().items()}
                self.best[name] = (point[name], steps, weights)
        self.curve.append(point)

    def candidates(self) -> dict[str, Transformer]:
        return {"average": self.average, "weights": self.model}

    def results(self, splits: Mapping[str, Examples]) -> dict[str, object]:
        """Accuracy of the last and the best checkpoint, averaged and not."""
        found: dict[str, object] = {"curve": self.curve}
        for name, model in self.candidates().items():
            last = {split: accuracy(model, examples) for split, examples in splits.items()}
            _, steps, weights = self.best[name]
            model.load_state_dict(weights)
            best = {split: accuracy(model, examples) for split, examples in splits.items()}
            found[name] = {"last": last, "best": {"steps": steps, **best}}
        return found

    def save(self, folder: Path, steps: int) -> None:
        """Keep what a resumed run needs beside its checkpoint, and what the one before it needs."""
        earlier = sorted(folder.glob("watch-*.pt"))
        state = {"average": self.average.state_dict(), "curve": self.curve, "best": self.best}
        with replacing(folder / f"watch-{steps:08d}.pt") as unfinished:
            torch.save(state, unfinished)
        for path in earlier[:-1]:
            path.unlink()

    def load(self, folder: Path, steps: int) -> None:
        """Go on from what was kept at a checkpoint."""
        path = folder / f"watch-{steps:08d}.pt"
        if not path.exists():
            raise ValueError(f"{path} is missing: delete {folder.parent} to train these models again")
        state = torch.load(path, map_location=self.watched.tokens.device, weights_only=True)
        self.average.load_state_dict(state["average"])
        self.curve, self.best = state["curve"], state["best"]


def run(
    recipes: Mapping[str, TrainRecipe],
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, dict[str, object]]:
    """Train side by side; each model's curve and accuracies by the rule. An interrupted run goes on from there."""
    corpus = load("indirect-indexing")
    watched = Examples.of(corpus, "validation", device, WATCHED)
    watches: dict[str, Watch] = {}
    done, started = 0, perf_counter()

    def keep() -> None:
        for name, watch in watches.items():
            watch.save(folder / name, done)

    def on_block(steps: int, models: Mapping[str, Transformer]) -> None:
        nonlocal done
        for name, model in models.items():
            if name not in watches:
                watches[name] = Watch(model, watched)
                if steps > BLOCK:
                    watches[name].load(folder / name, steps - BLOCK)
            watches[name].block(steps, steps == recipes[name].steps)
        done = steps
        if all(steps % recipe.checkpoint_every == 0 for recipe in recipes.values()):
            keep()
        if steps % EVERY == 0:
            latest = {name: f"{watch.curve[-1]['average']:.3f}" for name, watch in watches.items()}
            print(f"{perf_counter() - started:.0f} s, step {steps}: {latest}", flush=True)

    def stopping() -> bool:
        asked = stop()
        if asked:
            keep()
        return asked

    trained = train_side_by_side(
        recipes, corpus, folder, device=device, block=BLOCK, on_block=on_block, stop=stopping
    )
    splits = {split: Examples.of(corpus, split, device) for split in ("validation", "test")}
    return {
        name: {"seed": recipes[name].seed, "train_loss": trained[name].loss, **watch.results(splits)}
        for name, watch in watches.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path, help="of the runs, to go on from when interrupted")
    parser.add_argument("--encodings", nargs="+", default=["pope", "rope"], choices=sorted(PAPER))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    device, corpus = usable(given.device), load("indirect-indexing")
    recipes = {
        f"{name}-seed{seed}": papers.recipe(RECIPE, name, corpus, seed=seed)
        for name in given.encodings
        for seed in given.seeds
    }
    with interruptible() as stop:
        found = run(recipes, given.folder, device, stop)
    for name in given.encodings:
        seeds = [found[f"{name}-seed{seed}"] for seed in given.seeds]
        tests = [seed["average"]["best"]["test"] for seed in seeds]  # type: ignore[index]
        values = {
            "test_accuracy": {"seeds": tests, "mean": statistics.fmean(tests)},
            "solved": sum(test >= SOLVED for test in tests),
            "paper": PAPER[name],
            "seeds": seeds,
        }
        recipe = recipes[f"{name}-seed{given.seeds[0]}"].model_dump(mode="json", exclude={"seed"})
        told = {"training": recipe, "seeds": given.seeds, "rule": __doc__.split("\n\n")[2], "block": BLOCK}
        record(given.out / f"{name}.json", recipe=told, values=values, device=device)
        print(name, values["test_accuracy"], flush=True)


if __name__ == "__main__":
    main()
