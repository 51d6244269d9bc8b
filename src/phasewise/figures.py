"""Figures on paper: matplotlib, SVG and PNG, the same bytes for the same values."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phasewise.record import replacing

STYLE: dict[str, Any] = {"svg.hashsalt": "phasewise", "svg.fonttype": "none", "font.size": 9}


@contextmanager
def figure(
    path: Path, width: float, height: float, *, dpi: int = 200, style: Mapping[str, Any] = {}
) -> Iterator[Any]:
    """A figure of that size in inches, written whole when the block ends; the suffix of `path` is its format.

    dpi: of a PNG. style: matplotlib's settings beside ours. Raises ValueError without matplotlib.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {**STYLE, **style}
    kind = path.suffix.removeprefix(".")
    with matplotlib.rc_context(settings):
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield drawn
        with replacing(path) as unfinished:
            drawn.savefig(
                unfinished, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else None
            )


def require_matplotlib() -> None:
    """Raise ValueError, with what to install, when there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            "the figure needs matplotlib: pip install 'phasewise[report]', or leave it out with --no-figure"
        )
