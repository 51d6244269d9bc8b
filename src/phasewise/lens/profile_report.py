"""A profile as a table and as the figures of its report."""

from __future__ import annotations

import math

import numpy as np
from rich import box
from rich.table import Table

from phasewise.lens.charts import Axis, Figure, Line, Lines
from phasewise.lens.profile import CorpusProfile, Profile, Profiled
from phasewise.lens.thresholds import STRETCH

LIMITS = (
    "Mutual information between two tokens says how two places depend on each other, and nothing on retrieval: "
    "what many earlier tokens tell together about many later ones scales otherwise."
)


def label(corpus: CorpusProfile) -> str:
    """A corpus's name, paths cut to their last part."""
    kind, _, path = corpus.name.partition(":")
    return f"{kind}:{path.rstrip('/').rpartition('/')[2]}" if path else kind


def table(profile: Profile) -> Table:
    """One row a corpus and granularity: width, power law, dilation and verdict."""
    caption = (
        "width in tokens; slope of ln I against ln r over decades of r, * where that is no power law; "
        f"dilation of the kernel in a window {STRETCH} times as long; self-similar: suits one divisor of all "
        "positions; resolution-bound: high frequencies are to be kept"
    )
    caption = "\n".join([caption, *(f"{label(corpus)}: {_why(corpus)}" for corpus in profile.corpora)])
    shown = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("corpus", no_wrap=True)
    for title in ("width", "slope", "dilation"):
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    for corpus in profile.corpora:
        shown.add_row(label(corpus), "", "", "", corpus.verdict.kind, style="bold")
        for level in corpus.granularities:
            shown.add_row(f"  {level.granularity}", *_cells(level.information))
        if corpus.model is not None:
            shown.add_row("  model", *_cells(corpus.model))
    return shown


def _why(corpus: CorpusProfile) -> str:
    """The verdict and its first reason, of the first granularity that has it."""
    verdicts = [level.information.verdict for level in corpus.granularities]
    same = [verdict.reasons[0] for verdict in verdicts if verdict.kind == corpus.verdict.kind]
    return f"{corpus.verdict.kind}, as {same[0] if same else '; '.join(corpus.verdict.reasons)}"


def summary(profile: Profile) -> dict[str, str]:
    """The head of the report, in words."""
    lines = {}
    for corpus in profile.corpora:
        one_shape = {True: "one shape", False: "different shapes", None: "shapes not comparable"}
        said = f"{corpus.verdict.kind} ({'; '.join(corpus.verdict.reasons)})"
        if len(corpus.granularities) > 1:
            said += f"; {one_shape[corpus.one_shape]} across granularities"
        lines[label(corpus)] = said
    shuffled = "tokens of each document" if profile.shuffle == "document" else "all tokens"
    lines["baseline"] = f"the same estimate after the {shuffled} were put in random order"
    resampled = {level.information.blocks for corpus in profile.corpora for level in corpus.granularities}
    if "pieces" in resampled:
        lines["bands"] = "where a corpus has few documents, of resampled pieces: they speak of these only"
    lines["limits"] = LIMITS
    return lines


def figures(profile: Profile) -> list[Figure]:
    """Dependency against distance, the kernel's cumulative share, and the rise of a model's loss."""
    both = {
        label(corpus): [(level.granularity, level.span, level.information) for level in corpus.granularities]
        for corpus in profile.corpora
    }
    units = {label(corpus): corpus.unit for corpus in profile.corpora}
    beside = [(name, *levels[0][1:]) for name, levels in both.items()]
    groups = ({"side by side": beside} if len(both) > 1 else {}) | both
    found = [
        Figure(
            name="dependency",
            title="Mutual information against distance",
            text="A straight line is a power law, a cliff a compact kernel. Bands are 95 % over resampled "
            "blocks; values at or below zero are left out. Distances of all granularities are in the finest "
            "unit; side by side, each corpus's finest granularity.",
            views={
                name: Lines(
                    x=Axis(title=f"distance, {_plural(units.get(name))}", scale="log"),
                    y=Axis(title="mutual information, nats", scale="log"),
                    lines=[_curve(*level) for level in levels],
                )
                for name, levels in groups.items()
            },
        ),
        Figure(
            name="reach",
            title="How much of the kernel lies within a distance",
            text="Crosses 0.9 at W90. What lies below the noise counts as nothing. A curve that is still "
            "climbing steeply at its end has no width of its own: W90 then belongs to the window.",
            views={
                name: Lines(
                    x=Axis(title=f"distance, {_plural(units.get(name))}", scale="log"),
                    y=Axis(title="share of the kernel"),
                    lines=[_reach(*level) for level in levels],
                )
                for name, levels in groups.items()
            },
        ),
    ]
    looked = [(label(corpus), 1.0, corpus.model) for corpus in profile.corpora if corpus.model is not None]
    if looked:
        found.append(
            Figure(
                name="model",
                title="Rise of the model's loss when the token at a distance is replaced",
                text="What this model uses, in tokens of its own; the other figures show what the data hold.",
                views={
                    "": Lines(
                        x=Axis(title="distance, tokens", scale="log"),
                        y=Axis(title="rise of the loss, nats", scale="log"),
                        lines=[_curve(*corpus) for corpus in looked],
                    )
                },
            )
        )
    return found


def _cells(found: Profiled) -> tuple[str, str, str, str]:
    width, law, dilation = found.width, found.power_law, found.dilation
    size = "-" if width.width is None else f"{'≥ ' * (width.kind == 'hidden')}{width.width:.4g}"
    slope = "-" if law is None else f"{law.slope:.2f}{'' if law.holds else '*'} ({law.decades:.1f})"
    dilated = "-" if dilation is None else f"{dilation.factor:.2f}"
    return size, slope, dilated, found.verdict.kind + ("" if found.complete else ", partial")


def _curve(name: str, span: float, found: Profiled) -> Line:
    positive = [value for value in found.value if value > 0]
    floor = min(positive, default=1.0) / 2
    return Line(
        name=name,
        x=[distance * span for distance in found.distances],
        y=[value if value > 0 else math.nan for value in found.value],
        low=[max(low, floor) for low in found.low],
        high=[max(high, floor) for high in found.high],
    )


def _reach(name: str, span: float, found: Profiled) -> Line:
    """The cumulative kernel at the measured distances, by trapezes as wide as the distances are apart."""
    distances = np.array(found.distances, dtype=float)
    value = np.maximum(found.value, 0) * (distances <= (found.width.seen or 0))
    steps = np.diff(distances, prepend=0.0)
    before = np.concatenate([value[:1], value[:-1]])
    cumulated = (steps * (value + before) / 2).cumsum()
    share = cumulated / cumulated[-1] if cumulated[-1] > 0 else cumulated
    return Line(name=name, x=(distances * span).tolist(), y=share.tolist())


def _plural(unit: str | None) -> str:
    return "units" if unit is None else f"{unit}s"
