"""Whether a dependency falls as a power law: slope and curvature of ln I against ln r."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from pydantic import BaseModel, ConfigDict

from phasewise.lens.dependency import BAND, Curve
from phasewise.lens.thresholds import CURVATURE, DECADES, NEIGHBOURS, ROUGHNESS, TOLERANCE
from phasewise.lens.width import above_noise

FEWEST = 5
CLOSE_UP = 8
NEAR = 16


class PowerLaw(BaseModel):
    """The longest stretch over which ln I is straight in ln r; the longest seen, when none is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    holds: bool
    """Whether curvature and roughness stay below their thresholds over at least 1.5 decades."""
    first: int
    last: int
    decades: float
    slope: float
    slope_interval: tuple[float, float]
    curvature: float
    """d2 ln I / d(ln r)2."""
    curvature_interval: tuple[float, float]
    roughness: float
    """Root mean square of the residual over its tolerance: the error and ten per cent, in quadrature."""


def power_law(curve: Curve) -> PowerLaw | None:
    """Fit a parabola to ln I against ln r over the longest stretch that passes, or else the longest seen.

    A stretch is a run of neighbouring distances above noise. Points are weighted by their relative error and
    ten per cent in quadrature, so that the first, most precise ones do not decide alone. Intervals are of the
    same stretch in resampled blocks. None where fewer than five distances in a row stand above noise.
    """
    seen = above_noise(curve)
    passing, longest = None, None
    for start, end in _runs(seen):
        for first in range(start, end - FEWEST + 1):
            for last in range(first + FEWEST, end + 1):
                span = curve.distances[last - 1] / curve.distances[first]
                if longest is None or span > longest[0]:
                    longest = span, first, last
                if passing is None or span > passing[0]:
                    _, curvature, roughness = _fit(curve, slice(first, last), curve.value[None])
                    if abs(curvature[0]) < CURVATURE and roughness[0] < ROUGHNESS:
                        passing = span, first, last
    if longest is None:
        return None
    long_enough = passing is not None and np.log10(passing[0]) >= DECADES
    chosen = passing if long_enough else longest
    assert chosen is not None
    span, first, last = chosen
    slope, curvature, roughness = _fit(curve, slice(first, last), curve.value[None])
    slopes, curvatures, _ = _fit(curve, slice(first, last), curve.replicates())
    return PowerLaw(
        holds=long_enough,
        first=int(curve.distances[first]),
        last=int(curve.distances[last - 1]),
        decades=float(np.log10(span)),
        slope=float(slope[0]),
        slope_interval=_interval(slopes),
        curvature=float(curvature[0]),
        curvature_interval=_interval(curvatures),
        roughness=float(roughness[0]),
    )


def shape_difference(fine: Curve, fine_span: float, coarse: Curve, coarse_span: float) -> float | None:
    """How far two curves differ but for a gain: root mean square of ln (I / I'), distances times spans.

    Compared at the coarse curve's distances where both stand above noise; None where fewer than five do.
    """
    at = np.log(coarse.distances * coarse_span)
    seen = above_noise(fine)
    if seen.sum() < FEWEST:
        return None
    known = np.log(fine.distances[seen] * fine_span)
    common = above_noise(coarse) & (at >= known[0]) & (at <= known[-1])
    if common.sum() < FEWEST:
        return None
    ratio = np.log(coarse.value[common]) - np.interp(at[common], known, np.log(fine.value[seen]))
    return float(ratio.std())


def unevenness(curve: Curve) -> float | None:
    """How much a dependence varies from one distance to the next, far away, relative to its size.

    Root mean square, beyond what noise explains, around a line through the last eight neighbouring distances
    (from 16 on). A dilation smears what differs between neighbours: the beat of music, the lines of a text,
    voices written in turn. None without such neighbours, or where they do not stand above noise.
    """
    edges = [0, *(np.flatnonzero(np.diff(curve.distances) != 1) + 1).tolist(), len(curve.distances)]
    ends = [end for start, end in pairwise(edges) if end - start >= CLOSE_UP]
    if not ends or curve.distances[ends[-1] - CLOSE_UP] < NEAR:
        return None
    at = slice(ends[-1] - CLOSE_UP, ends[-1])
    size, error = curve.value[at].mean(), curve.error[at].mean()
    if size <= NEIGHBOURS * error:
        return None
    x = np.log(curve.distances[at])
    design = np.stack([np.ones_like(x), x], axis=1)
    line = design @ np.linalg.pinv(design)
    rows = np.vstack([curve.value, curve.replicates()])[:, at]
    residuals = rows - rows @ line.T
    noise = residuals[1:].var(0).sum()
    beyond = (residuals[0] ** 2).sum() - noise
    if beyond < noise:
        return 0.0
    return float(np.sqrt(beyond / CLOSE_UP) / size)


def _runs(seen: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], seen.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _fit(curve: Curve, stretch: slice, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slope at the middle, curvature and roughness of each row of values [rows, n], over one stretch."""
    x = np.log(curve.distances[stretch])
    x = x - (x[0] + x[-1]) / 2
    value = curve.value[stretch]
    y = np.log(np.maximum(values[:, stretch], value / 100))
    tolerance = np.hypot(curve.error[stretch] / value, TOLERANCE)
    design = np.stack([np.ones_like(x), x, x**2 / 2], axis=1) / tolerance[:, None]
    found, *_ = np.linalg.lstsq(design, (y / tolerance).T, rcond=None)
    residual = (y / tolerance).T - design @ found
    return found[1], found[2], np.sqrt((residual**2).mean(0))


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, BAND)
    return float(low), float(high)
