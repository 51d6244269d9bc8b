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
ALIKE = ("variant", "changes", "rule")

Part = dict[str, Any]
"""What one model's training recorded."""


def read(folder: Path) -> list[Part]:
    """The parts in a folder; ValueError when there is none, and for a file that is something else."""
    parts = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if not parts:
        raise ValueError(f"{folder} has no parts: give the PARTS of experiments.indirect_indexing")
    for path, part in parts.items():
        if not isinstance(part, dict) or not {"values", "recipe", "date", *CERTIFICATE} <= set(part):
            raise ValueError(f"{path} is no part of experiments.indirect_indexing: move it elsewhere")
    return list(parts.values())


def joined(parts: list[Part]) -> dict[str, Any]:
    """One document of all models of one variant, by encoding.

    Raises ValueError for parts that do not belong together, two of one model, and one that is not trained to its end.
    """
    first = parts[0]
    for part in parts:
        for name in (*CERTIFICATE, *ALIKE):
            one, other = ((each["recipe"] if name in ALIKE else each)[name] for each in (first, part))
            if one != other:
                raise ValueError(
                    f"parts differ in {name}: {one} and {other}; join those of one run and variant"
                )
    encodings: dict[str, list[Part]] = {}
    for part in sorted(parts, key=_seed):
        encodings.setdefault(part["recipe"]["training"]["model"]["encoding"]["kind"], []).append(part)
    shared = {kind: _shared(kind, models) for kind, models in encodings.items()}
    told = {name: first["recipe"][name] for name in ALIKE}
    values = {kind: _summary(kind, models) for kind, models in sorted(encodings.items())}
    certificate = {name: first[name] for name in CERTIFICATE}
    date = max(part["date"] for part in parts)
    return {"values": values, "recipe": {**told, "training": shared}, **certificate, "date": date}


def _shared(kind: str, models: list[Part]) -> dict[str, Any]:
    """The training of an encoding's models, but for their seeds."""
    before: int | None = None
    for model in models:
        seed, done, steps = _seed(model), model["values"][-1]["steps"], model["recipe"]["training"]["steps"]
        if seed == before:
            raise ValueError(f"two parts are of {kind}, seed {seed}: leave one out")
        if done < steps:
            raise ValueError(
                f"{kind}, seed {seed} has {done} of {steps} steps: train it to its end, or leave it out"
            )
        before = seed
    first, *others = [{**model["recipe"]["training"], "seed": None} for model in models]
    for model, training in zip(models[1:], others, strict=True):
        if training != first:
            raise ValueError(
                f"{kind}'s seeds {_seed(models[0])} and {_seed(model)} were trained differently: join those of one "
                "recipe"
            )
    del first["seed"]
    return first


def _seed(part: Part) -> int:
    return part["recipe"]["training"]["seed"]


def _summary(kind: str, models: list[Part]) -> dict[str, Any]:
    chosen = [best(model["values"])["average_test"] for model in models]
    return {
        "test_accuracy": _spread(chosen),
        "solved": sum(test >= SOLVED for test in chosen),
        "paper": PAPER[kind],
        "seeds": [
            {
                "seed": _seed(model),
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
