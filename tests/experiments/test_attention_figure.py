"""The table of docs/attention.md says what the record says."""

import json
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.attention_figure import draw, memory, others, ratios, speed, table

ROOT = Path(__file__).parents[2]


def record(**ratios):
    took = {"median": 2.0, "low": 1.5, "high": 2.25}
    row = {"width": 64, "length": 2048, "subject": "pope flash", "forward_ms": took, "both_ms": took,
           "forward_tflops": 400.4, "both_tflops": 300.0, "peak_bytes": 2**21, **ratios}  # fmt: skip
    recipe = {"samples": "3 replays", "what": "causal", "heads": 16, "tokens": 32768}
    return {"values": {"times": [row]}, "recipe": recipe, "versions": {"torch": "2.11"}, "device": "a GPU",
            "commit": "abcdef0123456"}  # fmt: skip


def test_table_gives_medians_quartiles_ratios_and_memory():
    lines = table(record(**{"forward_to_flash-attn-4": 1.25, "both_to_flash-attn-4": 1.5})).splitlines()
    assert lines[2] == (
        "| 64 | 2048 | pope flash | 2.000 (1.500 to 2.250) | 400 | 1.25 | 2.000 (1.500 to 2.250) | 300 | 1.50 | 2 |"
    )
    assert "a GPU, commit abcdef0123, torch 2.11" in lines[-1]


def side_by_side():
    """PoPE and RoPE by three bodies, and PoPE by another's: each with a ratio and a memory of its own."""
    rows = []
    for number, subject in enumerate(
        ("pope flash", "pope cudnn", "pope triton", "rope flash", "rope cudnn", "pope flex")
    ):
        (row,) = record()["values"]["times"]
        told = {
            f"{kind}_to_{x}": 1 + number / 4
            for kind in ("forward", "both")
            for x in ("flash-attn-4", "cudnn")
        }
        rows.append({**row, "subject": subject, "peak_bytes": 2**20 * (8 - number), **told})
    document = record()
    document["values"]["times"] = rows
    return document


def test_readme_s_ratios_are_of_encodings_alone_and_say_from_what_record():
    lines = speed(side_by_side(), Path("results/x.json")).splitlines()
    assert lines[2:4] == ["| rope flash, D = 64 | 1.75 | 1.75 |", "| pope flash, D = 64 | 1.00 | 1.00 |"]
    assert lines[-1].endswith("From `results/x.json`: commit abcdef0123, a GPU.")


def test_ratios_are_those_of_what_auto_takes_with_and_without_a_package():
    assert ratios(side_by_side(), ("flash-attn-4",)).splitlines()[2:] == [
        "| rope flash, D = 64 | 1.75 | 1.75 |",
        "| pope flash, D = 64 | 1.00 | 1.00 |",
    ]
    assert ratios(side_by_side(), ("cudnn",), without="flash").splitlines()[2:] == [
        "| rope cudnn, D = 64 | 2.00 | 2.00 |",
        "| pope cudnn, D = 64 | 1.25 | 1.25 |",
    ]


def test_memory_is_popes_over_ropes_by_what_auto_takes():
    assert memory(side_by_side()).splitlines()[2:] == [
        "| with flash-attn-4 | 1.60 |",
        "| torch alone | 1.75 |",
    ]


def test_what_a_run_that_was_cut_short_did_not_measure_is_a_dash():
    document = side_by_side()
    rows = document["values"]["times"]
    rows += [{**row, "length": 8192} for row in rows if row["subject"] == "rope flash"]
    assert ratios(document, ("flash-attn-4",)).splitlines()[2:] == [
        "| rope flash, D = 64 | 1.75, 1.75 | 1.75, 1.75 |",
        "| pope flash, D = 64 | 1.00, - | 1.00, - |",
    ]
    assert memory(document).splitlines()[2:] == [
        "| with flash-attn-4 | 1.60, - |",
        "| torch alone | 1.75, - |",
    ]


def test_other_peoples_ways_stand_beside_ours():
    lines = others([record(), side_by_side()]).splitlines()
    assert lines[2:4] == [
        "| 64 | 2048 | pope flex | 2.000 | 2.25 | 2.000 | 2.25 | 3 |",
        "| 64 | 2048 | pope flash | 2.000 | 1.00 | 2.000 | 1.00 | 8 |",
    ]
    assert lines[-1].count("commit") == 1


def test_what_two_records_have_of_other_peoples_ways_is_the_firsts():
    first, second = side_by_side(), side_by_side()
    second["commit"] = "fedcba9876543"
    for row in second["values"]["times"]:
        row["both_ms"] = {**row["both_ms"], "median": 9.0}
    assert others([first, second]) == others([first])
    (row,) = record()["values"]["times"]
    second["values"]["times"].append({**row, "subject": "pope PoPE-pytorch"})
    both = others([first, second]).splitlines()
    assert both[:4] == others([first]).splitlines()[:4]
    assert both[4].startswith("| 64 | 2048 | pope PoPE-pytorch |")
    assert "abcdef0123" in both[-1]
    assert "fedcba9876" in both[-1]


def test_other_peoples_ways_are_in_no_other_table():
    assert "flex" not in table(side_by_side())


def test_figure_needs_the_baseline(tmp_path):
    with pytest.raises(ValueError, match="no ratio to flash-attn-4"):
        draw(record(), tmp_path / "cost.svg")
    draw(record(**{"both_to_flash-attn-4": 1.5}), tmp_path / "cost.svg")
    assert "pope flash" in (tmp_path / "cost.svg").read_text()


def test_the_legend_lies_on_no_bar(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *to, **how: drawn.append(figure) or save(figure, *to, **how)
    )
    document = json.loads((ROOT / "results" / "attention" / "h200.json").read_text())
    draw(document, tmp_path / "figure.svg")
    (figure,) = drawn
    FigureCanvasAgg(figure).draw()
    legends = [*figure.legends, *(found for axes in figure.axes if (found := axes.get_legend()))]
    bars = [bar.get_window_extent() for axes in figure.axes for bar in axes.patches]
    assert legends
    assert bars
    assert not any(legend.get_window_extent().overlaps(bar) for legend in legends for bar in bars)
