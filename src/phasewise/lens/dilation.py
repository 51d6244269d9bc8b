"""Whether a longer window holds the same kernel, or the same kernel stretched."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import BaseModel, ConfigDict

from phasewise.lens.dependency import BAND
from phasewise.lens.thresholds import STRETCH
from phasewise.lens.width import Kernel

STEPS_PER_OCTAVE = 24
REFINED = 8


class Dilation(BaseModel):
    """The lambda of K_long(r) = K_short(r / lambda) / lambda that fits best."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    factor: float
    """lambda."""
    interval: tuple[float, float]
    """95 % interval over resampled blocks."""
    misfit: float
    """The largest difference of the cumulative kernels once dilated: 0 for an exact dilation, at most 1."""
    stretch: float | None
    """The long window over the short one; None for two corpora."""
    relative: float | None
    """ln lambda / ln stretch: 1 where the kernel stretches with the window, 0 where it stays."""


def windowed(density: np.ndarray, length: int) -> np.ndarray:
    """The kernel of a window of `length` tokens: each of its queries sees only what lies before it there.

    Of distance r a window holds length - r pairs, so K_L(r) = (1 - r / L) K(r). density: [..., R >= length].
    """
    return density[..., :length] * (1 - np.arange(1, length + 1) / length)


def window_dilation(kernel: Kernel, *, stretch: int = STRETCH) -> Dilation:
    """The dilation from windows of a `stretch`-th of the measured distances to windows of all of them.

    A power law r^-a with a < 1 gives lambda = stretch, a kernel with a width of its own gives 1.
    """
    long = len(kernel.density)
    short = max(1, long // stretch)
    factor, misfit = fit_dilation(windowed(kernel.density, short), windowed(kernel.density, long))
    resampled = [
        fit_dilation(windowed(density, short), windowed(density, long))[0] for density in kernel.replicates
    ]
    actual = long / short
    relative = float(np.log(factor) / np.log(actual)) if actual > 1 else None
    return Dilation(
        factor=factor, interval=_interval(resampled), misfit=misfit, stretch=actual, relative=relative
    )


def pair_dilation(short: Kernel, long: Kernel) -> Dilation:
    """The dilation from one corpus's kernel to another's, resampled independently."""
    factor, misfit = fit_dilation(short.density, long.density)
    others = zip(short.replicates, np.roll(long.replicates, 1, axis=0), strict=True)
    resampled = [fit_dilation(one, other)[0] for one, other in others]
    return Dilation(factor=factor, interval=_interval(resampled), misfit=misfit, stretch=None, relative=None)


def fit_dilation(short: np.ndarray, long: np.ndarray) -> tuple[float, float]:
    """Lambda and misfit of two densities over 1, 2, ..., each scaled to sum 1: that is the one free gain.

    Cumulative kernels are compared, F_long(r) with F_short(r / lambda), in least squares over ln r: every
    scale counts alike, and noise at single distances averages out.

    >>> factor, misfit = fit_dilation(np.ones(100), np.ones(400))
    >>> round(factor, 1), misfit < 0.05
    (4.0, True)
    """
    step = np.log(2) / STEPS_PER_OCTAVE
    reach = np.log(max(len(short), len(long)))
    grid = np.arange(-np.log(2) * 2, reach + np.log(2) * 2, step)
    first, second = _cumulated(short, grid), _cumulated(long, grid)
    room = len(grid)
    shifted = sliding_window_view(np.concatenate([np.zeros(room), first, np.ones(room)]), room)
    best = room - int(((shifted - second) ** 2).sum(1).argmin())
    fine = best + np.linspace(-1, 1, 2 * REFINED + 1)
    candidates = [_cumulated(short, grid - shift * step) - second for shift in fine]
    chosen = int(np.argmin([(difference**2).sum() for difference in candidates]))
    return float(np.exp(fine[chosen] * step)), float(np.abs(candidates[chosen]).max())


def _cumulated(density: np.ndarray, log_distance: np.ndarray) -> np.ndarray:
    """The cumulative kernel at any distance: the mass at r is spread from r - 1 to r.

    So the sum of exp(-r / w) over 1, 2, ... becomes 1 - exp(-r / w): small widths dilate as large ones do.
    """
    edges = np.arange(len(density) + 1)
    total = density.sum()
    cumulated = np.concatenate([[0.0], density.cumsum()]) / (total if total > 0 else 1.0)
    return np.interp(np.exp(log_distance), edges, cumulated)


def _interval(values: list[float]) -> tuple[float, float]:
    low, high = np.percentile(values, BAND)
    return float(low), float(high)
