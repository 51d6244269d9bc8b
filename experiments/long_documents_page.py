"""The tables and figures of docs/evaluate.md on novels, from the records of `experiments.long_documents`.

    python -m experiments.long_documents_page RUNS      takes the records out of a finished run first

Without RUNS, what lies in results/evaluate/novels is shown.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.long_documents import TRAINED
from experiments.readme_figure import ROOT, with_table
from phasewise.train.evaluation_report import Evaluated, Evaluation, draw

RESULTS = ROOT / "results" / "evaluate" / "novels"
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "evaluate.md"
REPORT, TRAININGS = "report.json", "trainings.json"


def collect(runs: Path) -> None:
    """Take from a run what is shown, and what it takes to repeat it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(runs / "evaluated" / REPORT, RESULTS / REPORT)
    reports = {path.parent.name: json.loads(path.read_text()) for path in sorted(runs.glob(f"*/{REPORT}"))}
    reports.pop("evaluated")
    (RESULTS / TRAININGS).write_text(json.dumps(reports, indent=1) + "\n")


def trainings_table(trainings: dict[str, Any]) -> str:
    """What was trained, and where its loss stood."""
    lines = [
        "| model | parameters | learning rate | training loss | validation loss |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in (name for name in TRAINED if name in trainings):
        values, recipe = trainings[name]["values"], trainings[name]["recipe"]
        lines.append(
            f"| {name} | {values['parameters'] / 1e6:.1f}M | {recipe['learning_rate']:g} | {values['loss']:.3f} | "
            f"{values['validation_loss']:.3f} |"
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


def needles_table(evaluation: Evaluation) -> str:
    """The share of single passkeys found and the loss of a token of the answer, means over depths."""
    lengths = sorted({cell.length for cell in evaluation.rows[0].retrieval[0].cells})
    return _table(
        ["passkeys found, nats", *(_times(length, lengths[0]) for length in lengths)],
        ([row.checkpoint.name, *(_found(row, length) for length in lengths)] for row in evaluation.rows),
    )


def extensions_table(trainings: dict[str, Any]) -> str:
    """The losses that `extend` measured before and after, nats per token, by model and what was done to it."""
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for report in trainings.values():
        if "stages" in report["values"]:
            model = Path(report["values"]["checkpoint"]).parent.name
            for row in report["values"]["rows"]:
                rows[model, row["name"]] = {each["length"]: each["loss"] for each in row["measurements"]}
    order = sorted(rows, key=lambda key: (key[0] != "rope", key[1] != "before", key[1]))
    lengths = sorted(rows[order[0]])
    heads = ["nats per token", "done", *(_times(length, lengths[0]) for length in lengths)]
    return _table(heads, ([*key, *(f"{rows[key][length]:.3f}" for length in lengths)] for key in order))


def _found(row: Evaluated, length: int) -> str:
    cells = [cell for cell in row.retrieval[0].cells if cell.length == length]
    return f"{fmean(cell.exact for cell in cells):.2f}, {fmean(cell.loss for cell in cells):.2f}"


def _times(length: int, trained: int) -> str:
    return f"{length} ({length // trained}x)"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def page() -> str:
    """docs/evaluate.md with its tables."""
    document = json.loads((RESULTS / REPORT).read_text())
    evaluation = Evaluation.model_validate(document["values"])
    trainings = json.loads((RESULTS / TRAININGS).read_text())
    novels, novel = (loss.measurements[0].tokens for loss in evaluation.rows[0].losses)
    rows = evaluation.rows[0].retrieval[0].cells[0].examples
    parts = [
        trainings_table(trainings),
        f"Novels held out, {novels:,} tokens scored at each length:",
        losses_table(evaluation, 0),
        f"The end of War and Peace, {novel:,} tokens:",
        losses_table(evaluation, 1),
        f"Passkeys, {rows} rows at each length and depth; share found, and nats per token of the answer:",
        needles_table(evaluation),
        f"`results/evaluate/novels/`: commit {document['commit'][:10]}, {document['device']}, "
        f"torch {document['versions']['torch']}; one seed.",
    ]
    text = with_table(PAGE.read_text(), "\n\n".join(parts), "novels")
    return with_table(text, extensions_table(trainings), "novels-extended")


def main(arguments: Sequence[str]) -> None:
    for runs in arguments:
        collect(Path(runs))
    evaluation = Evaluation.model_validate(json.loads((RESULTS / REPORT).read_text())["values"])
    draw(evaluation, FIGURES / "evaluate_novels.svg")
    PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
