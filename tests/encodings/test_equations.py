"""Each encoding's scores equal its paper's equation, restated here with loops in float64."""

import cmath
import math
from decimal import Decimal, getcontext

import pytest
import torch

from phasewise.encodings import TAPA, ALiBi, NoPE, PoPE, RoPE, named
from phasewise.encodings.base import angles
from phasewise.frequencies import NTK, Explicit, Geometric, Proportional, YaRN
from phasewise.positions import Positions

HEADS, KV_HEADS, LENGTH, KEYS, WIDTH = 4, 2, 3, 5, 8
QUERY_PLACES, KEY_PLACES = [2, 7, 1_000_003], [0, 2, 3, 999_999, 1_000_003]


@pytest.fixture
def qk():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, HEADS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    k = torch.randn(2, KV_HEADS, KEYS, WIDTH, generator=generator, dtype=torch.float64)
    return q, k


def at(places):
    index = torch.tensor([places])
    return Positions(index, torch.zeros_like(index))


def assert_equation(encoding, qk, score, **options):
    q, k = qk
    result = encoding.scores(q, k, at(QUERY_PLACES), at(KEY_PLACES), **options)
    assert result.shape == (2, HEADS, LENGTH, KEYS)
    for b in range(2):
        for h in range(HEADS):
            for t, i in enumerate(QUERY_PLACES):
                for s, j in enumerate(KEY_PLACES):
                    expected = score(h, q[b, h, t].tolist(), k[b, h // 2, s].tolist(), i, j)
                    assert result[b, h, t, s].item() == pytest.approx(expected, rel=1e-8, abs=1e-8)


def rotated_product(q, k, i, j, rates):
    """Re sum (q_c + i q_c+n) conj(k_c + i k_c+n) e^(i (i-j) rate): RoPE's complex form, half-split pairs."""
    n = len(rates)
    total = 0.0
    for c, rate in enumerate(rates):
        turn = cmath.exp(1j * ((i - j) * rate))
        total += (complex(q[c], q[c + n]) * complex(k[c], k[c + n]).conjugate() * turn).real
    return total


def softplus(x):
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def test_nope_is_the_scaled_dot_product(qk):
    assert_equation(
        NoPE(), qk, lambda h, q, k, i, j: sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(WIDTH)
    )


def test_rope_is_the_rotation_of_half_split_pairs(qk):
    rates = [10_000 ** (-c / 4) for c in range(4)]
    assert_equation(
        RoPE(head_dim=WIDTH), qk, lambda h, q, k, i, j: rotated_product(q, k, i, j, rates) / math.sqrt(WIDTH)
    )


def test_partial_rope_turns_the_first_channels_and_leaves_the_rest(qk):
    rates = [500.0 ** (-c / 2) for c in range(2)]

    def score(h, q, k, i, j):
        rest = sum(a * b for a, b in zip(q[4:], k[4:], strict=True))
        return (rotated_product(q[:4], k[:4], i, j, rates) + rest) / math.sqrt(WIDTH)

    assert_equation(RoPE(head_dim=WIDTH, fraction=0.5, frequencies=Geometric(base=500.0)), qk, score)


def test_proportional_rope_pairs_over_the_whole_head_and_stills_the_slow_pairs(qk):
    rates = [10_000 ** (-c / 4) if c < 2 else 0.0 for c in range(4)]
    encoding = RoPE(head_dim=WIDTH, frequencies=Proportional(base=10_000.0, fraction=0.5))
    assert_equation(encoding, qk, lambda h, q, k, i, j: rotated_product(q, k, i, j, rates) / math.sqrt(WIDTH))


def test_yarn_multiplies_the_scores_by_its_attention_factor_squared(qk):
    rule = YaRN(base=10_000.0, factor=4.0, original_length=64)
    rates = rule.rates(4).tolist()
    factor = (0.1 * math.log(4.0) + 1) ** 2
    assert_equation(
        RoPE(head_dim=WIDTH, frequencies=rule),
        qk,
        lambda h, q, k, i, j: factor * rotated_product(q, k, i, j, rates) / math.sqrt(WIDTH),
    )


@pytest.mark.parametrize("bound", ["wrap", "clamp"])
@pytest.mark.parametrize("magnitude", ["softplus", "relu", "identity"])
def test_pope_is_the_sum_of_magnitudes_times_cosines(qk, magnitude, bound):
    encoding = PoPE(num_heads=HEADS, head_dim=WIDTH, magnitude=magnitude, phase_bound=bound).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        encoding.phase.uniform_(-9.0, 3.0, generator=generator)
    delta = encoding.phase.tolist()
    if bound == "clamp":
        delta = [[min(max(x, -2 * math.pi), 0.0) for x in row] for row in delta]
    size = {"softplus": softplus, "relu": lambda x: max(x, 0.0), "identity": lambda x: x}[magnitude]

    def score(h, q, k, i, j):
        total = 0.0
        for c in range(WIDTH):
            theta = 10_000 ** (-c / WIDTH)
            total += size(q[c]) * size(k[c]) * math.cos((j - i) * theta + delta[h][c])
        return total / math.sqrt(WIDTH)

    assert_equation(encoding, qk, score)


def test_pope_on_two_axes_gives_each_axis_its_share_of_the_channels():
    encoding = PoPE(num_heads=1, head_dim=6, axes=2).double()
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 1, 6, 6, generator=generator, dtype=torch.float64)
    places = Positions.grid([2, 3])
    scores = encoding.scores(q, q, places, places, scale=1.0)
    cells = [(row, column) for row in range(2) for column in range(3)]
    for t, query_cell in enumerate(cells):
        for s, key_cell in enumerate(cells):
            expected = 0.0
            for c in range(6):
                axis, theta = c // 3, 10_000 ** (-(c % 3) / 3)
                size = softplus(q[0, 0, t, c].item()) * softplus(q[0, 0, s, c].item())
                expected += size * math.cos((key_cell[axis] - query_cell[axis]) * theta)
            assert scores[0, 0, t, s].item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("two_pi", [True, False])
@pytest.mark.parametrize("phase", ["quadratic", "linear"])
@pytest.mark.parametrize(("alpha", "fraction"), [(0.1, 0.5), (0.5, 0.25), (0.0, 0.75), (1.0, 0.5)])
def test_tapa_is_an_amplitude_times_the_cosine_of_a_content_phase(qk, alpha, fraction, phase, two_pi):
    encoding = TAPA(head_dim=WIDTH, alpha=alpha, fraction=fraction, phase=phase, two_pi=two_pi)
    split = int(WIDTH * fraction)

    def score(h, q, k, i, j):
        amplitude = sum(a * b for a, b in zip(q[:split], k[:split], strict=True)) / math.sqrt(split)
        if phase == "quadratic":
            content = sum(a * b for a, b in zip(q[split:], k[split:], strict=True))
        else:
            content = sum(q[split:]) + sum(k[split:])
        power = abs(i - j) ** alpha if i != j else 0.0
        turn = 2 * math.pi if two_pi else 1.0
        return amplitude * math.cos(turn * power * content / math.sqrt(WIDTH - split))

    assert_equation(encoding, qk, score)


def test_alibi_subtracts_slope_times_distance(qk):
    slopes = [2 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)]

    def score(h, q, k, i, j):
        return sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(WIDTH) - slopes[h] * abs(i - j)

    assert_equation(ALiBi(num_heads=HEADS), qk, score)


def test_alibi_slopes_of_twelve_heads_are_the_authors():
    expected = [2.0 ** -(h + 1) for h in range(8)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    assert ALiBi(num_heads=12).slopes().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("position", [512, 4096, 131_072, 1_000_000])
def test_angles_are_within_a_thousandth_of_a_radian_at_every_length(position):
    getcontext().prec = 50
    full_turn = 2 * Decimal("3.14159265358979323846264338327950288419716939937510")
    rates = Geometric(base=10_000.0).rates(64)
    computed = angles(torch.tensor([position]), rates)[0].tolist()
    for rate, angle in zip(rates.tolist(), computed, strict=True):
        exact = (Decimal(position) * Decimal(rate)) % full_turn
        difference = abs(Decimal(angle) - exact) % full_turn
        assert min(difference, full_turn - difference) < Decimal("1e-6")


def test_rates_given_by_hand_are_used(qk):
    rates = [1.0, 0.3, 0.01, 0.0]
    assert_equation(
        RoPE(head_dim=WIDTH, frequencies=Explicit(values=tuple(rates))),
        qk,
        lambda h, q, k, i, j: rotated_product(q, k, i, j, rates) / math.sqrt(WIDTH),
    )


def test_scale_replaces_the_encodings_own(qk):
    for encoding in (NoPE(), RoPE(head_dim=WIDTH), PoPE(num_heads=HEADS, head_dim=WIDTH)):
        own = encoding.scores(*qk, at(QUERY_PLACES), at(KEY_PLACES))
        given = encoding.scores(*qk, at(QUERY_PLACES), at(KEY_PLACES), scale=1.0)
        torch.testing.assert_close(own * math.sqrt(WIDTH), given)
    tapa = TAPA(head_dim=WIDTH, fraction=0.25)
    own = tapa.scores(*qk, at(QUERY_PLACES), at(KEY_PLACES))
    torch.testing.assert_close(
        own * math.sqrt(2), tapa.scores(*qk, at(QUERY_PLACES), at(KEY_PLACES), scale=1.0)
    )


def test_tapa_bias_decays_as_the_theorem_says():
    """E[cos] = (1 + t^2 s^4)^(-Dp/2), t = 2 pi |d|^alpha / sqrt(Dp), for N(0, s^2) phase parts."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 4000, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    q[..., :8], k[..., :8] = 1.0, 1.0
    q[..., 8:] *= 0.5
    k[..., 8:] *= 0.5
    distance, alpha = 3, 0.3
    encoding = TAPA(head_dim=16, alpha=alpha)
    query_at, key_at = Positions.arange(1, start=distance), Positions.arange(1)
    paired = [t.transpose(0, 2) for t in (q, k)]
    mean = (encoding.scores(*paired, query_at, key_at) * math.sqrt(8) / 8).mean().item()
    t = 2 * math.pi * distance**alpha / math.sqrt(8)
    assert mean == pytest.approx((1 + t**2 * 0.5**4) ** -4, abs=0.03)


def test_rope_bias_depends_on_distance_alone():
    """With mean pair product mu the mean score at distance r is mu sum_d cos(r theta_d) / sqrt(D)."""
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(20_000, 1, 1, 8, generator=generator, dtype=torch.float64)
    noise = torch.randn(20_000, 1, 1, 8, generator=generator, dtype=torch.float64)
    scores = RoPE(head_dim=8).scores(
        content, content + noise, Positions.arange(1, start=5), Positions.arange(1)
    )
    expected = 2 * sum(math.cos(5 * 10_000 ** (-c / 4)) for c in range(4)) / math.sqrt(8)
    assert scores.mean().item() == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoPE(head_dim=7), "pairs"),
        (lambda: RoPE(head_dim=8, fraction=0.4), "x fraction 0.4 gives 3; choose them so that this is even"),
        (lambda: RoPE(head_dim=8, fraction=1.5), "less than or equal to 1"),
        (lambda: PoPE(num_heads=2, head_dim=8, axes=3), "no multiple of 3; choose one, or other axes"),
        (lambda: PoPE(num_heads=2, head_dim=8, phase_init="random"), "'zero' or 'uniform'"),
        (lambda: TAPA(head_dim=8, alpha=-0.1), "greater than or equal to 0"),
        (lambda: TAPA(head_dim=8, fraction=0.3), "whole number"),
        (lambda: TAPA(head_dim=8, fraction=1.0), "less than 1"),
        (lambda: TAPA(head_dim=1), "from 2 to 1048576, but is 1$"),
        (lambda: TAPA(head_dim=10**30), f"from 2 to 1048576, but is {10**30}$"),
        (lambda: RoPE(head_dim=1), "from 2 to 1048576, but is 1$"),
        (lambda: RoPE(head_dim=10**30), f"from 2 to 1048576, but is {10**30}$"),
        (lambda: PoPE(num_heads=2, head_dim=10**12), f"from 1 to 1048576, but is {10**12}$"),
        (lambda: PoPE(num_heads=10**30, head_dim=8), f"from 1 to 1048576, but is {10**30}$"),
        (lambda: ALiBi(num_heads=10**30), f"from 1 to 1048576, but is {10**30}$"),
        (lambda: Explicit(values=(1.0,)).rates(10**30), "from 1 to 2\\^20"),
        (lambda: TAPA(head_dim=8, alpha=1e5), "less than or equal to 4"),
        (lambda: ALiBi(num_heads=0), "from 1 to 1048576, but is 0$"),
        (lambda: ALiBi(num_heads=2.5), "whole number"),
        (lambda: PoPE(num_heads=-2, head_dim=8), "whole number"),
        (lambda: RoPE(head_dim=8.0), "whole number"),
        (lambda: RoPE(head_dim=8, frequencies=Explicit(values=(1.0,))), "lists 1 channels"),
        (lambda: RoPE(head_dim=2, frequencies=NTK(base=1e4, factor=2.0)), "single channel"),
        (lambda: named("rotary"), "nope, rope, pope, tapa, alibi"),
    ],
)
def test_bad_settings_name_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()
