import json
import re
from math import nan

import pytest
from pydantic import BaseModel

from phasewise.lens.charts import Axis, Figure, HeatMap, Line, Lines
from phasewise.lens.report import check_folder, page, plotly, write_report

pytest.importorskip("plotly", reason="reports need plotly")
pytest.importorskip("jinja2", reason="reports need jinja2")
pytest.importorskip("matplotlib", reason="reports need matplotlib")

HEAT = HeatMap(
    x=Axis(title="frequency"),
    y=Axis(title="layer"),
    value=Axis(title="share", scale="log"),
    columns=("0", "1", "2"),
    rows=("0", "1"),
    z=((1.0, 10.0, 0.0), (nan, 1e-3, 2.0)),
    notes=(("wavelength 6.28", "wavelength 62.8", "wavelength 628"),),
)
LINES = Lines(
    x=Axis(title="distance", scale="log"),
    y=Axis(title="bits"),
    lines=(
        Line(name="text", x=(1, 2, 4), y=(0.5, nan, 0.123456789), low=(0.4, 0.3, 0.1), high=(0.6, 0.5, 0.2)),
        Line(name="shuffled", x=(1, 2, 4), y=(0.0, 0.0, 0.0), dash="dot"),
    ),
)
FIGURES = (
    Figure(name="layers", title="Layers", text="Colours are shares.", views={"": HEAT}),
    Figure(name="kernel", title="Kernel", text="Falls.", views={"near": LINES, "far": LINES}),
)


class Values(BaseModel):
    theta: float


def write(folder, **changes):
    options = {"values": Values(theta=0.5), "charts": FIGURES, "recipe": {"data": "austen"}, **changes}
    write_report(folder, kind="inspect", title="A report", summary={"layers": "2"}, **options)


def test_report_folder_holds_values_page_and_both_formats_of_each_figure(tmp_path):
    write(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {f"figure-{name}.{suffix}" for name in ("layers", "kernel") for suffix in ("svg", "png")}
    assert names == {"report.json", "report.html", *pictures}
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    assert document["values"] == {"theta": 0.5}
    assert document["recipe"] == {"kind": "inspect", "data": "austen"}


def test_same_values_give_the_same_figures_byte_for_byte(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    for picture in (tmp_path / "a").glob("figure-*"):
        assert picture.read_bytes() == (tmp_path / "b" / picture.name).read_bytes()


def test_values_that_json_cannot_say_leave_no_report(tmp_path):
    with pytest.raises(ValueError, match="finite JSON"):
        write(tmp_path, values={"theta": nan})
    assert not (tmp_path / "report.json").exists()


def test_page_is_self_contained():
    text = page("A report", FIGURES, summary={})
    head = re.sub(r"<script>.*?</script>", "", text, count=1, flags=re.DOTALL)
    assert "Plotly" in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", head)


def test_markup_in_a_title_or_note_stays_text():
    hostile = Figure(name="x", title="</script><b>", text="<i>", views={"</script>": HEAT})
    text = page("<script>alert(1)</script>", (hostile,), summary={"<u>": "<s>"})
    assert "<script>alert(1)" not in text
    assert "<u>" not in text
    assert "&lt;/script&gt;&lt;b&gt;" in text
    notes = HeatMap(**{**HEAT.__dict__, "notes": (("</script>", "", ""),)})
    data = page("t", (Figure(name="x", title="t", text="", views={"": notes}),), summary={})
    assert data.count("</script>") == 3


def test_partial_report_says_so_at_the_top():
    assert "Partial result." not in page("t", (), summary={})
    text = page("t", (), summary={}, partial="interrupted after 3 of 8 windows")
    assert "<strong>Partial result.</strong> interrupted after 3 of 8 windows" in text


def test_missing_values_become_gaps_and_numbers_are_short():
    traces = plotly(LINES)["data"]
    assert [trace.get("name") for trace in traces] == [None, "text", "shuffled"]
    assert traces[1]["y"] == [0.5, None, 0.1235]
    assert plotly(HEAT)["data"][0]["z"] == [[1.0, 10.0, 0.0], [None, 0.001, 2.0]]


def test_band_runs_along_its_upper_edge_and_back_along_the_lower():
    band = plotly(LINES)["data"][0]
    assert band["x"] == [1, 2, 4, 4, 2, 1]
    assert band["y"] == [0.6, 0.5, 0.2, 0.1, 0.3, 0.4]


def test_folder_that_holds_something_is_refused(tmp_path):
    check_folder(tmp_path / "new")
    check_folder(tmp_path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="already exists: choose another folder"):
        check_folder(tmp_path)
