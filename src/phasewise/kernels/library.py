"""The operator `phasewise::separable`: its implementation, fakes and gradient, known to torch.compile.

One operator serves NoPE, RoPE and PoPE, so that what is saved for the gradient is always the raw q, k and v, the
angles, the phase, the output and its log-sum-exp; expanded queries and keys are made anew in the backward.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

Body = Literal["triton", "flash", "cudnn"]
Preparation = Literal["none", "rope", "softplus", "relu", "identity"]
BODIES: tuple[Body, ...] = get_args(Body)
PREPARATIONS: tuple[Preparation, ...] = get_args(Preparation)


def _prepared(
    q: Tensor, k: Tensor, q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    preparation: str, factor: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from phasewise.kernels import prepare

    if q_angle is None or k_angle is None:
        return q, k
    if preparation == "rope":
        return prepare.rotate(q, q_angle, factor), prepare.rotate(k, k_angle, factor)
    return prepare.polar(q, q_angle, phase, preparation), prepare.polar(k, k_angle, None, preparation)


@torch.library.custom_op("phasewise::separable", mutates_args=())
def separable(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, factor: float, scale: float, causal: bool, window: int | None, body: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]` and float32 log-sum-exp `[B, H, T]`; see `phasewise.kernels.separable`."""
    from phasewise.kernels import body as own
    from phasewise.kernels import borrowed
    from phasewise.kernels.tiles import EMPTY_LSE, Places

    if q.numel() == 0 or k.numel() == 0:
        out, lse = _separable_fake(q, k, v, *(None,) * 8, preparation, factor, scale, causal, window, body)
        return out.zero_(), lse.fill_(EMPTY_LSE)
    q2, k2 = _prepared(q, k, q_angle, k_angle, phase, preparation, factor)
    if body == "flash":
        return borrowed.flash_forward(q2, k2, v, scale=scale, causal=causal, window=window)
    if body == "cudnn":
        return borrowed.cudnn_forward(q2, k2, v, scale=scale, causal=causal)
    places = Places.of(q, k, q_index, q_segment, k_index, k_segment)
    return own.forward(q2, k2, v, scale=scale, causal=causal, window=window, places=places, slopes=slopes)


@separable.register_fake
def _separable_fake(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, factor: float, scale: float, causal: bool, window: int | None, body: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, heads, queries, _ = q.shape
    out = q.new_empty(rows, queries, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(rows, heads, queries, dtype=torch.float32)


@torch.library.custom_op("phasewise::separable_backward", mutates_args=())
def separable_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, factor: float, scale: float, causal: bool, window: int | None, body: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the phase (empty when there is none)."""
    from phasewise.kernels import body as own
    from phasewise.kernels import borrowed, prepare, stored
    from phasewise.kernels.tiles import Places, launch

    dphase = q.new_empty(0, dtype=torch.float32) if phase is None else torch.zeros_like(phase)
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dphase
    polar = q_angle is not None and preparation != "rope"
    width = q.shape[3] * (2 if polar else 1)
    grouped = q.shape[1] != k.shape[1] and width != v.shape[3]
    if body == "cudnn" or (body == "flash" and grouped):
        # cuDNN's backward does not repeat its bits; flash-attn-4's refuses unequal widths with grouped heads.
        body = "triton"
    chosen = launch(f"separable.{body}.backward", q, qk=width, v=v.shape[3], length=k.shape[2])["body"]
    plain = window is None and slopes is None and q_index is None and q_segment is None
    plain = plain and k_index is None and k_segment is None and q.shape[2] == k.shape[2]
    masks = {"scale": scale, "causal": causal, "window": window}
    if chosen == "stored" and plain and polar and q_angle is not None and k_angle is not None:
        form = stored.Polar(q_angle, k_angle, phase, preparation)
        dq, dk, dv, turned = stored.backward(
            q, k, v, out, lse, dout, dlse, scale=scale, causal=causal, polar_form=form
        )
        return dq, dk, dv, dphase if turned is None else turned
    q2, k2 = _prepared(q, k, q_angle, k_angle, phase, preparation, factor)
    if chosen == "stored" and plain:
        dq, dk, dv, _ = stored.backward(
            q2, k2, v, out, lse, dout, dlse, scale=scale, causal=causal, polar_form=None
        )
    elif body == "flash":
        dq, dk, dv = borrowed.flash_backward(q2, k2, v, out, lse, dout, dlse, **masks)
    else:
        places = Places.of(q, k, q_index, q_segment, k_index, k_segment)
        dq, dk, dv = own.backward(q2, k2, v, out, lse, dout, dlse, places=places, slopes=slopes, **masks)
    if q_angle is None or k_angle is None:
        return dq, dk, dv, dphase
    del q2, k2
    if preparation == "rope":
        dq, dk = (
            prepare.rotate(dq, q_angle, factor, back=True),
            prepare.rotate(dk, k_angle, factor, back=True),
        )
        return dq, dk, dv, dphase
    raw_dq, raw_dk = prepare.expanded_like(q, q.shape[3]), prepare.expanded_like(k, k.shape[3])
    turned = prepare.polar_backward(q, prepare.Turn.of(q_angle, phase), preparation, dq, raw_dq)
    prepare.polar_backward(k, prepare.Turn.of(k_angle, None), preparation, dk, raw_dk)
    return raw_dq, raw_dk, dv, dphase if turned is None else turned


@separable_backward.register_fake
def _separable_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None, *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2).new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0 if phase is None else phase.shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:11])
    ctx.settings = inputs[11:]


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *others = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 17
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dphase = separable_backward(q, k, v, out, lse, dout, dlse, *others, *ctx.settings)
    return dq, dk, dv, None, None, None if others[2] is None else dphase, *(None,) * 11


def _no_second_order(ctx: Any, *gradients: Tensor | None) -> None:
    raise RuntimeError(
        "second-order gradients are not implemented for the fused kernels; use impl='reference' for them"
    )


separable.register_autograd(_gradient, setup_context=_save)
separable_backward.register_autograd(_no_second_order)
