"""The tables and the figure of docs/small-models.md, from its records: `python -m experiments.small_models_page`."""

import json
from pathlib import Path
from typing import Any

from experiments.command import parser
from experiments.indirect_indexing_report import SOLVED
from experiments.readme_figure import ROOT, with_table
from phasewise.figures import figure

PAGE = ROOT / "docs" / "small-models.md"
RECORDS = {"speed": "results/small-models/speed.json", "chorales": "results/jsb/chorales.json"}
INDEXING = {
    name: f"results/indirect-indexing/{name}.json" for name in ("h200", "steady-fast", "gated-phases")
}
FIGURE = ROOT / "docs" / "figures" / "indirect_indexing.svg"
ORDINARY = "pope, ordinary loop"
NAMES = {"rope": "RoPE", "pope": "PoPE"}

Document = dict[str, Any]


def speed(document: Document) -> str:
    """Model-steps a second of each case, and over those of the compiled ordinary loop."""
    values = {name: found["model_steps_per_second"] for name, found in document["values"].items()}
    lines = [
        "| | steps/s, all models | ms a model's step | to the ordinary loop |",
        "|---|---:|---:|---:|",
    ]
    for name, value in values.items():
        lines.append(f"| {name} | {value:.0f} | {1000 / value:.2f} | {value / values[ORDINARY]:.1f} |")
    return "\n".join([*lines, "", _source("speed", document)])


def chorales(document: Document) -> str:
    """Test likelihood of every seed and the paired difference."""
    values = document["values"]
    difference = values["pope_less_rope"]
    numbers = range(len(difference["seeds"]))
    lines = [
        f"| nats per note, test | {' | '.join(f'seed {number}' for number in numbers)} | mean | the paper |",
        f"|---|{'---:|' * len(numbers)}---:|---:|",
    ]
    for kind in ("rope", "pope"):
        test = values["test"][kind]
        seeds = " | ".join(f"{seed:.4f}" for seed in test["seeds"])
        lines.append(f"| {NAMES[kind]} | {seeds} | {test['mean']:.4f} | {values['paper'][kind]:.4f} |")
    seeds = " | ".join(f"{seed:+.4f}" for seed in difference["seeds"])
    paper = values["paper"]["pope"] - values["paper"]["rope"]
    lines.append(f"| PoPE less RoPE | {seeds} | {difference['mean']:+.4f} | {paper:+.4f} |")
    low, high = difference["interval_95"]
    told = f"95 % interval of the difference: {low:+.4f} to {high:+.4f}. {values['steps']} steps."
    return "\n".join([*lines, "", f"{told} {_source('chorales', document)}"])


def indexing(documents: dict[str, Document]) -> str:
    """Accuracy on the test examples of every seed of every variant, and the paper's."""
    lines = [
        "| % of test examples | seed 0 | seed 1 | seed 2 | mean | solved | the paper |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for document in documents.values():
        for kind in ("pope", "rope"):
            if kind not in document["values"]:
                continue
            found = document["values"][kind]
            seeds = [100 * seed for seed in found["test_accuracy"]["seeds"]]
            given = {one["seed"]: f"{test:.2f}" for one, test in zip(found["seeds"], seeds, strict=True)}
            cells = [given.get(seed, "") for seed in range(3)]
            paper = f"{found['paper']['mean']:.2f} ± {found['paper']['spread']:.2f}"
            told = [f"{sum(seeds) / len(seeds):.2f}", f"{found['solved']} of {len(seeds)}", paper]
            lines.append(f"| {NAMES[kind]}, {document['recipe']['variant']} | {' | '.join(cells + told)} |")
    sources = " ".join(_run(INDEXING[name], document) for name, document in documents.items())
    return "\n".join([*lines, "", f"Solved: at least {SOLVED:.0%}. {sources}"])


def draw(documents: dict[str, Document], path: Path) -> None:
    """Accuracy on what is watched over the steps, a line a seed, a panel a variant."""
    with figure(path, 8.4, 2.6) as drawn:
        panels = drawn.subplots(1, len(documents), sharey=True)
        for axes, document in zip(panels, documents.values(), strict=True):
            for color, (kind, found) in zip(("C0", "C1"), document["values"].items(), strict=False):
                for number, seed in enumerate(found["seeds"]):
                    steps = [point["steps"] / 1000 for point in seed["curve"]]
                    accuracy = [100 * point["average"] for point in seed["curve"]]
                    label = NAMES[kind] if number == 0 else None
                    axes.plot(steps, accuracy, color=color, linewidth=1.2, label=label)
            axes.set_title(document["recipe"]["variant"], loc="left")
            axes.set_xlabel("thousand steps")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("validation examples right, %")
        panels[0].legend(frameon=False, loc="upper left")


def _source(name: str, document: Document) -> str:
    return _run(RECORDS[name], document)


def _run(record: str, document: Document) -> str:
    run = f"commit {document['commit'][:10]}, {document['device']}, torch {document['versions']['torch']}"
    return f"`{record}`: {run}."


def main() -> None:
    page = PAGE.read_text()
    for name, table in (("speed", speed), ("chorales", chorales)):
        page = with_table(page, table(json.loads((ROOT / RECORDS[name]).read_text())), name)
    variants = {name: json.loads((ROOT / record).read_text()) for name, record in INDEXING.items()}
    PAGE.write_text(with_table(page, indexing(variants), "indexing"))
    draw(variants, FIGURE)
    print(f"wrote the tables of {PAGE.relative_to(ROOT)} and {FIGURE.relative_to(ROOT)}")


if __name__ == "__main__":
    parser("small_models_page", __doc__).parse_args()
    main()
