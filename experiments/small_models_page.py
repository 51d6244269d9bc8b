"""The tables of docs/small-models.md, from its records: `python -m experiments.small_models_page`."""

import json
from typing import Any

from experiments.readme_figure import ROOT, with_table

PAGE = ROOT / "docs" / "small-models.md"
RECORDS = {"speed": "results/small-models/speed.json", "chorales": "results/jsb/chorales.json"}
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


def _source(name: str, document: Document) -> str:
    run = f"commit {document['commit'][:10]}, {document['device']}, torch {document['versions']['torch']}"
    return f"`{RECORDS[name]}`: {run}."


def main() -> None:
    page = PAGE.read_text()
    for name, table in (("speed", speed), ("chorales", chorales)):
        page = with_table(page, table(json.loads((ROOT / RECORDS[name]).read_text())), name)
    PAGE.write_text(page)
    print(f"wrote the tables of {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
