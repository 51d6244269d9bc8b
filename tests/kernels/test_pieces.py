"""Stored score gradients in pieces: every head once, and no more at a time than may be held."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import stored


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("wide", [0, 2])
@pytest.mark.parametrize(("rows", "length"), [(64, 128), (16, 2048), (4, 8192), (3, 5000), (1, 32_768)])
def test_pieces_hold_every_head_once_and_no_more_than_the_limit(rows, length, wide, group, causal):
    q = torch.empty(rows, 16, length, 128, device="meta")
    k = torch.empty(rows, 16 // group, length, 128, device="meta")
    limit = 2 * (q.numel() + k.numel())
    seen = torch.zeros(rows, k.shape[1])
    for some_rows, heads in stored.pieces(q, k, wide=wide, limit=limit, causal=causal):
        seen[some_rows, heads] += 1
        at_once = seen[some_rows, heads].numel()
        pairs = group * length**2 // (2 if causal else 1)
        held = at_once * (pairs + wide * (1 + group) * length * 128)
        assert held <= limit or at_once <= 2
    assert torch.equal(seen, torch.ones_like(seen))
