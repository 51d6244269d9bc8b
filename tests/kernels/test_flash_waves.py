"""The backward of long rows by flash-attn-4 takes tiles of keys in waves: another order, the same gradients."""

import pytest
import torch

from phasewise.kernels.packages import flash_obstacle
from tests.kernels.separable_oracle import GPU, Case, fused, inputs_of

runs = (
    GPU and torch.cuda.get_device_capability()[0] == 9 and flash_obstacle("phasewise.kernels.flash") is None
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not runs, reason="needs a Hopper GPU and flash-attn-4"),
]
HALF = torch.bfloat16


def square(length: int, width: int, preparation: str, **options) -> Case:
    return Case(
        length,
        length,
        width=width,
        v_width=width,
        preparation=preparation,
        dtype=HALF,
        body="flash",
        **options,
    )


@pytest.mark.parametrize("wave", [1, 3, 132])
@pytest.mark.parametrize(
    "case",
    [
        square(1, 64, "none"),
        square(1025, 64, "rope", heads=3, rows=2),
        square(1025, 128, "rope"),
        square(700, 64, "softplus"),
        square(777, 64, "none", heads=6, group=3),
        Case(300, 1025, width=64, v_width=64, heads=4, group=2, preparation="rope", dtype=HALF, body="flash"),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_usual_order_to_the_last_sum(case, wave, monkeypatch):
    from phasewise.kernels import flash_backward

    inputs = inputs_of(case)
    usual = fused(case, inputs)
    monkeypatch.setattr(flash_backward, "_is_long", lambda kind, queries: kind.row_ends)
    monkeypatch.setattr(flash_backward, "multiprocessors", lambda device: wave)
    waves = [fused(case, inputs) for _ in range(3)]
    for name in usual:
        assert all(torch.equal(waves[0][name], again[name]) for again in waves[1:]), name
        if name in ("k", "v"):  # a tile of keys sums over queries in the order that it did
            assert torch.equal(waves[0][name], usual[name])
        elif name in ("q", "phase"):
            size = usual[name].float().abs().max()
            rounding = torch.finfo(HALF).eps if name == "q" else 2**-16  # of a sum over all places
            assert (waves[0][name].float() - usual[name].float()).abs().max() <= 2 * rounding * size
