"""What came of Indirect Indexing: the pilot's choice, and all models of a variant in one record.

    python -m experiments.indirect_indexing_report choose PILOT_PARTS CHOICE
    python -m experiments.indirect_indexing_report join PARTS PILOT_PARTS results/indirect-indexing/h200.json

The pilot's rule: at the furthest step that all its models have come to, the variant with the highest mean
accuracy over its seeds, of averaged weights on the watched validation examples; of equals the lower mean loss.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.indirect_indexing import best
from phasewise.record import replacing, written

RULE = __doc__.split("\n\n")[2].strip()
PAPER = {"rope": {"mean": 11.16, "spread": 2.45}, "pope": {"mean": 94.82, "spread": 2.91}}
"""Accuracy, %, three seeds; arXiv 2509.10534, table 1."""
SOLVED = 0.9
CERTIFICATE = ("commit", "dirty", "device", "versions")

Part = dict[str, Any]
"""What one model's training recorded."""


def read(folder: Path) -> list[Part]:
    """The parts in a folder; ValueError when there is none."""
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not parts:
        raise ValueError(f"{folder} has no parts: give the PARTS of experiments.indirect_indexing")
    return parts


def pilot(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Each variant's accuracy and loss at the furthest common step, the chosen one first."""
    curves: dict[str, list[list[dict[str, float]]]] = {}
    changes = {}
    for part in parts:
        curves.setdefault(part["recipe"]["variant"], []).append(part["values"])
        changes[part["recipe"]["variant"]] = part["recipe"]["changes"]
    step = min(curve[-1]["steps"] for seeds in curves.values() for curve in seeds)
    rows = []
    for variant, seeds in curves.items():
        points = [next(point for point in curve if point["steps"] == step) for curve in seeds]
        row: dict[str, Any] = {"variant": variant, "changes": changes[variant], "steps": step}
        for name in ("average", "average_loss"):
            values = [point[name] for point in points]
            row[name] = {"mean": statistics.fmean(values), "seeds": values}
        rows.append({**row, "curves": seeds})
    return sorted(rows, key=lambda row: (-row["average"]["mean"], row["average_loss"]["mean"]))


def joined(parts: list[Part], trials: list[Part]) -> dict[str, Any]:
    """One document of all models of one variant, by encoding; ValueError when they do not belong together."""
    first = parts[0]
    for part in parts:
        for name in CERTIFICATE:
            if part[name] != first[name]:
                raise ValueError(
                    f"parts differ in {name}: {first[name]} and {part[name]}; join those of one run"
                )
        if part["recipe"]["variant"] != first["recipe"]["variant"]:
            raise ValueError("parts are of several variants: join those of one")
    encodings: dict[str, list[Part]] = {}
    for part in sorted(parts, key=lambda part: part["recipe"]["training"]["seed"]):
        encodings.setdefault(part["recipe"]["training"]["model"]["encoding"]["kind"], []).append(part)
    shared = {
        kind: {name: value for name, value in models[0]["recipe"]["training"].items() if name != "seed"}
        for kind, models in encodings.items()
    }
    rule = {"rule": first["recipe"]["rule"], "pilot's rule": RULE}
    recipe = {**{name: first["recipe"][name] for name in ("variant", "changes")}, "training": shared, **rule}
    values: dict[str, Any] = {kind: _summary(kind, models) for kind, models in sorted(encodings.items())}
    if trials:
        values["pilot"] = pilot(trials)
    return {"values": values, "recipe": recipe, **{name: first[name] for name in (*CERTIFICATE, "date")}}


def _summary(kind: str, models: list[Part]) -> dict[str, Any]:
    chosen = [best(model["values"])["average_test"] for model in models]
    return {
        "test_accuracy": _spread(chosen),
        "solved": sum(test >= SOLVED for test in chosen),
        "paper": PAPER[kind],
        "seeds": [
            {
                "seed": model["recipe"]["training"]["seed"],
                "steps": model["values"][-1]["steps"],
                "best": best(model["values"]),
                "last": model["values"][-1],
                "curve": model["values"],
            }
            for model in models
        ],
    }


def _spread(values: list[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "deviation": deviation, "seeds": values}


def choose(parts: Path, out: Path) -> None:
    rows = pilot(read(parts))
    for row in rows:
        accuracies = ", ".join(f"{value:.1%}" for value in row["average"]["seeds"])
        print(
            f"{row['variant']:18} step {row['steps']:6.0f}: {row['average']['mean']:.1%} ({accuracies}), "
            f"loss {row['average_loss']['mean']:.3f}"
        )
    with replacing(out) as unfinished:
        unfinished.write_text(rows[0]["variant"] + "\n")


def join(parts: Path, trials: Path, out: Path) -> None:
    document = joined(read(parts), read(trials))
    with replacing(out) as unfinished:
        unfinished.write_text(written(document))
    for kind in PAPER.keys() & document["values"].keys():
        print(kind, document["values"][kind]["test_accuracy"], "solved", document["values"][kind]["solved"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, names in ((choose, ("parts", "out")), (join, ("parts", "trials", "out"))):
        command = commands.add_parser(function.__name__)
        for name in names:
            command.add_argument(name, type=Path)
        command.set_defaults(function=function)
    given = vars(parser.parse_args())
    given.pop("function")(**given)


if __name__ == "__main__":
    main()
