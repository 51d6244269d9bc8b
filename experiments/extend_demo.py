"""A small RoPE model continued at four times its length in every way, into results/extend/demo.json.

Run as `python -m experiments.extend_demo runs/extend-demo`; the folder keeps what is done, and a second call goes on
from there. Every seed trains its own model, on which all ways start. Without a folder, the table in docs/extend.md is
written from the record.
"""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console

from experiments.command import parser
from experiments.readme_figure import with_table
from phasewise.data import load
from phasewise.encodings import named
from phasewise.model import ModelConfig
from phasewise.record import record
from phasewise.train.continuation import ExtendRecipe
from phasewise.train.extend import extend
from phasewise.train.kept import keep
from phasewise.train.loop import train
from phasewise.train.recipe import TrainRecipe

LENGTH, STEPS, SEEDS = 512, 60, (0, 1, 2)
WAYS = ("none", "pi", "ntk", "yarn", "llama3", "abf", "longrope")
UNTRAINED = ("longrope",)
RESULT, PAGE, MARKER = Path("results/extend/demo.json"), Path("docs/extend.md"), "extend"
CPU = torch.device("cpu")


def main(out: Path) -> None:
    values: dict[str, dict[str, list[float]]] = {}
    for seed in SEEDS:
        checkpoint, recipe = first(out / f"seed{seed}", seed)
        for way in WAYS:
            steps = 0 if way in UNTRAINED else STEPS
            request = ExtendRecipe(
                checkpoint=str(checkpoint), length=(LENGTH,), steps=(steps,), rule=way, seed=seed
            )
            folder = out / f"{way}-seed{seed}"
            resume = (folder / "recipe.json").exists()
            found = extend(request, folder, resume=resume, console=Console(stderr=True), figure=False)
            for row in found.rows:
                if row.name == "before" and way != WAYS[0]:
                    continue
                of_lengths = values.setdefault(row.name, {})
                for measured in row.measurements:
                    of_lengths.setdefault(str(measured.length), []).append(measured.loss)
    shared = request.model_dump(mode="json", exclude={"checkpoint", "rule", "steps", "seed"})
    record(
        RESULT,
        recipe={
            "first": recipe.model_dump(mode="json", exclude={"seed"}),
            "extend": {**shared, "ways": WAYS, "steps": {"longrope": 0, "others": STEPS}},
            "longrope": request.model_dump(mode="json")["rule"],
            "seeds": SEEDS,
        },
        values={"unit": "nats per byte, one value a seed", "losses": values},
    )


def first(folder: Path, seed: int) -> tuple[Path, TrainRecipe]:
    """The model that is continued: the demo's RoPE."""
    corpus = load("austen")
    model = ModelConfig(vocab_size=corpus.vocab_size, width=64, layers=2, heads=2, encoding=named("rope"))
    recipe = TrainRecipe(model=model, seed=seed)
    if not (folder / "model" / "history.json").exists():
        trained = train(recipe, corpus, folder, device=CPU)
        keep(trained.model, folder / "model", recipe, corpus)
    return folder, recipe


def table(document: dict[str, Any]) -> str:
    """Every model's loss at every length, mean and standard deviation over the seeds, as Markdown."""
    losses, first = document["values"]["losses"], document["recipe"]["first"]
    lengths = list(losses["before"])
    lines = [
        "| model | "
        + " | ".join(f"{length} ({int(length) / first['context']:g}x)" for length in lengths)
        + " |",
        "|---|" + "---:|" * len(lengths),
    ]
    for name, of_lengths in losses.items():
        cells = (f"{mean(of):.3f} ± {stdev(of):.3f}" for of in of_lengths.values())
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    scored, seeds = document["recipe"]["extend"]["evaluate_tokens"], document["recipe"]["seeds"]
    lines += [
        "",
        f"Loss, nats per byte, test split of {first['data']}, {scored:,} tokens scored at each length; seeds "
        f"{', '.join(map(str, seeds))} (mean ± standard deviation). From `{RESULT}`: commit "
        f"{document['commit'][:10]}, {document['device']}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = parser("extend_demo", __doc__)
    arguments.add_argument("folder", type=Path, nargs="?")
    if folder := arguments.parse_args().folder:
        main(folder)
    PAGE.write_text(with_table(PAGE.read_text(), table(json.loads(RESULT.read_text())), MARKER))
