"""A grid fitted to the data: every rate slowed by what its field must cover more, and by no more than that.

A rate's field is the distance at which it has turned by pi. In a window of N tokens instead of L the data's
kernel holds the same share of its mass within another distance: the share that lay within d now lies within
lambda(d) d. A rate whose field is d is divided by lambda(d), between 1 (this dependence stays where it was:
resolution is kept) and N / L. A rate that made no full turn in L is divided by N / L, so that it shows no
phase that the model has not seen. [ours]
"""

from __future__ import annotations

import math

import numpy as np

from phasewise.lens.dilation import windowed
from phasewise.lens.shape import PowerLaw
from phasewise.lens.thresholds import UNEVEN
from phasewise.lens.width import Kernel


def fitted(
    rates: np.ndarray, *, trained: int, wanted: int, kernel: np.ndarray | None, unevenness: float | None
) -> np.ndarray:
    """The rates to serve `wanted` tokens with, where `rates` [n] were trained on `trained`, both radians a token.

    kernel: K at the distances 1 to `wanted`, any gain (`reaching`); None: not known, and what has made a turn
    is kept. unevenness: above `UNEVEN` the data need the resolution of single distances far away, and what
    has made a turn is kept too.

    >>> rates, short = np.array([1.0, 0.1, 0.001]), np.exp(-np.arange(1, 1025) / 10)
    >>> grid = fitted(rates, trained=256, wanted=1024, kernel=short, unevenness=None)
    >>> (rates / grid).round(2)  # the kernel stays where it is, so its resolution is kept
    array([1.03, 1.03, 4.  ])
    """
    stretch = wanted / trained
    turned = rates * trained >= 2 * math.pi
    slowed = np.where(turned, 1.0, stretch)
    if kernel is not None and (unevenness is None or unevenness <= UNEVEN):
        fields = math.pi / np.where(turned, rates, 1.0)
        slowed = np.where(turned, local_dilation(kernel, fields, trained=trained, wanted=wanted), stretch)
    order = np.argsort(-rates, kind="stable")
    slowed[order] = np.maximum.accumulate(slowed[order])
    return rates / slowed


def local_dilation(kernel: np.ndarray, distances: np.ndarray, *, trained: int, wanted: int) -> np.ndarray:
    """lambda(d) of the module's text at `distances` [n], from 1 to wanted / trained.

    >>> flat = np.ones(4000)
    >>> local_dilation(flat, np.array([100.0, 500.0]), trained=1000, wanted=4000).round(2)
    array([4., 4.])
    """
    short, long = (_cumulated(windowed(kernel, length)) for length in (trained, wanted))
    within = np.clip(distances, 1.0, trained)
    share = np.interp(within, np.arange(trained + 1), short)
    moved = np.interp(share, long, np.arange(wanted + 1))
    return np.clip(moved / within, 1.0, wanted / trained)


def reaching(kernel: Kernel, law: PowerLaw | None, length: int) -> np.ndarray:
    """The kernel at the distances 1 to `length`: cut, or continued by its power law from where it was measured.

    Without a power law, or where it ended below the noise, nothing follows.
    """
    density = kernel.density
    if len(density) >= length:
        return density[:length]
    beyond = np.zeros(length - len(density))
    if law is not None and law.holds:
        places = np.arange(len(density) + 1, length + 1)
        beyond = density[-1] * (places / len(density)) ** law.slope
    return np.concatenate([density, beyond])


def _cumulated(density: np.ndarray) -> np.ndarray:
    total = density.sum()
    return np.concatenate([[0.0], density.cumsum()]) / (total if total > 0 else 1.0)
