"""Whether position interpolation will work: what the data say, what the weights say, before it is tried.

Interpolation by s gives a model the scores at distance r that it had at r / s: its whole view is dilated. So
it works when what the data need is dilated too, in width and in resolution. [ours; the reading of
interpolation as a dilation is that of "How data shapes RoPE frequency use"]
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from phasewise.lens.dilation import Dilation
from phasewise.lens.thresholds import DILATES, FINE, MISFIT, STAYS, UNEVEN

Outcome = Literal["works", "fails", "undecided"]


class Prediction(BaseModel):
    """What is expected of interpolation by `scale`, and on what numbers.

    works: the model keeps at least `KEPT` of its advantage over knowing nothing. fails: it does not.
    undecided: the numbers lie between the thresholds, or are missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    scale: float
    outcome: Outcome
    from_data: Outcome
    """From misfit, dilation and unevenness: does what the data need stretch by `scale`, resolution included?"""
    from_weights: Outcome
    """From the product of effective frequency and width: does the model resolve single tokens, and is that lost?"""
    reasons: tuple[str, ...]


def predict_interpolation(
    scale: float,
    *,
    misfit: float | None = None,
    dilation: Dilation | None = None,
    unevenness: float | None = None,
    width: float | None = None,
    theta_eff: float | None = None,
) -> Prediction:
    """Predict what dividing every frequency by `scale` does at `scale` times the trained length.

    misfit: of the kernel as trained on, dilated by `scale`, from the kernel as served: `dilation_misfit`.
    dilation: from the data as trained on to the data as served (`pair_dilation`), or from short windows to
        long ones of one corpus (`window_dilation`). unevenness: see `phasewise.lens.shape.unevenness`.
    width: of the trained kernel, tokens.
    theta_eff: of the trained model, radians per token, see `phasewise.lens.spectrum.Use`.

    What is left out is not known. Data decide alone where weights are not given; weights alone can only say
    that it fails.
    Raises ValueError for a scale below 1 and for a width or a frequency that is not above 0.

    >>> stretched = Dilation(factor=3.8, interval=(3.5, 4.1), misfit=0.02, stretch=4.0, relative=0.96)
    >>> predict_interpolation(2.0, dilation=stretched, width=64.0, theta_eff=0.02).outcome
    'works'
    >>> predict_interpolation(4.0, dilation=stretched, width=64.0, theta_eff=0.5).outcome
    'fails'
    """
    if not 1 <= scale < math.inf:
        raise ValueError(f"scale must be finite and at least 1, but is {scale}; give served / trained length")
    for name, value in (("width", width), ("theta_eff", theta_eff)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be finite and above 0, but is {value}; leave it out if not known")
    if scale == 1:
        reasons = ("a scale of 1 changes nothing",)
        return Prediction(
            scale=scale, outcome="works", from_data="works", from_weights="works", reasons=reasons
        )
    from_data, data_reasons = _of_data(scale, misfit, dilation, unevenness)
    from_weights, weight_reasons = _of_weights(scale, width, theta_eff)
    return Prediction(
        scale=scale,
        outcome=_together(from_data, from_weights, weighed=theta_eff is not None and width is not None),
        from_data=from_data,
        from_weights=from_weights,
        reasons=data_reasons + weight_reasons,
    )


def dilation_misfit(short: np.ndarray, long: np.ndarray, scale: float) -> float:
    """The largest difference of two cumulative kernels, the first one dilated by `scale`: 0 to 1.

    short, long: K at the distances 1, 2, .. of a token from what it predicts, any gain. Attention starts one
    token before the predicted one, so its lags 0, 1, .. are what is dilated; a lag fills the token around it.
    A lag of one token is (1 - 1 / scale) / 2 off even where its distance dilates.

    >>> dilation_misfit(np.ones(100), np.ones(400), 4.0) < 0.01
    True
    >>> dilation_misfit(np.eye(100)[50], np.eye(400)[200], 4.0)
    0.375
    """
    edges = np.concatenate([_edges(long), scale * _edges(short)])
    return float(np.abs(_cumulated(long, edges) - _cumulated(short, edges / scale)).max())


def _edges(density: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.arange(len(density)) + 0.5])


def _cumulated(density: np.ndarray, lag: np.ndarray) -> np.ndarray:
    cumulated = np.concatenate([[0.0], density.cumsum()])
    return np.interp(lag, _edges(density), cumulated / max(cumulated[-1], np.finfo(np.float64).tiny))


def _together(data: Outcome, weights: Outcome, *, weighed: bool) -> Outcome:
    if "fails" in (data, weights):
        return "fails"
    return "undecided" if weighed and weights == "undecided" else data


def _of_data(
    scale: float, misfit: float | None, dilation: Dilation | None, unevenness: float | None
) -> tuple[Outcome, tuple[str, ...]]:
    outcomes: list[Outcome] = []
    reasons: list[str] = []
    if misfit is not None:
        outcomes.append("works" if misfit <= MISFIT else "fails")
        reasons.append(
            f"dilated by {scale:g}, the cumulative kernel as trained differs from the one served by up to "
            f"{misfit:.2f} (threshold {MISFIT})"
        )
    if dilation is not None:
        relative = dilation.relative
        if relative is None:
            relative = math.log(dilation.factor) / math.log(scale)
        outcomes.append("works" if relative >= DILATES else "fails" if relative <= STAYS else "undecided")
        reasons.append(
            f"the kernel dilates {relative:.2f} of the way to the scale, in logarithm (works from {DILATES}, "
            f"fails up to {STAYS})"
        )
    if unevenness is not None:
        outcomes.append("works" if unevenness <= UNEVEN else "fails")
        reasons.append(
            f"far away, neighbouring distances differ by {unevenness:.0%} of the dependence there "
            f"(threshold {UNEVEN:.0%})"
        )
    if "fails" in outcomes:
        return "fails", tuple(reasons)
    if misfit is None and dilation is None:
        return "undecided", (*reasons, "whether the data dilate is not known")
    return ("undecided" if "undecided" in outcomes else "works"), tuple(reasons)


def _of_weights(
    scale: float, width: float | None, theta_eff: float | None
) -> tuple[Outcome, tuple[str, ...]]:
    """A lag of one token is (1 - 1 / scale) / 2 off: too much for any; less still only where none shifts."""
    if width is None or theta_eff is None:
        return "undecided", ("effective frequency and width are not both known",)
    product, misfit = theta_eff * width, (1 - 1 / scale) / 2
    reason = f"effective frequency times width is {product:.2f} radians"
    if product <= FINE:
        return "works", (f"{reason} (fine above {FINE:.2f}): a coarse view",)
    if misfit > MISFIT:
        return "fails", (f"{reason} (fine above {FINE:.2f}): single tokens, lost at a scale of {scale:g}",)
    return "undecided", (
        f"{reason} (fine above {FINE:.2f}): single tokens survive a scale of {scale:g} only where every lag "
        "dilates exactly",
    )
