"""Operators known to torch.compile, with little of Python between a call and its kernel.

`torch.library.register_autograd` looks the default of every argument up at every call, in a time that grows with the
square of their number: 80 microseconds for 17 of them (torch 2.13, `torch._library.utils.fill_defaults`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd
from torch.autograd import forward_ad

_LIBRARY = torch.library.Library("phasewise", "FRAGMENT")


def operator(function: Callable[..., Any]) -> Any:
    """`phasewise::NAME` for a function of that name, which changes none of its arguments."""
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.phasewise, name).default


def differentiable(of: Any, gradient: Callable[..., Any], save: Callable[..., None]) -> None:
    """Make `gradient(ctx, *grads)` the gradient of an operator, after `save(ctx, inputs, output)` in its forward."""

    def below(*inputs: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            return of(*inputs)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = below(*inputs)
            save(ctx, inputs, output)
            return output

        backward = staticmethod(gradient)

    def apply(*inputs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "torch.func's derivatives do not pass through fused kernels; use torch.autograd, or impl='reference'"
            )
        asked = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if not asked and forward_ad._current_level < 0:
            return below(*inputs)
        return Differentiable.apply(*inputs)

    _LIBRARY.impl(of._schema.name.removeprefix("phasewise::"), apply, "Autograd")


def placewise(x: Tensor) -> Tensor:
    """Uninitialised, of the shape of x `[B, H, T, D]`, stored place by place."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def last_derivative(of: Any) -> None:
    """Make an operator that computes gradients raise RuntimeError where its own are asked for."""
    differentiable(of, _no_second_order, lambda ctx, inputs, output: None)


def _no_second_order(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError("a fused kernel has no second derivative; for double backward use impl='reference'")
