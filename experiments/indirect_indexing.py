"""Indirect Indexing at the paper's configuration (arXiv 2509.10534, table 1), models trained side by side.

    python -m experiments.indirect_indexing PARTS RUN --models pope-0 rope-0

The rule, one for every encoding and seed and fixed before a test example was read: the weights that count are
the running average of the last two thousand steps or so, and of the checkpoints, one every 4000 steps, the one
with the highest accuracy on the first 2000 validation examples, the later of equals. Its accuracy on all test
examples is the result; beside it stands the last checkpoint's, averaged and not.

Each model writes PARTS/VARIANT-ENCODING-SEED.json as it goes; `experiments.indirect_indexing_report` joins them.
Interrupted, a training goes on from RUN.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments import papers
from phasewise.data import Corpus, load
from phasewise.device import usable
from phasewise.interrupt import interruptible
from phasewise.model import Transformer
from phasewise.record import record, replacing
from phasewise.train.objective import autocast
from phasewise.train.recipe import TrainRecipe
from phasewise.train.schedule import WarmupStableDecay
from phasewise.train.side_by_side import train_side_by_side

RULE = __doc__.split("\n\n")[2]
RECIPE = "pope-indirect-indexing"
VARIANTS: dict[str, dict[str, object]] = {
    "paper": {},
    "gated-phases": {"activation": "swiglu", "encoding_rate": 10.0},
    "steady": {"schedule": WarmupStableDecay(decay=0.1)},
    "steady-fast": {"schedule": WarmupStableDecay(decay=0.1), "learning_rate": 4e-4},
}
"""Changes of the paper's recipe that cost neither steps, rows nor parameters; docs/small-models.md has their trials."""
BLOCK = 100
CHECKPOINT_EVERY = 25_000
KEPT = 0.95
"""What a block leaves of the average before it: a memory of 20 blocks, 2000 steps."""
EVERY = 4000
WATCHED = 2000
ROWS = 2000

Point = dict[str, float]
"""Steps; of the average and of the weights as they are, accuracy and loss on what is watched; accuracy on the test
examples, of the average where it is the highest so far, of both at the end."""


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
def measure(model: Transformer, examples: Examples) -> tuple[float, float]:
    """The share of examples whose answer is the model's first choice, and the answers' mean loss in nats.

    As trained: matrices are bfloat16 on CUDA.
    """
    model.eval()
    device = examples.tokens.device
    right, loss = (torch.zeros((), device=device) for _ in range(2))
    with torch.compiler.set_stance("force_eager"), autocast(device, device.type == "cuda"):
        for tokens, at, answers in zip(
            *(x.split(ROWS) for x in (examples.tokens, examples.at, examples.answers)), strict=True
        ):
            hidden = model.hidden(tokens)[torch.arange(len(at), device=device), at]
            logits = model.logits(hidden).float()
            right += (logits.argmax(-1) == answers).sum()
            loss += F.cross_entropy(logits, answers, reduction="sum")
    return right.item() / len(examples.answers), loss.item() / len(examples.answers)


@dataclass
class Watch:
    """The running average of a model's weights, and how both did so far."""

    model: Transformer
    watched: Examples
    test: Examples
    curve: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.average = Transformer(self.model.config).to(self.watched.tokens.device)
        self.average.load_state_dict(self.model.state_dict())

    def block(self, steps: int, last: bool) -> bool:
        """Take in the weights after a block; whether the curve has a new point."""
        with torch.no_grad():
            for mean, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(weight, 1 - KEPT)
        if steps % EVERY and not last:
            return False
        point: Point = {"steps": steps}
        for name, model in {"average": self.average, "weights": self.model}.items():
            point[name], point[f"{name}_loss"] = measure(model, self.watched)
        leads = all(point["average"] >= earlier["average"] for earlier in self.curve)
        if leads or last:
            point["average_test"], _ = measure(self.average, self.test)
        if last:
            point["weights_test"], _ = measure(self.model, self.test)
        self.curve.append(point)
        return True

    def save(self, folder: Path, steps: int) -> None:
        """Keep what a resumed run needs beside its checkpoint, and what the one before it needs."""
        path = folder / f"watch-{steps:08d}.pt"
        earlier = [other for other in sorted(folder.glob("watch-*.pt")) if other != path]
        with replacing(path) as unfinished:
            torch.save({"average": self.average.state_dict(), "curve": self.curve}, unfinished)
        for other in earlier[:-1]:
            other.unlink()

    def load(self, folder: Path, steps: int) -> None:
        """Go on from what was kept at a checkpoint; what was kept of steps that will be taken again is not."""
        path = folder / f"watch-{steps:08d}.pt"
        if not path.exists():
            raise ValueError(f"{path} is missing: delete {folder.parent} to train these models again")
        state = torch.load(path, map_location=self.watched.tokens.device, weights_only=True)
        self.average.load_state_dict(state["average"])
        self.curve = state["curve"]
        for ahead in folder.glob("watch-*.pt"):
            if ahead.name > path.name:
                ahead.unlink()


def best(curve: list[Point]) -> Point:
    """The point that the rule chooses: the highest accuracy on what is watched, the later of equals."""
    return max(curve, key=lambda point: (point["average"], point["steps"]))


def run(
    recipes: Mapping[str, TrainRecipe],
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    told: Callable[[str, list[Point]], None] = lambda _name, _curve: None,
) -> dict[str, list[Point]]:
    """Train side by side; the curve of each model, of which `told` hears as it grows.

    An interrupted run goes on from its last checkpoint, and its curves from the points before that.
    """
    corpus = load("indirect-indexing")
    watched = Examples.of(corpus, "validation", device, WATCHED)
    test = Examples.of(corpus, "test", device)
    watches: dict[str, Watch] = {}
    done, started = 0, perf_counter()

    def keep() -> None:
        for name, watch in watches.items():
            watch.save(folder / name, done)

    def on_block(steps: int, models: Mapping[str, Transformer]) -> None:
        nonlocal done
        for name, model in models.items():
            if name not in watches:
                watches[name] = Watch(model, watched, test)
                if steps > BLOCK:
                    watches[name].load(folder / name, steps - BLOCK)
            if watches[name].block(steps, steps == recipes[name].steps):
                told(name, watches[name].curve)
                print(f"{perf_counter() - started:.0f} s: {name} {watches[name].curve[-1]}", flush=True)
        done = steps
        if all(steps % recipe.checkpoint_every == 0 for recipe in recipes.values()):
            keep()

    def stopping() -> bool:
        asked = stop()
        if asked:
            keep()
        return asked

    train_side_by_side(recipes, corpus, folder, device=device, block=BLOCK, on_block=on_block, stop=stopping)
    return {name: watch.curve for name, watch in watches.items()}


def seeded(model: str) -> tuple[str, int]:
    """The encoding and the seed of `pope-0`; an ArgumentTypeError for anything else."""
    encoding, _, seed = model.rpartition("-")
    if encoding not in papers.ENCODINGS or not seed.isdecimal():
        known = ", ".join(papers.ENCODINGS)
        raise argparse.ArgumentTypeError(f"{model!r} is not ENCODING-SEED, as pope-0; encodings are {known}")
    return encoding, int(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("folder", type=Path, help="of the runs, to go on from when interrupted")
    parser.add_argument("--models", nargs="+", required=True, type=seeded, help="ENCODING-SEED")
    parser.add_argument("--variant", default="paper", choices=VARIANTS)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    device, corpus = usable(given.device), load("indirect-indexing")
    recipes = {}
    for encoding, seed in given.models:
        changes = {**VARIANTS[given.variant], "checkpoint_every": CHECKPOINT_EVERY, "seed": seed}
        recipes[f"{given.variant}-{encoding}-{seed}"] = papers.recipe(RECIPE, encoding, corpus, **changes)

    def write(name: str, curve: list[Point]) -> None:
        training = recipes[name].model_dump(mode="json")
        told = {
            "variant": given.variant,
            "changes": {change: training[change] for change in VARIANTS[given.variant]},
            "training": training,
            "rule": RULE,
            "block": BLOCK,
        }
        record(given.parts / f"{name}.json", recipe=told, values=curve, device=device)

    with interruptible() as stop:
        run(recipes, given.folder, device, stop, write)


if __name__ == "__main__":
    main()
