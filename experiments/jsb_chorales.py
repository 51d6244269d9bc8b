"""JSB chorales at the paper's configuration (arXiv 2509.10534, table 2), models trained side by side.

    python -m experiments.jsb_chorales results/jsb RUN jsb-chorales-16th.json.gz

The rule, one for every encoding and seed: validation is measured every 250 steps, and the checkpoint with the
lowest negative log-likelihood on it counts. Its likelihood on the test pieces is the result, nats per note,
every note but a piece's first. The difference of the encodings is taken seed by seed: one seed gives both the
same initial weights, but for PoPE's phases, and the same batches.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch

from phasewise.data import Corpus, load, windows
from phasewise.device import usable
from phasewise.evaluate import Measurement, measure
from phasewise.model import Transformer
from phasewise.record import record
from phasewise.train.objective import Served
from phasewise.train.recipe import TrainRecipe
from phasewise.train.side_by_side import train_side_by_side

RECIPES = Path(__file__).parent / "recipes"
PAPER = {"rope": 0.5081, "pope": 0.4889}
SEEDS = (0, 1, 2, 3, 4)
BLOCK = 50
EVERY = 250
ROWS = 8
QUANTILE = 2.776
"""Of Student's t with 4 degrees of freedom, 97.5 %: half the width of a 95 % interval in standard errors."""

Point = dict[str, float]


def likelihood(model: Transformer, recipe: TrainRecipe, corpus: Corpus, split: str) -> Measurement:
    """A model's negative log-likelihood on a split, as trained: matrices in the recipe's precision."""
    device = next(model.parameters()).device
    batches = windows(corpus, split, length=recipe.context, batch_size=ROWS)
    with torch.compiler.set_stance("force_eager"):
        return measure(
            Served(model, recipe), batches, length=recipe.context, stride=recipe.context, device=device
        )


def run(
    recipes: Mapping[str, TrainRecipe], corpus: Corpus, folder: Path, device: torch.device
) -> dict[str, dict[str, object]]:
    """Train side by side; each model's validation curve and its best checkpoint's test likelihood."""
    curves: dict[str, list[Point]] = {name: [] for name in recipes}
    best: dict[str, dict[str, float]] = {}

    def on_block(steps: int, models: Mapping[str, Transformer]) -> None:
        for name, model in models.items() if steps % EVERY == 0 else ():
            loss = likelihood(model, recipes[name], corpus, "validation").loss
            curves[name].append({"steps": steps, "validation": loss})
            if name not in best or loss < best[name]["validation"]:
                test = likelihood(model, recipes[name], corpus, "test")
                best[name] = {
                    "steps": steps,
                    "validation": loss,
                    "test": test.loss,
                    "test_accuracy": test.accuracy,
                    "test_tokens": test.tokens,
                }
        if steps % EVERY == 0:
            print(
                f"step {steps}: { ({name: round(curve[-1]['validation'], 4) for name, curve in curves.items()}) }",
                flush=True,
            )

    trained = train_side_by_side(recipes, corpus, folder, device=device, block=BLOCK, on_block=on_block)
    return {
        name: {
            "seed": recipe.seed,
            "train_loss": trained[name].loss,
            "best": best[name],
            "curve": curves[name],
        }
        for name, recipe in recipes.items()
    }


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
    read = {
        name: TrainRecipe.model_validate_json((RECIPES / f"jsb-{name}.json").read_text()) for name in PAPER
    }
    recipes = {
        f"{name}-seed{seed}": recipe.model_copy(update={"seed": seed})
        for name, recipe in read.items()
        for seed in SEEDS
    }
    found = run(recipes, corpus, given.folder, device)
    tests = {name: [found[f"{name}-seed{seed}"]["best"]["test"] for seed in SEEDS] for name in PAPER}  # type: ignore[index]
    values = {
        "test": {name: {"mean": statistics.fmean(seeds), "seeds": seeds} for name, seeds in tests.items()},
        "pope_less_rope": paired(tests["rope"], tests["pope"]),
        "paper": PAPER,
        "runs": found,
    }
    training = {name: recipe.model_dump(mode="json", exclude={"seed"}) for name, recipe in read.items()}
    told = {"training": training, "seeds": SEEDS, "rule": __doc__.split("\n\n")[2]}
    record(given.out / "chorales.json", recipe=told, values=values, device=device)
    print(values["test"], values["pope_less_rope"], flush=True)


if __name__ == "__main__":
    main()
