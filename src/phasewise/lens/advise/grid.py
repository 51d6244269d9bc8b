"""A grid fitted to the data: every rate slowed by what its field must cover, and by no more than that.

What depends on what within the trained length still does in a longer window, at the same distances: there
resolution is kept. What is new lies beyond the trained length. Of rates that made few turns in training, each
phase told nearly one place, and at N / L times the length it tells N / L times as many: these are slowed, from
in full at one turn to not at all at T turns, in proportion in logarithm. T = 32 ^ m, m the share of the
dependences in the wanted window that lie beyond the trained length: with nothing there, T is 1 and only rates
without a whole turn are slowed, which must not show phases that training never did; with everything there, T is
where YaRN's ramp ends. Where too much lies below the noise to know m, T is Llama 3's, 4. [ours]
"""

from __future__ import annotations

import math

import numpy as np

from phasewise.lens.dilation import windowed
from phasewise.lens.shape import PowerLaw
from phasewise.lens.thresholds import MOST_TURNS, UNKNOWN_TURNS
from phasewise.lens.width import Kernel


def fitted(rates: np.ndarray, *, trained: int, wanted: int, kept_from: float) -> np.ndarray:
    """The rates to serve `wanted` tokens with, where `rates` [n] were trained on `trained`, both radians a token.

    kept_from: T, the turns within the trained length from which a rate is kept, at least 1 (`most_turns`).

    >>> rates = np.array([1.0, 0.1, 0.001])
    >>> rates / fitted(rates, trained=256, wanted=1024, kept_from=1.0)
    array([1., 1., 4.])
    """
    turns = np.maximum(rates * trained / (2 * math.pi), np.finfo(np.float64).tiny)
    kept = np.log(turns) / math.log(kept_from) if kept_from > 1 else np.where(turns >= 1, 1.0, 0.0)
    return rates / (wanted / trained) ** np.clip(1 - kept, 0.0, 1.0)


def most_turns(beyond: float | None) -> float:
    """T of the module's text, for the share of dependences beyond the trained length; None: not known.

    >>> most_turns(0.0), most_turns(1.0), most_turns(None)
    (1.0, 32.0, 4.0)
    """
    return UNKNOWN_TURNS if beyond is None else MOST_TURNS**beyond


def share_beyond(kernel: np.ndarray, *, trained: int, wanted: int) -> float:
    """Of the dependences that queries of a window of `wanted` tokens have there, the share beyond `trained`.

    kernel: K at the distances 1 to `wanted`, any gain.

    >>> round(share_beyond(np.ones(400), trained=100, wanted=400), 2)
    0.56
    """
    seen = windowed(kernel, wanted)
    total = seen.sum()
    return float(seen[trained:].sum() / total) if total > 0 else 0.0


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
