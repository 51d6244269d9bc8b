"""What is predicted of interpolation, on kernels whose dilation is known."""

import numpy as np
import pytest

from phasewise.lens.dilation import Dilation, pair_dilation
from phasewise.lens.prediction import dilation_misfit, predict_interpolation
from phasewise.lens.width import Kernel


def cosine(width: int, room: int = 1024) -> np.ndarray:
    distance = np.arange(room)
    return np.where(distance < width, 1 + np.cos(np.pi * distance / width), 0.0)


def lag(distance: int, room: int = 1024) -> np.ndarray:
    return np.eye(room)[distance]


@pytest.mark.parametrize("scale", [1.5, 2, 4])
@pytest.mark.parametrize("width", [8, 16, 64])
def test_a_smooth_kernel_that_dilates_works(width: int, scale: float) -> None:
    before, dilated = cosine(width), cosine(int(scale * width))
    pair = pair_dilation(Kernel(before, before[None]), Kernel(dilated, dilated[None]))
    misfit = dilation_misfit(before, dilated, scale)
    assert misfit < 0.08
    assert predict_interpolation(scale, misfit=misfit, dilation=pair).outcome == "works"


@pytest.mark.parametrize("width", [8, 16, 64])
def test_a_smooth_kernel_that_stays_fails_from_a_scale_of_two_on(width: int) -> None:
    misfits = [dilation_misfit(cosine(width), cosine(width), scale) for scale in (1.5, 2, 4)]
    found = [
        predict_interpolation(scale, misfit=misfit).outcome
        for scale, misfit in zip((1.5, 2, 4), misfits, strict=True)
    ]
    assert misfits == sorted(misfits)
    assert found == ["works", "fails", "fails"]


@pytest.mark.parametrize("distance", [8, 64])
def test_a_lag_of_one_token_is_lost_at_four_times_its_distance_and_kept_at_twice(distance: int) -> None:
    for scale, outcome in ((1.5, "works"), (2, "works"), (4, "fails")):
        misfit = dilation_misfit(lag(distance), lag(int(scale * distance)), scale)
        assert misfit == pytest.approx((1 - 1 / scale) / 2)
        found = predict_interpolation(scale, misfit=misfit, dilation=dilation(relative=1.0))
        assert found.outcome == outcome
        assert any("dilated by" in reason for reason in found.reasons)


@pytest.mark.parametrize("scale", [1.5, 2, 4])
def test_a_lag_that_stays_fails_at_any_scale(scale: float) -> None:
    assert predict_interpolation(scale, misfit=dilation_misfit(lag(16), lag(16), scale)).outcome == "fails"


def test_a_misfit_knows_no_gain_and_an_empty_kernel_has_one() -> None:
    assert dilation_misfit(cosine(16), 5 * cosine(32), 2) == pytest.approx(
        dilation_misfit(cosine(16), cosine(32), 2)
    )
    assert dilation_misfit(np.zeros(8), cosine(32), 2) == 1


def dilation(*, relative: float | None, factor: float = 2.0) -> Dilation:
    return Dilation(factor=factor, interval=(factor, factor), misfit=0.0, stretch=4.0, relative=relative)


def test_weights_that_resolve_finely_overrule_data_that_dilate() -> None:
    data = dilation(relative=1.0, factor=4.0)
    assert predict_interpolation(2, dilation=data, width=32, theta_eff=0.05).outcome == "works"
    assert predict_interpolation(2, dilation=data, width=32, theta_eff=0.8).outcome == "undecided"
    assert predict_interpolation(4, dilation=data, width=32, theta_eff=0.8).outcome == "fails"


def test_coarse_weights_do_not_save_data_that_stay() -> None:
    found = predict_interpolation(2, dilation=dilation(relative=0.0), width=32, theta_eff=0.01)
    assert (found.outcome, found.from_data, found.from_weights) == ("fails", "fails", "works")


def test_uneven_data_fail_and_half_a_dilation_is_undecided() -> None:
    assert predict_interpolation(2, dilation=dilation(relative=1.0), unevenness=0.3).outcome == "fails"
    assert predict_interpolation(2, dilation=dilation(relative=0.5)).outcome == "undecided"


def test_of_two_corpora_the_dilation_counts_against_the_scale() -> None:
    half_way = dilation(relative=None, factor=2.0)
    assert predict_interpolation(2, dilation=half_way).outcome == "works"
    assert predict_interpolation(4, dilation=half_way).outcome == "undecided"
    assert predict_interpolation(16, dilation=half_way).outcome == "fails"


def test_nothing_known_is_undecided_and_a_scale_of_one_works() -> None:
    assert predict_interpolation(2).outcome == "undecided"
    assert predict_interpolation(2, width=32, theta_eff=0.01).outcome == "undecided"
    assert predict_interpolation(4, width=32, theta_eff=0.9).outcome == "fails"
    assert predict_interpolation(1).outcome == "works"


@pytest.mark.parametrize(
    ("scale", "width", "theta_eff"),
    [(0.5, None, None), (2, 0.0, None), (2, None, -1.0), (np.inf, None, None)],
)
def test_values_without_meaning_are_refused(
    scale: float, width: float | None, theta_eff: float | None
) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        predict_interpolation(scale, width=width, theta_eff=theta_eff)
