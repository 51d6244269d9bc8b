"""The guide's table of extensions is the recorded one."""

import json
from pathlib import Path

from experiments.extend_demo import MARKER, PAGE, RESULT, table
from experiments.readme_figure import with_table

ROOT = Path(__file__).parents[2]


def test_the_page_holds_the_table_of_the_record():
    page = (ROOT / PAGE).read_text()
    assert with_table(page, table(json.loads((ROOT / RESULT).read_text())), MARKER) == page


def test_the_table_has_a_line_for_every_model_and_a_column_for_every_length():
    document = {
        "values": {
            "losses": {
                "before": {"8": [1.0, 2.0], "16": [3.0, 3.0]},
                "pi": {"8": [2.0, 2.0], "16": [1.0, 2.0]},
            }
        },
        "recipe": {
            "first": {"context": 8, "data": "letters"},
            "extend": {"evaluate_tokens": 500},
            "seeds": [0, 1],
        },
        "commit": "0123456789abcdef",
        "device": "cpu",
    }
    lines = table(document).splitlines()
    assert lines[0] == "| model | 8 (1x) | 16 (2x) |"
    assert lines[2:4] == [
        "| before | 1.500 ± 0.707 | 3.000 ± 0.000 |",
        "| pi | 2.000 ± 0.000 | 1.500 ± 0.707 |",
    ]
