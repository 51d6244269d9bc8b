"""Charts on paper, as SVG and PNG."""

from pathlib import Path
from typing import Any

import numpy as np

from phasewise.figures import figure
from phasewise.lens.charts import COLOURS, PALETTE, Chart, HeatMap, Lines

DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted"}
MOST_TICKS = 16


def draw(chart: Chart, title: str, path: Path) -> None:
    """Draw `chart` into `path`; its suffix is the format."""
    with figure(path, 7.2, 4.4, dpi=160) as drawn:
        axes = drawn.subplots()
        if isinstance(chart, HeatMap):
            _heat_map(chart, drawn, axes)
        else:
            _lines(chart, axes)
        axes.set_title(title, loc="left")
        axes.set_xlabel(chart.x.title)
        axes.set_ylabel(chart.y.title)


def _lines(chart: Lines, axes: Any) -> None:
    for number, line in enumerate(chart.lines):
        colour = PALETTE[number % len(PALETTE)]
        axes.plot(line.x, line.y, color=colour, linestyle=DASHES[line.dash], linewidth=1.6, label=line.name)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale(chart.x.scale)
    axes.set_yscale(chart.y.scale)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.lines) > 1:
        axes.legend(frameon=False, fontsize=8)


def _heat_map(chart: HeatMap, drawn: Any, axes: Any) -> None:
    from matplotlib.colors import LogNorm, Normalize

    z = np.array(chart.z, dtype=np.float64)
    norm = Normalize(vmin=chart.low)
    if chart.value.scale == "log":
        z = np.where(z > 0, z, np.nan)
        if np.isfinite(z).any():
            norm = LogNorm(vmin=chart.low or np.nanmin(z), vmax=max(np.nanmax(z), chart.low or 0))
    image = axes.imshow(z, aspect="auto", origin="lower", cmap=COLOURS.lower(), norm=norm)
    drawn.colorbar(image, ax=axes, label=chart.value.title)
    for ticks, labels in ((axes.set_xticks, chart.columns), (axes.set_yticks, chart.rows)):
        shown = range(0, len(labels), -(-len(labels) // MOST_TICKS))
        ticks(list(shown), [labels[place] for place in shown])
