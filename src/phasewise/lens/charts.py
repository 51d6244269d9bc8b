"""What a report shows, as plain values: figures of lines and heat maps, for browser and paper alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log"]
Dash = Literal["solid", "dash", "dot"]

PALETTE = ("#00798c", "#d1495b", "#c9971c", "#7b5ea7", "#3d7a37", "#e07a3f", "#56b4e9", "#6c757d")
COLOURS = "Viridis"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A quantity with its unit, and how it is spread."""

    title: str
    scale: Scale = "linear"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line through (x, y); `low` and `high`, given together, shade a band around it. NaN leaves a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    dash: Dash = "solid"


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines on common axes."""

    x: Axis
    y: Axis
    lines: Sequence[Line]


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Colours over rows and columns.

    z: rows x columns; NaN, and on a log scale what is not above 0, stays blank.
    columns, rows: what stands at the axes. low: the smallest value that gets a colour of its own.
    notes: what hovering adds to the value: one line of notes for every row, or one for each row.
    """

    x: Axis
    y: Axis
    value: Axis
    columns: Sequence[str]
    rows: Sequence[str]
    z: Sequence[Sequence[float]]
    notes: Sequence[Sequence[str]] = ()
    low: float | None = None


Chart = Lines | HeatMap


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a report: a chart, or several to choose from by name.

    name: its file name, as in figure-NAME.svg. title: what it shows, as a heading. text: how to read it.
    views: charts by what the menu calls them; files show the first. A single view has no menu.
    """

    name: str
    title: str
    text: str
    views: Mapping[str, Chart]
