"""SmolLM2-135M-Instruct evaluated: the table and the figure of docs/evaluate.md, from results/evaluate/smollm2.

FOLDER is the checkpoint that `experiments.inspect_smollm2` converts. The records are those of

    phasewise evaluate FOLDER --lengths 512 1024 2048 --tokens 4096 --needles 1 --examples 2
    phasewise evaluate FOLDER --lengths 1024 2048 --tokens 2048 --tasks niah_single_1 niah_multikey_2 --task-limit 6
    phasewise evaluate FOLDER --tasks lambada_openai:FILE --task-limit 200

Run as `python -m experiments.evaluate_smollm2`.
"""

import json
from statistics import fmean
from typing import Any

from experiments.command import parser
from experiments.readme_figure import ROOT, with_table
from phasewise.evaluate import TaskScore
from phasewise.train.evaluation_report import Evaluated, Evaluation, draw_needles

RESULTS = ROOT / "results" / "evaluate" / "smollm2"
FIGURE = ROOT / "docs" / "figures" / "needles_smollm2.svg"
PAGE = ROOT / "docs" / "evaluate.md"
TASKS = {"ruler": ("niah_single_1", "niah_multikey_2"), "lambada": ("lambada_openai",)}


def evaluated(name: str) -> tuple[dict[str, Any], Evaluated]:
    """A record, and its one row."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
    (row,) = Evaluation.model_validate(document["values"]).rows
    return document, row


def table() -> str:
    """Losses and passkeys by length, then the tasks, as Markdown."""
    document, row = evaluated("report")
    losses = row.losses[0]
    text = losses.corpus.name.partition(",")[0]
    lengths = [measured.length for measured in losses.measurements]
    lines = ["| | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---:|" * len(lengths)]
    lines.append("| bits per byte | " + " | ".join(f"{bits:.3f}" for bits in losses.scores) + " |")
    for needles in row.retrieval:
        shares = [fmean(cell.exact for cell in needles.cells if cell.length == length) for length in lengths]
        name = "1 passkey" if needles.needles == 1 else f"one of {needles.needles} passkeys"
        lines.append(f"| {name}, found | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    said = [
        _said(score)
        for name, tasks in TASKS.items()
        for score in evaluated(name)[1].tasks
        if score.task in tasks
    ]
    examples = row.retrieval[0].cells[0].examples
    lines += [
        "",
        f"Tasks: {'; '.join(said)}.",
        "",
        f"`results/evaluate/smollm2/`: {losses.measurements[0].tokens:,} tokens of {text} scored at each "
        f"length, {examples} passkeys at each length and depth, mean over depths; commit {document['commit'][:10]}, "
        f"{document['device']}.",
    ]
    return "\n".join(lines)


def _said(score: TaskScore) -> str:
    metrics = {
        name: value
        for name, value in score.metrics.items()
        if name in ("acc", "perplexity") or name.isdecimal()
    }
    shown = ", ".join(
        f"{value:.2f} at {name}" if name.isdecimal() else f"{name} {value:.3g}"
        for name, value in metrics.items()
    )
    return f"`{score.task}` {shown} ({score.examples:,} documents)"


def main() -> None:
    document, _ = evaluated("report")
    draw_needles(Evaluation.model_validate(document["values"]), FIGURE)
    PAGE.write_text(with_table(PAGE.read_text(), table(), "smollm2"))


if __name__ == "__main__":
    parser("evaluate_smollm2", __doc__).parse_args()
    main()
