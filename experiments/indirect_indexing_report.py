"""All models of a variant of Indirect Indexing in one record.

python -m experiments.indirect_indexing_report PARTS results/indirect-indexing/h200.json
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from experiments.indirect_indexing import best
from phasewise.record import replacing, written

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


def joined(parts: list[Part]) -> dict[str, Any]:
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
    told = {name: first["recipe"][name] for name in ("variant", "changes", "rule")}
    values = {kind: _summary(kind, models) for kind, models in sorted(encodings.items())}
    certificate = {name: first[name] for name in CERTIFICATE}
    date = max(part["date"] for part in parts)
    return {"values": values, "recipe": {**told, "training": shared}, **certificate, "date": date}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    document = joined(read(given.parts))
    with replacing(given.out) as unfinished:
        unfinished.write_text(written(document))
    for kind, found in document["values"].items():
        print(kind, found["test_accuracy"], "solved", found["solved"])


if __name__ == "__main__":
    main()
