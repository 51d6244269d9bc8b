"""TAPA's forward inside flash-attn-4's pipeline against its equation, and what it hands on to the other kernel."""

from functools import partial

import pytest
import torch

from phasewise.kernels import tapa
from tests.kernels.test_tapa import GPU, assert_within_budget, definition, inputs

CALL = {
    "device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "amplitude_dim": 32, "qk_width": 64,
    "v_width": 64, "queries": 128, "keys": 128, "phase": "quadratic", "causal": True, "window": None, "placed": False,
}  # fmt: skip
OPTIONS = {"alpha": 0.1, "amplitude_dim": 32, "causal": True, "window": None}
flash = partial(tapa.attend, body="flash")
assert_flash_within_budget = partial(assert_within_budget, attend=flash)
HALVES = [torch.bfloat16, torch.float16]
runs = GPU and tapa.flash_unsupported(**CALL | {"capability": torch.cuda.get_device_capability()}) is None
on_hopper = pytest.mark.skipif(
    not runs, reason="needs a Hopper GPU and flash-attn-4 of the version it is written for"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cpu", "capability": None}, "CUDA device"),
        ({"capability": (10, 0)}, "compute capability 9.0"),
        ({"dtype": torch.float32}, "float16 and bfloat16, not float32"),
        ({"amplitude_dim": 24}, "multiples of 16 channels, up to 128, not 24 of 64 and 64"),
        ({"v_width": 256}, "64 and 256; triton takes all"),
        ({"phase": "linear"}, "not the linear one; triton does"),
        ({"placed": True}, "positions and windows go to triton"),
        ({"causal": False}, "causal"),
        ({"window": 5}, "windows"),
        ({"queries": 129}, "the last of the keys"),
    ],
)
def test_what_flash_cannot_run_is_named_with_what_can(change, message, monkeypatch):
    monkeypatch.setattr(tapa, "flash_obstacle", lambda module: None)
    assert tapa.flash_unsupported(**CALL) is None
    assert message in (tapa.flash_unsupported(**CALL | change) or "")


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("length", "keys"), [(1, 1), (2, 2), (15, 15), (111, 111), (1025, 1025), (1, 700), (33, 97)]
)
def test_flash_output_and_every_gradient_are_the_equation_at_odd_lengths(length, keys, dtype):
    assert_flash_within_budget(inputs(length, keys, width=64, v_width=64, dtype=dtype), amplitude_dim=32)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("width", "v_width", "amplitude_dim"), [(32, 16, 16), (96, 64, 32), (128, 128, 64)])
def test_flash_output_is_the_equation_at_every_width_with_grouped_heads(width, v_width, amplitude_dim):
    tensors = inputs(333, heads=4, groups=2, width=width, v_width=v_width, batch=2, dtype=torch.bfloat16)
    assert_flash_within_budget(tensors, amplitude_dim=amplitude_dim)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("alpha", "scale"), [(0.0, None), (0.5, 0.3), (1.0, None)])
def test_flash_output_is_the_equation_for_other_exponents(alpha, scale):
    tensors = inputs(300, width=64, v_width=64, dtype=torch.bfloat16)
    assert_flash_within_budget(tensors, alpha, two_pi=False, scale=scale, amplitude_dim=32)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", [8.0, 60.0, 300.0])
@pytest.mark.parametrize("first", [0, 300])
def test_flash_survives_scores_far_above_all_that_came_before(first, factor, dtype):
    """Keys are walked from the last to the first, and a tile's weights are relative to those before it."""
    q, k, v = inputs(700, heads=1, width=64, v_width=64, dtype=dtype)
    k[:, :, first : first + 5, :32] *= factor
    out, lse = flash(q, k, v, **OPTIONS)
    exact, exact_lse = definition(q, k, v, **OPTIONS)
    amplitudes = (q[..., :32].double() @ k[..., :32].double().mT).abs().amax(-1) * 32**-0.5
    cosine_error = 2e-4 * amplitudes  # so much may a score be off, as cosines may by 2e-4
    assert ((lse - exact_lse).abs() <= cosine_error + 1e-3).all()
    wrong = (out.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert (wrong <= 8 * torch.finfo(dtype).eps + 4 * cosine_error).all()


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_flash_stays_finite_with_huge_inputs(size):
    q, k, v = inputs(300, heads=1, width=64, v_width=64, dtype=torch.bfloat16)
    out, lse = flash(q * size, k * size, v, **OPTIONS | {"alpha": 1.0})
    assert out.isfinite().all()
    assert lse.isfinite().all()


@on_hopper
@pytest.mark.gpu
def test_flash_shows_a_query_that_is_no_number():
    q, k, v = inputs(300, heads=1, width=64, v_width=64, dtype=torch.bfloat16)
    q[:, :, 7, 40] = torch.nan
    out, _ = flash(q, k, v, **OPTIONS)
    assert out[:, :, 7].isnan().all()
    assert out.isfinite().all(-1).sum() == 299


@on_hopper
@pytest.mark.gpu
def test_flash_reads_any_strides_and_gives_the_same_bits_at_a_repeat():
    q, k, v = inputs(200, heads=2, groups=2, width=64, v_width=64, dtype=torch.bfloat16)
    out, lse = flash(q, k, v, **OPTIONS)
    wide = torch.cat([q, k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    for tensors in ((q, k, v), wide.split(64, 3), turned):
        again, lse_again = flash(*tensors, **OPTIONS)
        assert torch.equal(again, out)
        assert torch.equal(lse_again, lse)


@on_hopper
@pytest.mark.gpu
def test_a_cuda_graph_replays_flash():
    tensors = inputs(256, heads=2, groups=2, width=64, v_width=64, dtype=torch.bfloat16)
    expected = flash(*tensors, **OPTIONS)[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = flash(*tensors, **OPTIONS)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
