"""Operators registered by `operators` are torch's in every respect: fakes, gradients, compilation."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from phasewise.kernels.operators import differentiable, operator


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


def leaf() -> Tensor:
    return torch.randn(3, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shifted", [True, False])
def test_its_gradients_are_those_given_and_it_passes_opcheck(shifted):
    x, shift = leaf(), leaf() if shifted else None
    assert torch.autograd.gradcheck(lambda x, shift: scaled_for_a_test(x, 3.0, shift)[0], (x, shift))
    results = torch.library.opcheck(scaled_for_a_test, (x, 3.0, shift))
    assert set(results.values()) == {"SUCCESS"}


def test_without_gradients_nothing_is_saved_and_without_a_need_of_them_none_are_given():
    x = leaf()
    with torch.no_grad():
        assert not scaled_for_a_test(x, 3.0, None)[0].requires_grad
    assert not scaled_for_a_test(x.detach(), 3.0, None)[0].requires_grad
    out, other = scaled_for_a_test(x, 3.0, None)
    assert out.requires_grad
    assert not other.requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_forward_mode_derivatives_are_refused_not_dropped():
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        scaled_for_a_test(
            forward_ad.make_dual(leaf().detach(), torch.ones(3, dtype=torch.float64)), 3.0, None
        )


def test_it_compiles_whole_with_its_gradient():
    x = leaf()
    compiled = torch.compile(
        lambda x: scaled_for_a_test(x, 3.0, None)[0].sum(), fullgraph=True, backend="aot_eager"
    )
    (dx,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(dx, torch.full_like(x, 3.0))
