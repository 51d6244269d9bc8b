"""Operators registered by `operators` are torch's in every respect: fakes, gradients, compilation."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phasewise.kernels.operators import differentiable, direct, operator


@operator
def scaled_for_a_test(x: Tensor, by: float, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """x times a number, and what was added to it, in float32."""
    return x * by + (0 if shift is None else shift), x.float()


@torch.library.register_fake(scaled_for_a_test)
def _fake(x: Tensor, by: float, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)


def _save(ctx, inputs, output):
    ctx.mark_non_differentiable(output[1])
    ctx.by, ctx.shifted = inputs[1], inputs[2] is not None


def _gradient(ctx, dout, _):
    return dout * ctx.by, None, dout if ctx.shifted else None


differentiable(scaled_for_a_test, _gradient, _save)
either_way = pytest.mark.parametrize(
    "scaled", [scaled_for_a_test, direct(scaled_for_a_test)], ids=["op", "direct"]
)


def leaf() -> Tensor:
    return torch.randn(3, dtype=torch.float64, requires_grad=True)


@either_way
@pytest.mark.parametrize("shifted", [True, False])
def test_its_gradients_are_those_given_and_it_passes_opcheck(shifted, scaled):
    x, shift = leaf(), leaf() if shifted else None
    assert torch.autograd.gradcheck(lambda x, shift: scaled(x, 3.0, shift)[0], (x, shift))
    results = torch.library.opcheck(scaled_for_a_test, (x, 3.0, shift))
    assert set(results.values()) == {"SUCCESS"}


@either_way
def test_without_gradients_nothing_is_saved_and_without_a_need_of_them_none_are_given(scaled):
    x = leaf()
    with torch.no_grad():
        assert not scaled(x, 3.0, None)[0].requires_grad
    assert not scaled(x.detach(), 3.0, None)[0].requires_grad
    out, other = scaled(x, 3.0, None)
    assert out.requires_grad
    assert not other.requires_grad


@either_way
def test_forward_mode_derivatives_are_refused_not_dropped(scaled):
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        scaled(forward_ad.make_dual(leaf().detach(), torch.ones(3, dtype=torch.float64)), 3.0, None)


@either_way
def test_it_compiles_whole_with_its_gradient(scaled):
    x = leaf()
    compiled = torch.compile(lambda x: scaled(x, 3.0, None)[0].sum(), fullgraph=True, backend="aot_eager")
    (dx,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(dx, torch.full_like(x, 3.0))


def test_what_watches_traces_or_transforms_sees_the_operator():
    scaled, x = direct(scaled_for_a_test), leaf().detach()
    seen = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), named=None):
            seen.append(operator)
            return operator(*arguments, **(named or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, operator, types, arguments=(), named=None):
            seen.append(operator)
            return operator(*arguments, **(named or {}))

    for mode in (Dispatched, Called):
        seen.clear()
        with mode():
            scaled(x, 3.0, None)
        assert scaled_for_a_test in seen, mode
    traced = make_fx(lambda x: scaled(x, 3.0, None)[0])(x)
    assert next(node.target for node in traced.graph.nodes if node.op == "call_function") is scaled_for_a_test
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda x: scaled(x, 3.0, None)[0].sum())(x)


@operator
def turned_for_a_test(x: Tensor) -> Tensor:
    """Whether x comes as it is stored by another sign."""
    return torch.full((), x.is_neg())


def test_what_is_stored_with_the_other_sign_comes_with_its_own():
    x = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert not direct(turned_for_a_test)(x)
