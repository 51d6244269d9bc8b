"""How far back a corpus's dependencies reach: the kernel K(r), its 90 % quantile, and what that is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from phasewise.lens.dependency import BAND, Curve
from phasewise.lens.thresholds import (
    ALONE,
    EDGE,
    GROWING,
    HIDDEN,
    NEIGHBOURS,
    QUANTILE,
)


class Width(BaseModel):
    """The width of a kernel, in tokens, with what is needed to read it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["compact", "decaying", "growing", "hidden", "none"]
    """compact: ends sharply. decaying: W90 does not depend on the truncation. growing: it does, and has no
    meaning without it. hidden: too much may lie below the noise to tell. none: nothing stands above it."""
    width: float | None
    """The support of a compact kernel, otherwise W90; None where there is no kernel."""
    w90: float | None
    """90 % of the kernel lies within this distance, of what lies within `truncation`."""
    interval: tuple[float, float] | None
    """95 % interval of w90 over resampled blocks, `seen` taken as given: too narrow where that is uncertain."""
    truncation: int
    """The longest distance measured."""
    growth: float | None
    """d ln W90 / d ln truncation, between half the truncation and all of it: 0 for a width of its own, 1 for
    a power law above 1 / r."""
    seen: int | None
    """The longest distance at which the dependence stands above noise; beyond it, K counts as 0."""
    hidden: float | None
    """The largest share of the kernel, at 97.5 %, that lies below the noise beyond `seen`."""


@dataclass(frozen=True)
class Kernel:
    """K at the distances 1 to `len(density)`, not normalised, of the estimate and of resampled blocks.

    density: float64 [R]. replicates: float64 [replicates, R].
    """

    density: np.ndarray
    replicates: np.ndarray


def above_noise(curve: Curve) -> np.ndarray:
    """Where a dependence is seen, bool [n]: far above its error, or well above it twice in a row."""
    ratio = curve.value / np.where(curve.error > 0, curve.error, np.inf)
    well = ratio > NEIGHBOURS
    beside = np.zeros_like(well)
    beside[1:] |= well[:-1]
    beside[:-1] |= well[1:]
    return (ratio > ALONE) | (well & beside)


def kernel(curve: Curve) -> Kernel | None:
    """The kernel of a curve, interpolated over ln r; 0 where negative or not seen; None of nothing."""
    seen = np.flatnonzero(above_noise(curve))
    if not len(seen):
        return None
    last = int(curve.distances[seen[-1]])
    return Kernel(
        *(
            np.where(_places(curve) <= last, np.maximum(_filled(curve, of), 0), 0.0)
            for of in (curve.value, curve.replicates())
        )
    )


def measure_width(curve: Curve) -> Width:
    """The width of a curve's kernel: its support where it is compact, otherwise W90 of what was measured."""
    truncation = int(curve.distances[-1])
    found = kernel(curve)
    if found is None:
        return Width(
            kind="none",
            width=None,
            w90=None,
            interval=None,
            truncation=truncation,
            growth=None,
            seen=None,
            hidden=None,
        )
    seen = int(curve.distances[np.flatnonzero(above_noise(curve))[-1]])
    w90 = quantile(found.density)
    half = quantile(found.density[: max(1, truncation // 2)])
    growth = float(np.log(w90 / half) / np.log(2)) if half else 1.0
    tail = _filled(curve, curve.replicates())[:, seen:].sum(1)
    below = max(0.0, float(np.percentile(tail, BAND[1]))) if seen < truncation else 0.0
    hidden = below / (below + found.density.sum())
    low, high = np.percentile([quantile(density) for density in found.replicates], BAND)
    if hidden > HIDDEN:
        kind = "hidden"
    elif growth > GROWING:
        kind = "growing"
    else:
        kind = "compact" if _ends_sharply(curve, found) else "decaying"
    return Width(
        kind=kind,
        width=float(seen) if kind == "compact" else w90,
        w90=w90,
        interval=(float(low), float(high)),
        truncation=truncation,
        growth=growth,
        seen=seen,
        hidden=hidden,
    )


def quantile(density: np.ndarray, share: float = QUANTILE) -> float:
    """The distance within which `share` of a density over 1, 2, ... lies, linear within a step; 0 of nothing.

    >>> quantile(np.ones(100))
    90.0
    """
    cumulated = np.concatenate([[0.0], density.cumsum()])
    if cumulated[-1] <= 0:
        return 0.0
    return float(np.interp(share * cumulated[-1], cumulated, np.arange(len(cumulated))))


def _ends_sharply(curve: Curve, found: Kernel) -> bool:
    last = int(np.flatnonzero(above_noise(curve))[-1])
    if last + 1 == len(curve.distances):
        return False
    at_edge = curve.value[last]
    mean = found.density[: curve.distances[last]].mean()
    _, high = curve.band()
    return bool(at_edge > EDGE * mean and high[last + 1 :].max() < EDGE * at_edge)


def _places(curve: Curve) -> np.ndarray:
    return np.arange(1, curve.distances[-1] + 1)


def _filled(curve: Curve, values: np.ndarray) -> np.ndarray:
    """Values [..., n] at the measured distances, interpolated over ln r to every distance, [..., R]."""
    if len(curve.distances) == 1:
        return np.repeat(values, curve.distances[0], axis=-1)
    log = np.log(curve.distances)
    places = np.log(_places(curve))
    after = np.clip(np.searchsorted(log, places), 1, len(log) - 1)
    weight = np.clip((places - log[after - 1]) / (log[after] - log[after - 1]), 0, 1)
    return values[..., after - 1] * (1 - weight) + values[..., after] * weight
