import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from phasewise.blocked import causal_blocked

SCALE = 0.3


def inputs(heads, length, width, value_width, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = (width, width, value_width)
    return [
        torch.randn(heads, length, size, generator=generator, dtype=dtype).requires_grad_() for size in sizes
    ]


def by_definition(q, k, v):
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(1, 2) * SCALE).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("length", [1, 2, 15, 63, 127, 128, 129, 217, 300])
@pytest.mark.parametrize(("heads", "width", "value_width"), [(1, 8, 4), (3, 6, 7), (5, 3, 1)])
def test_output_and_gradients_are_those_of_the_definition(heads, length, width, value_width):
    q, k, v = inputs(heads, length, width, value_width)
    out, expected = causal_blocked(q, k, v, SCALE), by_definition(q, k, v)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    got = torch.autograd.grad(out, (q, k, v), incoming)
    wanted = torch.autograd.grad(expected, (q, k, v), incoming)
    for name, g, w in zip("qkv", got, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=1e-11, msg=lambda text, name=name: f"d{name}: {text}")


def test_any_strides_give_the_same():
    q, k, v = (x.detach() for x in inputs(4, 140, 6, 4))
    expected = causal_blocked(q, k, v, SCALE)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    out = causal_blocked(*strided, SCALE)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in strided)


def test_what_later_keys_hold_does_not_matter():
    q, k, v = (x.detach() for x in inputs(2, 300, 6, 4))
    expected = causal_blocked(q, k, v, SCALE)
    for value in (torch.nan, torch.inf):
        k[:, 270] = value
        assert torch.equal(causal_blocked(q, k, v, SCALE)[:, :270], expected[:, :270])


def test_inputs_stay_as_they_were_and_no_unwritten_memory_shows():
    q, k, v = inputs(2, 140, 6, 4)
    before = [x.detach().clone() for x in (q, k, v)]
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        out = causal_blocked(q, k, v, SCALE)
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.isfinite().all()
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_derivatives_that_do_not_pass_through_it_are_refused_with_the_remedy():
    q, k, v = inputs(2, 140, 6, 4)
    remedy = r"blocks of queries.*impl='reference'"
    with pytest.raises(RuntimeError, match=remedy):
        torch.func.jvp(lambda x: causal_blocked(x, k, v, SCALE), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=remedy):
        causal_blocked(q, k, forward_ad.make_dual(v, v.detach()), SCALE)
    with pytest.raises(RuntimeError, match=remedy):
        torch.func.grad(lambda x: causal_blocked(x, k, v, SCALE).sum())(q)
    (gradient,) = torch.autograd.grad(causal_blocked(q, k, v, SCALE).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=remedy):
        gradient.sum().backward()


def test_float32_is_as_exact_as_eager_float32():
    q, k, v = (x.detach().float() for x in inputs(2, 600, 32, 16))
    exact = by_definition(q.double(), k.double(), v.double())
    eager = (by_definition(q, k, v) - exact).abs().max()
    rounding = exact.abs().max() * torch.finfo(torch.float32).eps
    assert (causal_blocked(q, k, v, SCALE) - exact).abs().max() <= 2 * eager + rounding


def test_two_backward_passes_are_bitwise_equal():
    q, k, v = inputs(3, 300, 8, 4, torch.float32)
    first, second = (
        torch.autograd.grad(causal_blocked(q, k, v, SCALE).square().sum(), (q, k, v)) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_op_is_registered_rightly():
    torch.library.opcheck(torch.ops.phasewise.causal_blocked.default, (*inputs(2, 140, 6, 4), SCALE))


def test_huge_scores_give_no_infinities():
    q, k, v = (x.detach().float() * 1e4 for x in inputs(1, 130, 8, 4))
    out = causal_blocked(q.requires_grad_(), k.requires_grad_(), v, SCALE)
    out.sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()
    assert F.relu(out.abs() - v.abs().amax((0, 1))).max() <= 1
