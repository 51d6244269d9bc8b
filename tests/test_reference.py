from itertools import pairwise

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from phasewise.attention import attention
from phasewise.encodings import TAPA, PoPE, RoPE
from phasewise.frequencies import DynamicNTK
from phasewise.reference import _powers_of_two

ENCODINGS = [
    RoPE(head_dim=4, frequencies=DynamicNTK(base=1e4, factor=2.0, original_length=8)),
    PoPE(num_heads=2, head_dim=4),
    TAPA(head_dim=4),
]


def with_gradients(function, length, encoding):
    generator = torch.Generator().manual_seed(length)
    inputs = [torch.randn(1, 2, length, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    for x in inputs:
        for size in (0, 1, 3):
            torch._dynamo.mark_static(x, size)
    out = function(*(x.requires_grad_() for x in inputs))
    return out, *torch.autograd.grad(out.square().sum(), (*inputs, *encoding.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda encoding: encoding.kind)
def test_compiled_for_lengths_that_change_blocks_have_the_gradients_of_eager(encoding, monkeypatch):
    monkeypatch.setattr("phasewise.reference.SCORES_AT_ONCE", 200)
    encoding.double()
    torch.compiler.reset()  # a process compiles a function for so many encodings and no more
    backend = CompileCounterWithBackend("eager")  # what failed is torch's tracer

    def attend(q, k, v):
        return attention(q, k, v, encoding, impl="reference")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    graphs = set()
    for length in (14, 11):  # of two blocks each
        got, expected = (with_gradients(f, length, encoding) for f in (compiled, attend))
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
        graphs.add(backend.frame_count)
    assert len(graphs) == 1, "one graph serves every length with as many blocks"


@pytest.mark.slow
def test_compiled_parts_of_keys_turned_for_every_query_have_the_gradients_of_eager(monkeypatch):
    monkeypatch.setattr("phasewise.encodings.spectral.TURNED_AT_ONCE", 300)
    encoding = ENCODINGS[0].double()
    torch.compiler.reset()

    def attend(q, k, v):
        return attention(q, k, v, encoding, impl="reference")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    got, expected = (with_gradients(f, 9, encoding) for f in (compiled, attend))
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("length", "keys", "at_once"), [(11, 40, 100), (1000, 7, 40), (16, 16, 16), (5, 9, 3)]
)
def test_blocks_of_a_graph_are_a_power_of_two_that_are_within_the_bound(length, keys, at_once):
    edges = _powers_of_two(length, length * keys, at_once)
    sizes = [end - at for at, end in pairwise(edges)]
    assert (edges[0], edges[-1]) == (0, length)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes).bit_count() == 1
    assert max(sizes) * keys <= at_once + keys or len(sizes) * 2 > length
