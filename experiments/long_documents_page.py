"""The tables and figures of docs/evaluate.md on novels, from the records of `experiments.long_documents`.

    python -m experiments.long_documents_page RUNS      takes the records out of a finished run first

Without RUNS, what lies in results/evaluate/novels is shown.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.long_documents import TRAINED
from experiments.readme_figure import ROOT, with_table
from phasewise.train.evaluation_report import Evaluated, Evaluation, draw, draw_needles

RESULTS = ROOT / "results" / "evaluate" / "novels"
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "evaluate.md"
REPORT, TRAININGS, ADVICE = "report.json", "trainings.json", "advice.json"


def collect(runs: Path) -> None:
    """Take from a run what is shown, and what it takes to repeat it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copy(runs / "evaluated" / REPORT, RESULTS / REPORT)
    shutil.copy(runs / ADVICE, RESULTS / ADVICE)
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
    """The share of passkeys found, one and several needles, mean over depths."""
    lengths = sorted({cell.length for cell in evaluation.rows[0].retrieval[0].cells})
    counts = " / ".join(str(found.needles) for found in evaluation.rows[0].retrieval)
    return _table(
        [f"passkeys found, {counts} needles", *(_times(length, lengths[0]) for length in lengths)],
        ([row.checkpoint.name, *(_found(row, length) for length in lengths)] for row in evaluation.rows),
    )


def advice_table(advice: dict[str, Any]) -> str:
    """What `advise` measured, in its order, beside what it had predicted."""
    values = advice["values"]
    rows = []
    for one in values["options"]:
        if one["measured"] is None:
            continue
        losses = {each["length"]: each["loss"] for each in one["measured"]["losses"]}
        cells = (one["measured"]["retrieval"] or {"cells": []})["cells"]
        found = [cell["exact"] for cell in cells if cell["length"] == values["wanted"]]
        rows.append(
            [
                one["option"]["kind"],
                f"{one['option']['rank']}",
                *(f"{losses[length]:.3f}" for length in (values["trained"], values["wanted"])),
                f"{sum(found) / len(found):.2f}" if found else "",
            ]
        )
    heads = [
        "setting",
        "predicted rank",
        f"loss at {values['trained']}",
        f"loss at {values['wanted']}",
        "passkeys",
    ]
    return _table(heads, rows)


def _found(row: Evaluated, length: int) -> str:
    shares = []
    for needles in row.retrieval:
        exact = [cell.exact for cell in needles.cells if cell.length == length]
        shares.append(f"{sum(exact) / len(exact):.2f}")
    return " / ".join(shares)


def _times(length: int, trained: int) -> str:
    return f"{length} ({length // trained}x)"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- |", "|---|")


def page() -> str:
    """docs/evaluate.md with its tables."""
    document = json.loads((RESULTS / REPORT).read_text())
    evaluation = Evaluation.model_validate(document["values"])
    advice = json.loads((RESULTS / ADVICE).read_text())
    novels, novel = (loss.measurements[0].tokens for loss in evaluation.rows[0].losses)
    parts = [
        trainings_table(json.loads((RESULTS / TRAININGS).read_text())),
        f"Novels held out, {novels:,} tokens scored at each length:",
        losses_table(evaluation, 0),
        f"The end of War and Peace, {novel:,} tokens:",
        losses_table(evaluation, 1),
        f"Passkeys, {evaluation.rows[0].retrieval[0].cells[0].examples} at each length and depth, mean over depths:",
        needles_table(evaluation),
        f"`results/evaluate/novels/`: commit {document['commit'][:10]}, {document['device']}, "
        f"torch {document['versions']['torch']}; one seed.",
    ]
    text = with_table(PAGE.read_text(), "\n\n".join(parts), "novels")
    return with_table(text, f"{advice_table(advice)}\n\n{_verdict(advice['values'])}", "novels-advice")


def _verdict(values: dict[str, Any]) -> str:
    return f"Verdict: **{values['verdict']['kind']}**; {'; '.join(values['verdict']['reasons'])}."


def main(arguments: Sequence[str]) -> None:
    for runs in arguments:
        collect(Path(runs))
    evaluation = Evaluation.model_validate(json.loads((RESULTS / REPORT).read_text())["values"])
    draw(evaluation, FIGURES / "evaluate_novels.svg")
    draw_needles(evaluation, FIGURES / "needles_novels.svg")
    PAGE.write_text(page())


if __name__ == "__main__":
    main(sys.argv[1:])
