"""JSB chorales at the paper's configuration (arXiv 2509.10534, table 2), models trained side by side.

    python -m experiments.jsb_chorales results/jsb RUN jsb-chorales-16th.json.gz

The rule, one for every encoding and seed: validation is measured every 250 steps, and the checkpoint with the
lowest negative log-likelihood on it counts. Its likelihood on the test pieces is the result, nats per note,
every note but a piece's first. The difference of the encodings is taken seed by seed: one seed gives both the
same initial weights, but for PoPE's phases, and the same batches.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from experiments import papers
from phasewise.data import Corpus, load, windows
from phasewise.device import usable
from phasewise.evaluate import Measurement, measure
from phasewise.interrupt import interruptible
from phasewise.model import Transformer
from phasewise.record import record, replacing
from phasewise.train.objective import Served
from phasewise.train.recipe import TrainRecipe
from phasewise.train.side_by_side import train_side_by_side

RECIPE = "pope-chorales"
PAPER = {"rope": 0.5081, "pope": 0.4889}
SEEDS = (0, 1, 2, 3, 4)
BLOCK = 50
EVERY = 250
ROWS = 8
QUANTILE = 2.776
"""Of Student's t with 4 degrees of freedom, 97.5 %: half the width of a 95 % interval in standard errors."""

Point = dict[str, float]
"""Steps, validation and, where that is the lowest so far, test, of one model."""
Curves = dict[str, list[Point]]


def likelihood(model: Transformer, recipe: TrainRecipe, corpus: Corpus, split: str) -> Measurement:
    """A model's negative log-likelihood on a split, as trained: matrices in the recipe's precision."""
    device = next(model.parameters()).device
    batches = windows(corpus, split, length=recipe.context, batch_size=ROWS)
    with torch.compiler.set_stance("force_eager"):
        return measure(
            Served(model, recipe), batches, length=recipe.context, stride=recipe.context, device=device
        )


def run(
    recipes: Mapping[str, TrainRecipe],
    corpus: Corpus,
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    told: Callable[[Curves], None] = lambda _curves: None,
) -> Curves:
    """Train side by side; the curve of each model, of which `told` hears as it grows.

    An interrupted run goes on from its last checkpoint, and its curves from the points before that.
    """
    kept = folder / "curves.json"
    curves: Curves = json.loads(kept.read_text()) if kept.exists() else {name: [] for name in recipes}

    def on_block(steps: int, models: Mapping[str, Transformer]) -> None:
        if steps % EVERY:
            return
        for name, model in models.items():
            before = [point for point in curves[name] if point["steps"] < steps]
            loss = likelihood(model, recipes[name], corpus, "validation").loss
            point: Point = {"steps": steps, "validation": loss}
            if all(loss < other["validation"] for other in before):
                test = likelihood(model, recipes[name], corpus, "test")
                point |= {"test": test.loss, "test_accuracy": test.accuracy, "test_tokens": test.tokens}
            curves[name] = [*before, point]
        with replacing(kept) as unfinished:
            unfinished.write_text(json.dumps(curves))
        told(curves)

    train_side_by_side(recipes, corpus, folder, device=device, block=BLOCK, on_block=on_block, stop=stop)
    return curves


def best(curve: list[Point]) -> Point:
    """The point that the rule chooses: the lowest on validation, the earlier of equals."""
    return min(curve, key=lambda point: point["validation"])


def paired(rope: list[float], pope: list[float]) -> dict[str, object]:
    """PoPE less RoPE, seed by seed: mean and 95 % interval."""
    differences = [b - a for a, b in zip(rope, pope, strict=True)]
    mean = statistics.fmean(differences)
    half = QUANTILE * statistics.stdev(differences) / len(differences) ** 0.5
    return {"seeds": differences, "mean": mean, "interval_95": [mean - half, mean + half]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path, help="of the runs, to go on from when interrupted")
    parser.add_argument("data", type=Path, help="the benchmark's file, as `jsb:PATH` takes it")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    device, corpus = usable(given.device), load(f"jsb:{given.data}")
    recipes = {
        f"{name}-seed{seed}": papers.recipe(RECIPE, name, corpus, seed=seed)
        for name in PAPER
        for seed in SEEDS
    }
    training = {
        name: recipes[f"{name}-seed{SEEDS[0]}"].model_dump(mode="json", exclude={"seed"}) for name in PAPER
    }
    rule = {
        "training": training,
        "data": f"jsb:{given.data.name}",
        "seeds": SEEDS,
        "rule": __doc__.split("\n\n")[2],
    }

    def write(curves: Curves) -> None:
        chosen = {name: [best(curves[f"{name}-seed{seed}"]) for seed in SEEDS] for name in PAPER}
        tests = {name: [point["test"] for point in points] for name, points in chosen.items()}
        values = {
            "steps": curves[f"rope-seed{SEEDS[0]}"][-1]["steps"],
            "test": {
                name: {"mean": statistics.fmean(seeds), "seeds": seeds} for name, seeds in tests.items()
            },
            "pope_less_rope": paired(tests["rope"], tests["pope"]),
            "paper": PAPER,
            "curves": curves,
        }
        record(given.out / "chorales.json", recipe=rule, values=values, device=device)
        print({name: values[name] for name in ("steps", "test", "pope_less_rope")}, flush=True)

    with interruptible() as stop:
        run(recipes, corpus, given.folder, device, stop, write)


if __name__ == "__main__":
    main()
