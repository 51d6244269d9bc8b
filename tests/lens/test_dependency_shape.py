import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.lens.dependency import dependency, log_spaced
from phasewise.lens.dilation import fit_dilation, pair_dilation, window_dilation
from phasewise.lens.profile import spread
from phasewise.lens.shape import power_law, shape_difference, unevenness
from phasewise.lens.width import above_noise, kernel, measure_width, quantile
from tests.lens import sources

FAR = sources.FAR


def kernel_of(values, **options):
    found = kernel(sources.curve_of(FAR, values, **options))
    assert found is not None
    return found


def test_noise_is_hardly_ever_taken_for_a_dependence():
    seen = [above_noise(sources.curve_of(FAR, 0, seed=seed)).any() for seed in range(100)]
    assert sum(seen) <= 8


def test_quantile_is_where_nine_tenths_lie():
    density = np.array([5.0, 3.0, 0.0, 2.0])
    assert quantile(density) == pytest.approx(3.5)
    assert quantile(np.zeros(4)) == 0.0


def test_flat_kernel_that_ends_has_its_support_for_width():
    width = measure_width(sources.curve_of(FAR, np.where(FAR <= 100, 1e-2, 0.0)))
    assert width.kind == "compact"
    assert width.width == width.seen == FAR[FAR <= 100][-1]
    assert width.w90 == pytest.approx(0.9 * width.width, rel=0.1)


def test_copy_from_lag_has_the_lag_for_width():
    tokens = sources.copied(256_000, lag=32, classes=16, seed=1)
    curve = dependency(tokens, np.array([256_000]), distances=np.arange(1, 129))
    width = measure_width(curve)
    assert (width.kind, width.width, width.seen) == ("compact", 32, 32)


def test_exponential_kernel_has_a_width_of_its_own_whatever_the_truncation():
    distances = log_spaced(16_384)
    for longest in (1024, 4096, 16_384):
        kept = distances[distances <= longest]
        width = measure_width(sources.curve_of(kept, np.exp(-kept / 30), error=1e-8))
        assert width.kind == "decaying"
        assert width.width == pytest.approx(30 * np.log(10), rel=0.03)
        assert width.growth == pytest.approx(0, abs=0.01)


def test_slow_power_law_has_a_width_that_grows_with_the_window():
    whole, half = (
        measure_width(sources.curve_of(kept, kept**-0.5, error=1e-5)) for kept in (FAR, FAR[FAR <= 8192])
    )
    assert whole.kind == half.kind == "growing"
    assert whole.w90 == pytest.approx(0.81 * 16_384, rel=0.03)
    assert whole.w90 / half.w90 == pytest.approx(whole.truncation / half.truncation, rel=0.05)
    assert whole.growth == pytest.approx(1, abs=0.03)


def test_width_that_the_noise_may_hide_is_not_given_as_one():
    width = measure_width(sources.curve_of(FAR, FAR**-1.0, error=3e-3))
    assert width.kind == "hidden"
    assert width.hidden > 0.1


def test_no_dependence_has_no_width():
    width = measure_width(sources.curve_of(FAR, 0))
    assert (width.kind, width.width, width.seen) == ("none", None, None)


@settings(deadline=None, max_examples=30)
@given(st.floats(0.2, 2.0), st.floats(-3, 3))
def test_slope_of_a_power_law_is_recovered_at_any_height(slope, log_gain):
    curve = sources.curve_of(FAR, np.exp(log_gain) * FAR**-slope, error=1e-12)
    found = power_law(curve)
    assert found.holds
    assert found.slope == pytest.approx(-slope, abs=1e-3)
    assert found.curvature == pytest.approx(0, abs=1e-3)
    assert found.decades == pytest.approx(np.log10(16_384))


def test_slope_of_a_long_memory_source_lies_within_its_interval():
    length = 1 << 16
    correlation = (1.0 + np.arange(length + 1)) ** -0.4
    tokens = sources.signs(length, correlation, seed=3, documents=64)
    curve = dependency(tokens, np.full(64, length), distances=log_spaced(1000), shuffle="corpus")
    found = power_law(curve)
    stretch = (curve.distances >= found.first) & (curve.distances <= found.last)
    exact = np.log(sources.signs_information(correlation[curve.distances[stretch]]))
    expected = np.polyfit(np.log(curve.distances[stretch]), exact, 1)[0]
    assert found.holds
    assert -0.9 < expected < -0.6
    low, high = found.slope_interval
    assert low - 0.02 <= expected <= high + 0.02


def test_exponential_is_no_power_law():
    distances = log_spaced(16_384)
    found = power_law(sources.curve_of(distances, np.exp(-distances / 30), error=1e-8))
    assert not found.holds
    assert found.curvature < -0.5


def test_comb_on_a_power_law_is_too_rough_to_be_one():
    comb = np.where(FAR % 4 == 0, 3.0, 1.0) * FAR**-0.5
    found = power_law(sources.curve_of(FAR, comb))
    assert not found.holds


def test_curves_one_gain_apart_have_one_shape_once_distances_are_rescaled():
    fine = sources.curve_of(FAR, FAR**-0.7)
    coarse = sources.curve_of(log_spaced(4096), 5 * (4.0 * log_spaced(4096)) ** -0.7)
    other = sources.curve_of(log_spaced(4096), np.exp(-log_spaced(4096) / 500))
    assert shape_difference(fine, 1.0, coarse, 4.0) < 0.01
    assert shape_difference(fine, 1.0, other, 4.0) > 0.5


@settings(deadline=None, max_examples=25)
@given(st.floats(1.0, 8.0), st.floats(8.0, 60.0))
def test_dilation_of_a_kernel_is_the_factor_it_was_dilated_by(factor, length):
    places = np.arange(1, 8193)
    found, misfit = fit_dilation(np.exp(-places / length), np.exp(-places / (factor * length)))
    assert found == pytest.approx(factor, rel=0.02)
    assert misfit < 0.02


@settings(deadline=None, max_examples=10)
@given(st.floats(1e-3, 1e3))
def test_gain_does_not_change_the_dilation(gain):
    places = np.arange(1, 1025)
    short, long = np.exp(-places / 20), np.exp(-places / 70)
    assert fit_dilation(short, gain * long) == pytest.approx(fit_dilation(short, long))


def test_dilated_source_has_its_factor_within_the_interval():
    length, kernels = 1 << 14, []
    for scale, seed in ((12, 11), (48, 12)):
        correlation = np.exp(-np.arange(length + 1) / scale)
        tokens = sources.signs(length, correlation, seed=seed, documents=64)
        kernels.append(kernel(dependency(tokens, np.full(64, length), distances=log_spaced(1000))))
    dilation = pair_dilation(*kernels)
    low, high = dilation.interval
    assert low <= 4 <= high
    assert high / low < 1.3
    assert dilation.misfit < 0.1


def test_power_law_below_one_stretches_with_the_window_and_an_exponential_stays():
    follows = window_dilation(kernel_of(FAR**-0.5))
    assert follows.factor == pytest.approx(4, rel=0.05)
    assert follows.relative > 0.95
    stays = window_dilation(kernel_of(np.exp(-FAR / 40), error=1e-9))
    assert stays.factor == pytest.approx(1, rel=0.02)
    lag = window_dilation(kernel_of(np.where(FAR[20] == FAR, 1.0, 0.0)))
    assert lag.factor == pytest.approx(1, rel=0.02)


def test_smooth_kernel_is_even_far_away_and_a_comb_is_not():
    far = spread(4096)
    assert unevenness(sources.curve_of(far, far**-0.5, error=1e-5)) < 0.01
    comb = np.where(far % 4 == 0, 1.3, 1.0) * far**-0.5
    # Two of eight neighbours are 0.3 higher: their standard deviation is 0.3 * sqrt(3) / 4 of 1.075.
    assert unevenness(sources.curve_of(far, comb, error=1e-5)) == pytest.approx(0.121, abs=0.015)


def test_noise_between_neighbours_is_not_unevenness():
    far = spread(4096)
    found = [unevenness(sources.curve_of(far, far**-0.5, error=0.02, seed=seed)) for seed in range(40)]
    assert sum(value > 0.1 for value in found) <= 2


def test_unevenness_is_unknown_where_nothing_is_seen_or_no_neighbours_are_measured():
    far = spread(4096)
    assert unevenness(sources.curve_of(far, 0)) is None
    assert unevenness(sources.curve_of([1, 2, 4, 8, 16, 32, 64], 1.0)) is None
    assert unevenness(sources.curve_of(np.arange(1, 9), 1.0)) is None


def test_spread_measures_48_distances_with_neighbours_among_them():
    for longest in (400, 1000, 4096, 16_384):
        distances = spread(longest)
        assert 44 <= len(distances) <= 48
        assert (distances[0], distances[-1]) == (1, longest)
        assert unevenness(sources.curve_of(distances, 1.0)) is not None
    assert spread(20).tolist() == list(range(1, 21))
