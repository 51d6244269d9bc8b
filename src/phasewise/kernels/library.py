"""The operator `phasewise::separable`: its implementation, fakes and gradient, known to torch.compile.

One operator serves NoPE, RoPE and PoPE, so that what is saved for the gradient is always the raw q, k and v, the
angles, the phase, the output and its log-sum-exp; expanded queries and keys are made anew in the backward.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from phasewise.kernels.hardware import on_its_device

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


def _dense(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What the kernels address by shape alone, copied where its strides are not those of its shape."""
    return tuple(x if x is None else x.contiguous() for x in tensors)


@torch.library.custom_op("phasewise::separable", mutates_args=())
@on_its_device
def separable(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, factor: float, scale: float, causal: bool, window: int | None, body: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]` and float32 log-sum-exp `[B, H, T]`; see `phasewise.kernels.separable`."""
    from phasewise.kernels import body as own
    from phasewise.kernels import borrowed
    from phasewise.kernels.tiles import EMPTY_LSE, Places, bounded

    if q.numel() == 0 or k.numel() == 0:
        out, lse = _separable_fake(q, k, v, *(None,) * 8, preparation, factor, scale, causal, window, body)
        return out.zero_(), lse.fill_(EMPTY_LSE)
    window = bounded(window, q, k, (q_index, q_segment, k_index, k_segment))
    q_angle, k_angle, phase, slopes = _dense(q_angle, k_angle, phase, slopes)
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
@on_its_device
def separable_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, factor: float, scale: float, causal: bool, window: int | None, body: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the phase (empty when there is none)."""
    from phasewise.kernels import body as own
    from phasewise.kernels import borrowed, prepare, stored
    from phasewise.kernels.tiles import Places, bounded, launch

    if q.numel() == 0 or k.numel() == 0:
        return (
            *(prepare.expanded_like(x, x.shape[3]).zero_() for x in (q, k, v)),
            q.new_zeros(0 if phase is None else phase.shape, dtype=torch.float32),
        )
    q_angle, k_angle, phase, slopes = _dense(q_angle, k_angle, phase, slopes)
    polar = q_angle is not None and preparation != "rope"
    width = q.shape[3] * (2 if polar else 1)
    sizes = {"qk": width, "v": v.shape[3], "length": k.shape[2]}
    positions = (q_index, q_segment, k_index, k_segment)
    window = bounded(window, q, k, positions)
    if body == "cudnn" or (body == "flash" and q.shape[1] > k.shape[1] and width != v.shape[3]):
        # cuDNN's backward does not repeat its bits; flash-attn-4's refuses unequal widths with grouped heads.
        body = "triton"
    chosen = launch(f"separable.{body}.backward", q, **sizes)["body"]
    square = q.shape[2] == k.shape[2] and window is None
    if slopes is not None or any(x is not None for x in positions) or not square:
        chosen = body
    dq, dk, dv = None, None, prepare.expanded_like(v, v.shape[3])
    if preparation == "none":
        dq, dk = prepare.expanded_like(q, width), prepare.expanded_like(k, width)
    sums = None if phase is None else prepare.phase_sums(q)
    statistics = own.row_statistics(out, dout, lse, dlse) if chosen == "stored" else ()
    group = q.shape[1] // k.shape[1]
    everything = (slice(0, q.shape[0]), slice(0, k.shape[1]))
    for rows, keys in stored.pieces(q, k, causal=causal) if chosen == "stored" else [everything]:
        heads = slice(keys.start * group, keys.stop * group)
        some_q, some_k, some_phase = q[rows, heads], k[rows, keys], None if phase is None else phase[heads]
        some_q_angle, some_k_angle = _rows(q_angle, rows), _rows(k_angle, rows)
        q2, k2 = _prepared(some_q, some_k, some_q_angle, some_k_angle, some_phase, preparation, factor)
        if dq is not None and dk is not None and preparation == "none":
            dq2, dk2 = dq[rows, heads], dk[rows, keys]
        else:
            # What is wide exists once: a gradient takes the place of what it is of, if that was read by then.
            dq2 = q2 if polar and chosen != "triton" else prepare.expanded_like(q2, width)
            dk2 = k2 if polar and chosen == "flash" else prepare.expanded_like(k2, width)
        into = (dq2, dk2, dv[rows, keys])
        if chosen == "stored":
            some = (x[rows, heads] for x in (dout, *statistics))
            limit = 2 * (q.numel() + k.numel())
            stored.backward(q2, k2, v[rows, keys], *some, into, limit=limit, scale=scale, causal=causal)
        else:
            whole = (q2, k2, v, out, lse, dout, dlse, into)
            if chosen == "flash":
                borrowed.flash_backward(*whole, scale=scale, causal=causal, window=window)
            else:
                places = Places.of(q, k, *positions)
                own.backward(*whole, scale=scale, causal=causal, window=window, places=places, slopes=slopes)
        if dq is None or dk is None:
            # Not before the body has given back its own memory.
            dq, dk = (prepare.expanded_like(x, x.shape[3]) for x in (q, k))
        if some_q_angle is None or some_k_angle is None:
            continue
        if polar:
            some_sums = None if sums is None else sums[rows, :, heads]
            prepare.polar_backward(
                some_q, some_q_angle, some_phase, preparation, dq2, dq[rows, heads], some_sums
            )
            prepare.polar_backward(some_k, some_k_angle, None, preparation, dk2, dk[rows, keys], None)
        else:
            prepare.rotate(dq2, some_q_angle, factor, back=True, out=dq[rows, heads])
            prepare.rotate(dk2, some_k_angle, factor, back=True, out=dk[rows, keys])
    assert dq is not None, "there is always a piece"
    assert dk is not None, "there is always a piece"
    return dq, dk, dv, q.new_empty(0, dtype=torch.float32) if sums is None else sums.sum((0, 1))


def _rows(x: Tensor | None, rows: slice) -> Tensor | None:
    return x if x is None or x.shape[0] == 1 else x[rows]


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
