"""The table of decoding in docs/attention.md, from a recorded run of `phasewise bench decode`.

python -m experiments.decode_table results/attention/decode-h200.json
"""

import json
from pathlib import Path
from typing import Any

from experiments.command import parser
from experiments.readme_figure import measured_on, with_table

PAGE = Path(__file__).parent.parent / "docs" / "attention.md"
MARKER = "decode"


def table(document: dict[str, Any]) -> str:
    """Markdown: a row for each subject and width; time and share of copying at every number of keys."""
    rows, recipe = document["values"]["times"], document["recipe"]
    found = {(row["width"], row["subject"], row["keys"]): row for row in rows}
    lengths = recipe["keys"]
    lines = [
        f"| D | attention of one query | {' | '.join(f'{n:,} keys, us' for n in lengths)} | share of copying |",
        "|---:|---|" + "---:|" * len(lengths) + "---|",
    ]
    for width, subject in dict.fromkeys((row["width"], row["subject"]) for row in rows):
        here = [found.get((width, subject, length)) for length in lengths]
        times = [
            "" if row is None else f"{1e3 * row['ms']['median']:.1f} ({spread(row['ms'])})" for row in here
        ]
        shares = ", ".join("" if row is None else f"{row['share_of_copy']:.2f}" for row in here)
        lines.append(f"| {width} | {subject} | {' | '.join(times)} | {shares} |")
    lines += [
        "",
        f"Median (quartiles) of {recipe['samples']}; {recipe['what']}; {recipe['rows']} rows, "
        f"{recipe['heads']} query and {recipe['key_heads']} key heads. A share is of {recipe['bytes']}. "
        f"{measured_on(document)}.",
    ]
    return "\n".join(lines)


def spread(took: dict[str, float]) -> str:
    """Quartiles in microseconds."""
    return f"{1e3 * took['low']:.1f} to {1e3 * took['high']:.1f}"


def main(report: Path) -> None:
    PAGE.write_text(with_table(PAGE.read_text(), table(json.loads(report.read_text())), MARKER))
    print(f"wrote the table of decoding in docs/{PAGE.name}")


if __name__ == "__main__":
    arguments = parser("decode_table", __doc__)
    arguments.add_argument("report", type=Path)
    main(arguments.parse_args().report)
