"""The table of angles against plain PyTorch in float64, to the last bit, and against whole numbers."""

import math
from fractions import Fraction

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.frequencies import Geometric
from phasewise.kernels.angles import angles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def in_passes(rates: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    turns = index.double()[..., None] * (rates * (0.5 / math.pi))
    return ((turns - turns.round()) * (2 * math.pi)).float().flatten(2)


@pytest.mark.parametrize(("length", "n"), [(1, 1), (2, 32), (111, 5), (1025, 64), (4096, 128), (70, 1000)])
def test_places_from_0_have_the_bits_of_float64_in_passes(length, n):
    rates = Geometric(base=10_000.0).rates(n, device=DEVICE)
    index = torch.arange(length, device=DEVICE)[None]
    assert torch.equal(angles(rates, None, length), in_passes(rates, index))


@pytest.mark.parametrize("shape", [(1, 40), (3, 17), (2, 15, 2), (1, 9, 3), (2, 0), (0, 4)])
@pytest.mark.parametrize("furthest", [100, 10_000_000, 2**62])
def test_given_places_on_any_axes_have_the_bits_of_float64_in_passes(shape, furthest):
    rates = Geometric(base=500.0).rates(24, device=DEVICE)
    index = torch.randint(-furthest, furthest, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = in_passes(rates, index)
    assert torch.equal(angles(rates, index, shape[1]), expected)
    spread = torch.stack([index, index], -1)[..., 0]
    assert torch.equal(angles(rates, spread, shape[1]), expected)


def test_half_turns_go_to_even_ones_and_whole_turns_are_no_angle():
    index = torch.tensor([[1, 3, -1, 2, 2**53]], device=DEVICE)
    table = angles(torch.tensor([math.pi], dtype=torch.float64, device=DEVICE), index, 5)
    assert table.flatten().tolist() == [torch.tensor(x * math.pi).item() for x in (1, -1, -1, 0, 0)]


def test_angles_at_a_million_places_are_those_of_exact_arithmetic():
    """Pi to 40 digits; a rate's turns a place are one double each, whose rounding a million places magnify."""
    turn = 2 * Fraction(31415926535897932384626433832795028841971, 10**40)
    rates = Geometric(base=10_000.0).rates(64, device=DEVICE)
    table = angles(rates, torch.tensor([[1_000_000]], device=DEVICE), 1)
    for rate, angle in zip(rates.tolist(), table.flatten().tolist(), strict=True):
        exact = 1_000_000 * Fraction(rate) / turn
        assert abs(angle - float((exact - round(exact)) * turn)) < 1e-6


@pytest.mark.parametrize("shape", [None, (2, 9), (2, 9, 2)])
def test_it_passes_every_check_of_its_registration(shape):
    rates = Geometric(base=100.0).rates(8, device=DEVICE)
    index = None if shape is None else torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    results = torch.library.opcheck(angles, (rates, index, 9))
    assert len(results) == 4
    assert set(results.values()) == {"SUCCESS"}
