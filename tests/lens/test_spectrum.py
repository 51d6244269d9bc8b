import math

import pytest
import torch

from phasewise.encodings import TAPA, PoPE, RoPE
from phasewise.frequencies import Geometric
from phasewise.lens.phase import PhaseMeter
from phasewise.lens.spectrum import SpectrumMeter
from phasewise.model.reading import Layer
from phasewise.positions import Positions

RATES = Geometric(base=10_000.0).rates(4)


def spectrum(q, k, encoding=None, *, trained=None, wanted=None, queries=0):
    encoding = encoding or RoPE(head_dim=8)
    meter = SpectrumMeter(Layer(0, encoding), length=q.shape[2], queries=queries)
    meter.add(q, k)
    return meter.result(trained=trained, wanted=wanted)


def with_energy(*energy):
    """Queries [1, 1, 6, 8] whose pair c has |q_c|^2 = energy[c] at every place."""
    return torch.tensor(energy).sqrt().repeat(2).mul(0.5**0.5).expand(1, 1, 6, 8)


def test_even_energy_has_the_middle_rate_and_uses_every_frequency():
    found = spectrum(with_energy(1.0, 1.0, 1.0, 1.0), with_energy(1.0, 1.0, 1.0, 1.0))
    assert found.mean.theta_eff == pytest.approx(RATES.log().mean().exp().item(), rel=1e-4)
    assert found.mean.participation == pytest.approx(4.0, rel=1e-4)
    assert found.excess == pytest.approx((1.0, 1.0, 1.0, 1.0), rel=1e-4)


def test_energy_in_one_frequency_has_its_rate():
    found = spectrum(with_energy(0.0, 0.0, 5.0, 0.0), with_energy(1.0, 1.0, 1.0, 1.0))
    assert found.mean.theta_eff == pytest.approx(RATES[2].item(), rel=1e-4)
    assert found.mean.participation == pytest.approx(1.0)
    assert found.causal.share == pytest.approx((0.0, 0.0, 1.0, 0.0))
    assert found.mean.energy == pytest.approx(5.0, rel=1e-4)


def test_layer_averages_heads_after_each_is_normalised():
    q = torch.cat([with_energy(1.0, 0.0, 0.0, 0.0), with_energy(0.0, 1e6, 0.0, 0.0)], 1)
    found = spectrum(q, with_energy(1.0, 1.0, 1.0, 1.0))
    assert found.mean.share == pytest.approx((0.5, 0.5, 0.0, 0.0))
    assert [head.mean.share[0] for head in found.heads] == [1.0, 0.0]


def test_head_without_energy_has_no_rate_and_does_not_count_in_the_layer():
    q = torch.cat([with_energy(1.0, 0.0, 0.0, 0.0), with_energy(0.0, 0.0, 0.0, 0.0)], 1)
    found = spectrum(q, with_energy(1.0, 1.0, 1.0, 1.0))
    dead = found.heads[1].mean
    assert (dead.theta_eff, dead.participation, dead.energy) == (None, None, 0.0)
    assert found.mean.share == pytest.approx((1.0, 0.0, 0.0, 0.0))


def test_channels_that_do_not_turn_are_counted_apart():
    encoding = RoPE(head_dim=8, fraction=0.5)
    x = torch.ones(1, 1, 6, 8)
    found = spectrum(x, x, encoding)
    assert found.mean.zero_share == pytest.approx(0.5)
    assert len(found.rates) == len(found.mean.share) == len(found.heads[0].coherent) == 2
    assert sum(found.mean.share) == pytest.approx(1.0)


def test_turns_are_length_over_wavelength():
    x = with_energy(1.0, 1.0, 1.0, 1.0)
    found = spectrum(x, x, trained=2048, wanted=8192)
    assert found.turns_trained == pytest.approx([2048 / wave for wave in found.wavelengths], rel=1e-4)
    assert found.turns_wanted == pytest.approx([8192 / wave for wave in found.wavelengths], rel=1e-4)
    assert spectrum(x, x).turns_trained is None


def test_pope_reports_magnitudes_phases_and_what_the_clamp_froze():
    torch.manual_seed(0)
    encoding = PoPE(num_heads=4, head_dim=8, phase_bound="clamp")
    with torch.no_grad():
        encoding.phase[0] = 0.5
        encoding.phase[1] = -1.5 * math.pi
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    polar = spectrum(q, k, encoding).polar
    assert polar is not None
    expected = torch.nn.functional.softplus(q[0]).mean(1)
    assert torch.allclose(torch.tensor(polar.query_magnitude), expected, rtol=1e-4)
    assert torch.allclose(
        torch.tensor(polar.key_magnitude), torch.nn.functional.softplus(k[0]).mean(1), rtol=1e-4
    )
    assert polar.phase[0] == (0.0,) * 8
    assert polar.phase[1] == pytest.approx((math.pi / 2,) * 8, rel=1e-4)
    assert polar.frozen == 0.25


@pytest.mark.parametrize("phase", ["quadratic", "linear"])
@pytest.mark.parametrize("two_pi", [True, False])
def test_tapa_gate_is_the_mean_cosine_of_its_scores_at_each_distance(phase, two_pi):
    torch.manual_seed(0)
    encoding = TAPA(head_dim=8, alpha=0.3, phase=phase, two_pi=two_pi)
    q, k = 0.3 * torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8)
    q[..., :4] = k[..., :4] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # amplitude 1: the score is the cosine
    meter = PhaseMeter(Layer(0, encoding), length=20)
    meter.add(q, k)
    found = meter.result(trained=None, wanted=None)
    at = Positions.arange(20)
    cosines = encoding.scores(q, k, at, at, scale=1.0)[0]
    for head, values in zip(cosines, found.heads, strict=True):
        near = PhaseMeter(Layer(0, encoding), length=20)
        assert near.distances == found.distances
        for place, distance in enumerate(found.distances):
            diagonal = head.diagonal(-distance)
            assert values.gate[place] == pytest.approx(diagonal.mean().item(), rel=1e-3, abs=1e-4)
            spread = diagonal.var(unbiased=False).clamp(min=0).sqrt().item()
            assert values.spread[place] == pytest.approx(spread, rel=1e-2, abs=1e-3)


def test_tapa_change_is_nothing_without_distance_power_and_full_for_wide_arguments():
    torch.manual_seed(0)
    q, k = 20 * torch.randn(1, 1, 400, 16), torch.randn(1, 1, 400, 16)

    def last(alpha):
        meter = PhaseMeter(Layer(0, TAPA(head_dim=16, alpha=alpha)), length=400)
        meter.add(q[:, :, :], k)
        return meter.result(trained=None, wanted=None).heads[0].change[10]

    assert last(0.0) == 0.0
    assert last(0.5) == pytest.approx(1.0, abs=0.15)


def test_tapa_argument_quantiles_follow_the_sample():
    torch.manual_seed(0)
    encoding = TAPA(head_dim=8)
    q, k = torch.randn(1, 1, 3000, 8), torch.ones(1, 1, 3000, 8)
    meter = PhaseMeter(Layer(0, encoding), length=2)
    meter.add(q, k)
    head = meter.result(trained=None, wanted=None).heads[0]
    x = q[0, 0, 1:, 4:].sum(-1) * 2 * math.pi / 2
    expected = torch.quantile(x, torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])).tolist()
    assert head.quantiles == pytest.approx(expected, abs=0.2)
    assert head.rms == pytest.approx(x.square().mean().sqrt().item(), rel=1e-3)
    assert sum(head.argument) == pytest.approx(1.0, rel=1e-3)
