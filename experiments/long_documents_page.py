"""The tables and figures of docs/evaluate.md on novels, from the records of `experiments.long_documents`.

    python -m experiments.long_documents_page RUNS      takes the records out of a finished run first

Without RUNS, what lies in results/evaluate/novels is shown. In `longer` there lie the records of a run of fewer models
and four times the tokens, made before this one.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.command import parser
from experiments.long_documents import TRAINED
from experiments.readme_figure import ROOT, with_table
from phasewise.train.evaluation_report import Evaluation, draw

RESULTS = ROOT / "results" / "evaluate" / "novels"
LONGER = RESULTS / "longer"
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "evaluate.md"
REPORT, ADVICE, TRAININGS = "report.json", "advice.json", "trainings.json"


def collect(runs: Path) -> None:
    """Take from a run what is shown, and what it takes to repeat it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(runs / "evaluated" / REPORT, RESULTS / REPORT)
    shutil.copy(runs / "advice" / REPORT, RESULTS / ADVICE)
    reports = {path.parent.name: json.loads(path.read_text()) for path in sorted(runs.glob(f"*/{REPORT}"))}
    trainings = {name: report for name, report in reports.items() if name not in ("evaluated", "advice")}
    for name in TRAINED:
        metrics = (runs / name / "metrics.jsonl").read_text().splitlines()
        norms = [json.loads(line)["gradient_norm"] for line in metrics]
        warm = trainings[name]["recipe"]["warmup"]
        trainings[name]["gradient_norm"] = {"largest_after_warmup": max(norms[warm:]), "last": norms[-1]}
    (RESULTS / TRAININGS).write_text(json.dumps(trainings, indent=1) + "\n")


def trainings_table(trainings: dict[str, Any]) -> str:
    """What was trained, where its loss stood, and its gradient's norm before clipping, after the warm-up."""
    lines = [
        "| model | parameters | learning rate | training loss | validation loss | gradient norm, largest, last |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in (name for name in TRAINED if name in trainings):
        values, recipe, norm = (trainings[name][part] for part in ("values", "recipe", "gradient_norm"))
        lines.append(
            f"| {name} | {values['parameters'] / 1e6:.1f}M | {recipe['learning_rate']:g} | {values['loss']:.3f} | "
            f"{values['validation_loss']:.3f} | {norm['largest_after_warmup']:.2g}, {norm['last']:.2g} |"
        )
    return "\n".join(lines)


def losses_table(evaluation: Evaluation, number: int) -> str:
    """Bits per byte of one corpus by length."""
    first = evaluation.rows[0].losses[number]
    lengths = [measured.length for measured in first.measurements]
    return _table(
        ["bits per byte", *(_times(length, lengths[0]) for length in lengths)],
        (
            [row.checkpoint.name, *(f"{bits:.3f}" for bits in row.losses[number].scores)]
            for row in evaluation.rows
        ),
    )


def extensions_table(trainings: dict[str, Any]) -> str:
    """The losses that `extend` measured before and after, nats per token, by model and what was done to it."""
    rows: dict[tuple[str, int, str], dict[int, float]] = {}
    for report in trainings.values():
        if "stages" in report["values"]:
            model = Path(report["values"]["checkpoint"]).parent.name
            (stage,) = report["values"]["stages"]
            times = stage["length"] // report["values"]["trained_length"]
            for row in report["values"]["rows"]:
                found = {each["length"]: each["loss"] for each in row["measurements"]}
                before = row["name"] == "before"
                rows.setdefault((model, 0 if before else times, row["name"]), {}).update(found)
    lengths = sorted({length for found in rows.values() for length in found})
    heads = ["nats per token", "rule", *(_times(length, lengths[0]) for length in lengths)]
    return _table(
        heads,
        (
            [
                model,
                f"{done} at {times}x" if times else "before",
                *(_loss(found, length) for length in lengths),
            ]
            for (model, times, done), found in sorted(
                rows.items(), key=lambda row: (row[0][0] != "rope", row[0])
            )
        ),
    )


def advice_table(advice: dict[str, Any]) -> str:
    """What `advise` predicted and measured of every setting, the best first."""
    measured = [option for option in advice["options"] if option["measured"]]
    lengths = [each["length"] for each in measured[0]["measured"]["losses"]]
    return _table(
        ["nats per token", "rank predicted", *(_times(length, advice["trained"]) for length in lengths)],
        (
            [
                option["option"]["kind"],
                f"{option['option']['rank']}",
                *(f"{each['loss']:.3f}" for each in option["measured"]["losses"]),
            ]
            for option in measured
        ),
    )


def _loss(found: dict[int, float], length: int) -> str:
    return f"{found[length]:.3f}" if length in found else ""


def _times(length: int, trained: int) -> str:
    return f"{length} ({length // trained}x)"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def page() -> str:
    """docs/evaluate.md with its tables."""
    document, longer = (json.loads((folder / REPORT).read_text()) for folder in (RESULTS, LONGER))
    evaluation = Evaluation.model_validate(document["values"])
    trainings = json.loads((RESULTS / TRAININGS).read_text())
    novels, novel = (loss.measurements[0].tokens for loss in evaluation.rows[0].losses)
    parts = [
        trainings_table(trainings),
        f"Novels held out, {novels:,} tokens scored at each length:",
        losses_table(evaluation, 0),
        f"The end of War and Peace, {novel:,} tokens:",
        losses_table(evaluation, 1),
        f"`results/evaluate/novels/`: {_made(document)}; one seed.",
    ]
    before = [
        losses_table(Evaluation.model_validate(longer["values"]), 0),
        f"`results/evaluate/novels/longer/`: {_made(longer)}; one seed.",
    ]
    advice = json.loads((RESULTS / ADVICE).read_text())["values"]
    text = PAGE.read_text()
    for marker, table in (
        ("novels", "\n\n".join(parts)),
        ("novels-longer", "\n\n".join(before)),
        ("novels-extended", extensions_table(trainings)),
        ("novels-advised", advice_table(advice)),
    ):
        text = with_table(text, table, marker)
    return text


def _made(document: dict[str, Any]) -> str:
    return f"commit {document['commit'][:10]}, {document['device']}, torch {document['versions']['torch']}"


def main(runs: Sequence[Path]) -> None:
    for folder in runs:
        collect(folder)
    evaluation = Evaluation.model_validate(json.loads((RESULTS / REPORT).read_text())["values"])
    draw(evaluation, FIGURES / "evaluate_novels.svg")
    PAGE.write_text(page())


if __name__ == "__main__":
    arguments = parser("long_documents_page", __doc__)
    arguments.add_argument("runs", type=Path, nargs="*")
    main(arguments.parse_args().runs)
