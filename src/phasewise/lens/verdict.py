"""What a profile says on interpolation: self-similar, resolution-bound or mixed, and on what numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from phasewise.lens.dilation import Dilation
from phasewise.lens.shape import PowerLaw
from phasewise.lens.thresholds import (
    CURVATURE,
    DECADES,
    DILATES,
    FEWEST_PAIRS,
    FLAT,
    GROWING,
    HIDDEN,
    ROUGHNESS,
    STAYS,
    UNEVEN,
)
from phasewise.lens.width import Width

Kind = Literal["self-similar", "resolution-bound", "mixed", "undetermined"]


class Verdict(BaseModel):
    """One word, and why.

    self-similar: a smooth power law whose kernel stretches with the window: uniform interpolation fits.
    resolution-bound: a kernel that ends sharply, or that stays where it is when the window grows and is no power
    law: high frequencies are to be kept.
    mixed: neither, as a power law whose kernel still lies mostly near, or one with a comb.
    undetermined: the data are too few, too much may lie below the noise, or there is nothing to see; or what is seen
    does not fall, as where data repeat themselves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    reasons: tuple[str, ...]


def judge(
    width: Width,
    law: PowerLaw | None,
    dilation: Dilation | None,
    uneven: float | None = None,
    *,
    pairs: int | None = None,
) -> Verdict:
    """The verdict on one curve; uneven: see `phasewise.lens.shape.unevenness`.

    pairs: neighbouring tokens that were counted; None where a model, and not counting, gave the curve.
    """
    if pairs is not None and pairs < FEWEST_PAIRS:
        said = f"too little data: {pairs:,} pairs of neighbouring tokens (at least {FEWEST_PAIRS:,})"
        return Verdict(kind="undetermined", reasons=(said,))
    if width.kind == "none" or dilation is None:
        return Verdict(kind="undetermined", reasons=("no dependence stands above noise at any distance",))
    reasons = (_of_width(width), _of_dilation(dilation), _of_law(law))
    smooth = uneven is None or uneven <= UNEVEN
    if uneven is not None:
        reasons += (
            f"far away, neighbouring distances differ by {uneven:.0%} of the dependence there (threshold {UNEVEN:.0%})"
            + ("" if smooth else ": that needs resolution, which a dilation takes away"),
        )
    if width.kind == "growing" and law is not None and law.slope > -FLAT:
        said = (
            f"the dependence does not fall with distance (slope {law.slope:.2f}, threshold {-FLAT}), as where data "
            "repeat themselves: no width is seen"
        )
        return Verdict(kind="undetermined", reasons=(said, *reasons))
    relative = 0.0 if dilation.relative is None else dilation.relative
    straight = law is not None and law.holds
    if straight and smooth and relative >= DILATES:
        return Verdict(kind="self-similar", reasons=reasons)
    if width.kind == "hidden":
        return Verdict(kind="undetermined", reasons=reasons)
    stays = relative <= STAYS or width.kind == "decaying"
    if width.kind == "compact" or (stays and not straight):
        return Verdict(kind="resolution-bound", reasons=reasons)
    return Verdict(kind="mixed", reasons=reasons)


def together(verdicts: Sequence[tuple[str, Verdict]]) -> Verdict:
    """The verdict on a corpus from those on its granularities: theirs where they agree, otherwise mixed."""
    reasons = tuple(f"{name}: {verdict.kind}" for name, verdict in verdicts)
    determined: list[Kind] = [verdict.kind for _, verdict in verdicts if verdict.kind != "undetermined"]
    if not determined:
        return Verdict(kind="undetermined", reasons=reasons)
    return Verdict(kind=determined[0] if len(set(determined)) == 1 else "mixed", reasons=reasons)


def _of_width(width: Width) -> str:
    assert width.growth is not None
    assert width.hidden is not None
    if width.kind == "hidden":
        return (
            f"up to {width.hidden:.0%} of the kernel (threshold {HIDDEN:.0%}) may lie below the noise beyond "
            f"{width.seen} tokens: W90 = {width.w90:.4g} is a lower bound, as is lambda"
        )
    if width.kind == "compact":
        return f"the kernel ends at {width.seen} tokens"
    grows = "grows with the window" if width.kind == "growing" else "has a size of its own"
    return (
        f"W90 = {width.w90:.4g} tokens within {width.truncation}, and {grows}: "
        f"d ln W90 / d ln window = {width.growth:.2f} (threshold {GROWING})"
    )


def _of_dilation(dilation: Dilation) -> str:
    low, high = dilation.interval
    relative = "" if dilation.relative is None else f", {dilation.relative:.2f} of the way in logarithm"
    return (
        f"a window {dilation.stretch:.3g} times as long dilates the kernel by {dilation.factor:.2f} "
        f"({low:.2f} to {high:.2f}){relative} (self-similar from {DILATES}, resolution-bound up to {STAYS})"
    )


def _of_law(law: PowerLaw | None) -> str:
    if law is None:
        return "too few distances stand above noise for a slope"
    found = (
        f"slope {law.slope:.2f}, curvature {law.curvature:.3f} (threshold {CURVATURE}), roughness "
        f"{law.roughness:.1f} (threshold {ROUGHNESS}) from {law.first} to {law.last} tokens, "
        f"{law.decades:.2f} decades (at least {DECADES})"
    )
    return f"a power law: {found}" if law.holds else f"no power law over {DECADES} decades: {found}"
