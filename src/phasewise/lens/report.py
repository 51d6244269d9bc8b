"""Reports: a folder with report.json, a self-contained report.html, and each figure as SVG and PNG.

    check_folder(folder)                    # before long work: is it free, are the packages there?
    write_report(
        folder,
        kind="inspect",                     # the command that made it
        title="Frequencies of smollm2",     # the page's heading
        values=spectra,                     # every number: a pydantic model or a mapping of plain JSON values
        recipe={"data": "austen"},          # what must be repeated to get them again
        summary={"layers": "30"},           # the table at the top, in words
        charts=[Figure(name="layers", title="...", text="how to read it", views={"": HeatMap(...)})],
        partial=None,                       # or one sentence that says what is missing
    )

Charts (`phasewise.lens.charts`) are values too: the same ones are drawn by plotly in the browser and by
matplotlib (`phasewise.lens.draw`) into the files. report.html needs no network: plotly stands inside it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from pydantic import BaseModel

from phasewise.interrupt import Interrupted
from phasewise.lens.charts import COLOURS, PALETTE, Axis, Chart, Figure, HeatMap, Line, Lines
from phasewise.lens.draw import draw
from phasewise.record import certified, record, replacing, written

PACKAGES = ("jinja2", "matplotlib", "plotly")
DIGITS = 4
MOST_LABELS = 12


def check_folder(folder: Path) -> None:
    """Raise ValueError when no report can go to `folder`: it is not empty, nothing can be written there, or a
    package is missing.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"reports need {', '.join(missing)}: pip install 'phasewise[report]'")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} already exists: choose another folder")
    require_writable(folder)


def require_writable(folder: Path) -> None:
    """Raise ValueError unless files can be written in `folder`, or, before it is made, in the folder above."""
    above = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        TemporaryFile(dir=above).close()
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error.strerror}): choose another folder") from error


def write_report(
    folder: Path,
    *,
    kind: str,
    title: str,
    values: BaseModel | Mapping[str, object],
    charts: Sequence[Figure],
    recipe: Mapping[str, object],
    summary: Mapping[str, str] | None = None,
    partial: str | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Write the report that the module describes: report.json first, as only its values cannot be made again.

    Raises ValueError for values that JSON cannot say, and where `check_folder` does; Interrupted for a
    KeyboardInterrupt once report.json is there.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record(folder / "report.json", **_certificate(kind, values, recipe, device))
    try:
        with replacing(folder / "report.html") as unfinished:
            shown = page(title, charts, summary=summary or {}, partial=partial)
            unfinished.write_text(shown, encoding="utf-8")
        for figure in charts:
            chart = next(iter(figure.views.values()))
            for suffix in (".svg", ".png"):
                draw(chart, figure.title, folder / f"figure-{figure.name}{suffix}")
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted while the report was drawn; every value is in {folder / 'report.json'}, "
            "and another --out measures and draws anew"
        ) from error


def json_text(
    *,
    kind: str,
    values: BaseModel | Mapping[str, object],
    recipe: Mapping[str, object],
    device: torch.device | str = "cpu",
) -> str:
    """What a report's report.json holds."""
    return written(certified(**_certificate(kind, values, recipe, device)))


def _certificate(
    kind: str,
    values: BaseModel | Mapping[str, object],
    recipe: Mapping[str, object],
    device: torch.device | str,
) -> dict[str, Any]:
    plain = values.model_dump(mode="json") if isinstance(values, BaseModel) else values
    return {"recipe": {"kind": kind, **recipe}, "values": plain, "device": device}


def page(
    title: str, charts: Sequence[Figure], *, summary: Mapping[str, str], partial: str | None = None
) -> str:
    """The report as one HTML document that needs nothing else."""
    import jinja2
    from plotly.offline import get_plotlyjs

    source = (files("phasewise.lens") / "report.html").read_text(encoding="utf-8")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)
    drawn = [[plotly(view) for view in figure.views.values()] for figure in charts]
    data = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.render(
        title=title, summary=summary, partial=partial, figures=charts, data=data, library=get_plotlyjs()
    )


def plotly(chart: Chart) -> dict[str, object]:
    """The chart as plotly's traces and layout, numbers to four digits.

    A heat map is sent as its values; the page makes logarithms and hover texts of them when it is shown.
    """
    if isinstance(chart, HeatMap):
        return {"data": [_heat_map(chart)], "layout": _layout(chart, _title(chart.x), _title(chart.y))}
    traces = []
    for number, line in enumerate(chart.lines):
        traces += _line(line, PALETTE[number % len(PALETTE)])
    x = _axis(chart.x, [value for line in chart.lines for value in line.x])
    y = _axis(chart.y, [value for line in chart.lines for value in line.y])
    return {"data": traces, "layout": _layout(chart, x, y)}


def _heat_map(chart: HeatMap) -> dict[str, object]:
    return {
        "type": "heatmap",
        "z": [[_number(value) for value in row] for row in chart.z],
        "colorscale": COLOURS,
        "meta": {
            "columns": list(chart.columns),
            "rows": list(chart.rows),
            "log": chart.value.scale == "log",
            "low": chart.low,
            "notes": [list(notes) for notes in chart.notes],
            "value": chart.value.title,
        },
    }


def _line(line: Line, colour: str) -> list[dict[str, object]]:
    x, y = [_number(value) for value in line.x], [_number(value) for value in line.y]
    traces: list[dict[str, object]] = []
    if line.low is not None and line.high is not None:
        edge = [_number(value) for value in (*line.high, *reversed(line.low))]
        band = {"x": x + x[::-1], "y": edge, "fill": "toself", "fillcolor": colour, "opacity": 0.15}
        hidden = {"line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "mode": "lines"}
        traces.append({"type": "scatter", "legendgroup": line.name, **band, **hidden})
    style = {"color": colour, "width": 1.8, "dash": line.dash}
    named = {"name": line.name, "legendgroup": line.name}
    mode = "lines+markers" if line.dash == "solid" else "lines"
    traces.append({"type": "scatter", "mode": mode, "x": x, "y": y, "line": style, **named})
    return traces


def _layout(chart: Chart, x: dict[str, object], y: dict[str, object]) -> dict[str, object]:
    several = isinstance(chart, Lines) and len(chart.lines) > 1
    return {"xaxis": x, "yaxis": y, "showlegend": several}


def _axis(axis: Axis, values: Sequence[float]) -> dict[str, object]:
    """Labels at every whole number of a short range; at powers of ten over several decades, with twos and fives
    between them over few, and at a handful of places within less.
    """
    known = [value for value in values if math.isfinite(value) and (value > 0 or axis.scale == "linear")]
    if axis.scale == "log":
        ratio = max(known) / min(known) if known else 1.0
        ticks: dict[str, object] = (
            {"dtick": 1} if ratio > 10**1.5 else {"dtick": "D2"} if ratio > 5 else {"nticks": 5}
        )
        return {**_title(axis), "type": "log", "exponentformat": "power", **ticks}
    whole = all(value == int(value) for value in known) and max(known, default=0) <= MOST_LABELS
    return {**_title(axis), "type": "linear", **({"dtick": 1} if whole else {})}


def _title(axis: Axis) -> dict[str, object]:
    return {"title": {"text": axis.title}}


def _number(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
