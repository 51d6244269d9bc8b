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
from torch.nn import Parameter

_LIBRARY = torch.library.Library("phasewise", "FRAGMENT")
_SETTINGS = frozenset((type(None), str, float, int, bool))
_EAGER: dict[Any, Callable[..., Any]] = {}  # what an operator comes to in an ordinary call


def operator(function: Callable[..., Any]) -> Any:
    """`phasewise::NAME` for a function of that name, which changes none of its arguments."""
    name = function.__name__
    schema = torch.library.infer_schema(function, mutates_args=())
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    of = getattr(torch.ops.phasewise, name).default
    _EAGER[of] = function
    return of


def differentiable(of: Any, gradient: Callable[..., Any], save: Callable[..., None]) -> None:
    """Make `gradient(ctx, *grads)` the gradient of an operator, after `save(ctx, inputs, output)` in its forward."""
    name = of._schema.name.removeprefix("phasewise::")
    _LIBRARY.impl(name, _with_gradient(of, gradient, save), "Autograd")
    _EAGER[of] = _with_gradient(_EAGER[of], gradient, save)


def _with_gradient(
    run: Callable[..., Any], gradient: Callable[..., Any], save: Callable[..., None]
) -> Callable[..., Any]:
    def below(*inputs: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            return run(*inputs)

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

    return apply


def direct(of: Any) -> Callable[..., Any]:
    """An operator that an ordinary call reaches without torch's dispatcher, which takes twice as long as all the rest.

    Ordinary is a call of plain tensors that nothing traces, transforms or watches; all others go the usual way.
    """

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or not _ordinary(inputs):
            return of(*inputs)
        return _EAGER[of](*inputs)

    return call


def _ordinary(inputs: tuple[Any, ...]) -> bool:
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None:
        return False
    for x in inputs:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if x.is_neg():  # stored with the other sign, which the dispatcher would see to
                return False
        elif kind not in _SETTINGS:
            return False
    return True


def placewise(x: Tensor) -> Tensor:
    """Uninitialised, of the shape of x `[B, H, T, D]`, stored place by place."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def last_derivative(of: Any) -> None:
    """Make an operator that computes gradients raise RuntimeError where its own are asked for."""
    differentiable(of, _no_second_order, lambda ctx, inputs, output: None)


def _no_second_order(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError("a fused kernel has no second derivative; for double backward use impl='reference'")
