"""The figure and the table of README.md, from a recorded run of the demo.

python -m experiments.readme_figure results/demo/report.json
"""

import json
import statistics
from pathlib import Path
from typing import Any

from experiments.command import parser
from phasewise.train.report import Comparison, Score, draw

ROOT = Path(__file__).parent.parent
FIGURE = ROOT / "docs" / "figures" / "loss_by_length.svg"
MARKER = "encodings"
POSITION = {
    "rope": "pairs of channels turn with position ([Su 2021](https://arxiv.org/abs/2104.09864))",
    "pope": "content is the magnitude, position the phase ([Gopalakrishnan 2025](https://arxiv.org/abs/2509.10534))",
    "tapa": "content and distance set the phase together ([Wang 2025](https://arxiv.org/abs/2509.12635))",
    "nope": "not at all; the causal mask alone ([Kazemnejad 2023](https://arxiv.org/abs/2305.19466))",
    "alibi": "a penalty linear in distance ([Press 2021](https://arxiv.org/abs/2108.12409))",
}
SCALING = {
    "linear": "rates divided ([Chen 2023](https://arxiv.org/abs/2306.15595))",
    "ntk": "base enlarged ([described in Peng 2023](https://arxiv.org/abs/2309.00071))",
    "yarn": "slow rates divided ([Peng 2023](https://arxiv.org/abs/2309.00071))",
}


def encodings_table(document: dict[str, Any]) -> str:
    """The markdown table of a report: how position enters, and the loss at each length."""
    comparison = Comparison.model_validate(document["values"])
    first = comparison.rows[0].runs[0].measurements
    lengths = [f"{m.length} ({m.length / comparison.context:g}x)" for m in first]
    lines = [
        f"| encoding | position enters as | {' | '.join(lengths)} |",
        f"|---|---|{'---:|' * len(lengths)}",
    ]
    for row in comparison.rows:
        meaning = POSITION[row.encoding] if row.scaling is None else f"after training: {SCALING[row.scaling]}"
        cells = [_cell(score) for score in comparison.scores(row)]
        lines.append(f"| {row.name} | {meaning} | {' | '.join(cells)} |")
    seeds = document["recipe"]["seeds"]
    lines += [
        "",
        f"{comparison.quantity.capitalize()}, {comparison.split} split of {comparison.corpus.name}, "
        f"{first[0].tokens:,} tokens scored at each length, the same ones; each model saw "
        f"{comparison.trained_tokens:,} tokens of training at length {comparison.context}, "
        f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
        f"{'' if len(seeds) == 1 else ' (mean ± standard deviation)'}. "
        f"From `results/demo/report.json`: commit {document['commit'][:10]}, {document['device']}, "
        f"{comparison.seconds:.0f} s in all. At this size the table shows that the path works and how "
        "the curves run, not which encoding is best for a large model.",
    ]
    return "\n".join(lines)


def _cell(score: Score) -> str:
    spread = f" ± {statistics.stdev(score.seeds):.3f}" if len(score.seeds) > 1 else ""
    return f"{score.mean:.3f}{spread}"


def with_table(page: str, table: str, marker: str) -> str:
    """The page with `table` between its markers `<!-- table:NAME -->`; ValueError when it has none."""
    first, last = f"<!-- table:{marker} -->", f"<!-- /table:{marker} -->"
    before, start, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (start and end):
        raise ValueError(f"the page has no {first} ... {last} to write the table between")
    return f"{before}{first}\n{table}\n{last}{after}"


def measured_on(document: dict[str, Any]) -> str:
    """The device, commit and versions of a record."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"{document['device']}, commit {document['commit'][:10]}, {versions}"


def main(report: Path) -> None:
    document = json.loads(report.read_text())
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    draw(Comparison.model_validate(document["values"]), FIGURE)
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), encodings_table(document), MARKER))
    print(f"wrote {FIGURE.relative_to(ROOT)} and the table of README.md")


if __name__ == "__main__":
    arguments = parser("readme_figure", __doc__)
    arguments.add_argument("report", type=Path)
    main(arguments.parse_args().report)
