"""The operator `phasewise::separable`: its implementation, fakes and gradient, known to torch.compile.

One operator serves NoPE, RoPE and PoPE. For the gradient it saves what is as wide as q and k: RoPE's rotated queries
and keys, whose rotation needs no others for its gradient, and the raw ones of the rest, of which PoPE's expanded ones
are made anew in the backward.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from phasewise.kernels.hardware import on_its_device
from phasewise.kernels.operators import differentiable, last_derivative, operator

Body = Literal["triton", "flash", "cudnn"]
Preparation = Literal["none", "rope", "softplus", "relu", "identity"]
BODIES: tuple[Body, ...] = get_args(Body)
PREPARATIONS: tuple[Preparation, ...] = get_args(Preparation)
Part = slice | None
ALL = slice(None)


def _dense(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What the kernels address by shape alone, copied where its strides are not those of its shape."""
    return tuple(x if x is None else x.contiguous() for x in tensors)


@operator
@on_its_device
def separable(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, factor: float, scale: float, causal: bool, window: int | None, body: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]`, float32 log-sum-exp `[B, H, T]`, and RoPE's rotated q and k, else two empty tensors.

    See `phasewise.kernels.separable`.
    """
    from phasewise.kernels import body as own
    from phasewise.kernels import borrowed, prepare
    from phasewise.kernels.tiles import EMPTY_LSE, Places, bounded

    arguments = (
        q,
        k,
        v,
        q_angle,
        k_angle,
        phase,
        q_index,
        q_segment,
        k_index,
        k_segment,
        slopes,
        preparation,
    )
    if q.numel() == 0 or k.numel() == 0:
        out, lse, *rotated = _separable_fake(*arguments)
        return out.zero_(), lse.fill_(EMPTY_LSE), *(x.zero_() for x in rotated)
    window = bounded(window, q, k, (q_index, q_segment, k_index, k_segment))
    q_angle, k_angle, phase, slopes = _dense(q_angle, k_angle, phase, slopes)
    q2, k2, rotated = q, k, (q.new_empty(0), q.new_empty(0))
    if q_angle is not None and k_angle is not None:
        if preparation == "rope":
            rotated = q2, k2 = prepare.rotate(q, k, q_angle, k_angle, factor)
        else:
            q2, k2 = prepare.polar(q, k, q_angle, k_angle, phase, preparation)
    if body == "flash":
        from phasewise.kernels import flash

        out, lse = flash.forward(q2, k2, v, scale=scale, causal=causal, window=window)
    elif body == "cudnn":
        out, lse = borrowed.cudnn_forward(q2, k2, v, scale=scale, causal=causal)
    else:
        places = Places.of(q, k, q_index, q_segment, k_index, k_segment)
        out, lse = own.forward(
            q2, k2, v, scale=scale, causal=causal, window=window, places=places, slopes=slopes
        )
    return out, lse, *rotated


@torch.library.register_fake(separable)
def _separable_fake(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, *settings: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, heads, queries, _ = q.shape
    out = q.new_empty(rows, queries, heads, v.shape[3]).transpose(1, 2)
    rotated = (_placewise(x) if preparation == "rope" else q.new_empty(0) for x in (q, k))
    return out, q.new_empty(rows, heads, queries, dtype=torch.float32), *rotated


def _placewise(x: Tensor) -> Tensor:
    """Uninitialised, of the shape of x, stored place by place."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


@operator
@on_its_device
def separable_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, factor: float, scale: float, causal: bool, window: int | None, body: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and the phase (empty when there is none); q and k as saved, so RoPE's are rotated."""
    from phasewise.kernels import body as own
    from phasewise.kernels import prepare, stored
    from phasewise.kernels.tiles import Places, bounded, launch

    if q.numel() == 0 or k.numel() == 0:
        empty = _separable_backward_fake(q, k, v, out, lse, dout, dlse, q_angle, k_angle, phase)
        return tuple(x.zero_() for x in empty)
    q_angle, k_angle, phase, slopes = _dense(q_angle, k_angle, phase, slopes)
    polar = preparation not in ("none", "rope")
    widths = {"qk": q.shape[3] * (2 if polar else 1), "v": v.shape[3]}
    positions = (q_index, q_segment, k_index, k_segment)
    placed = any(x is not None for x in positions)
    window = bounded(window, q, k, positions)
    unequal, odd = widths["qk"] != widths["v"], any(width % 32 for width in widths.values())
    if body == "cudnn" or (body == "flash" and unequal and (odd or q.shape[1] > k.shape[1])):
        # cuDNN's backward does not repeat its bits; of unequal widths flash-attn-4's refuses grouped heads, and does
        # not compile for some that are no multiples of 32, as (24, 40).
        body = "triton"
    simple = q.shape[2] == k.shape[2] and window is None and slopes is None and not placed
    chosen = launch(f"separable.{body}.backward", q, **widths, length=k.shape[2])["body"] if simple else body

    view = {"scale": scale, "causal": causal}
    if chosen == "flash":
        whole = (q, k, v, out, lse, dout, dlse, q_angle, k_angle, phase)
        return _flash_backward(*whole, preparation, factor, window=window, **view)
    dv = _placewise(v)
    statistics = own.row_statistics(out, dout, lse, dlse) if chosen == "stored" else ()

    def multiplied(
        q2: Tensor, k2: Tensor, dq2: Tensor, dk2: Tensor, rows: Part, heads: Part, keys: Part
    ) -> None:
        """Gradients of a part's queries, keys and values, as these are multiplied."""
        into = (dq2, dk2, _part(dv, rows, keys))
        if chosen == "stored":
            some = (_part(x, rows, heads) for x in (dout, *statistics))
            limit = 2 * (q.numel() + k.numel())
            stored.backward(q2, k2, _part(v, rows, keys), *some, into, limit=limit, **view)
        else:
            places = Places.of(q, k, *positions)
            own.backward(
                q2, k2, v, out, lse, dout, dlse, into, window=window, places=places, slopes=slopes, **view
            )

    parts: list[tuple[Part, Part, Part]] = [(None, None, None)]
    if chosen == "stored":
        group = q.shape[1] // k.shape[1]
        parts = [
            (rows, slice(keys.start * group, keys.stop * group), keys)
            for rows, keys in stored.pieces(q, k, causal=causal)
        ]
    no_phase = q.new_empty(0, dtype=torch.float32)
    if not polar:
        dq, dk = _placewise(q), _placewise(k)
        for rows, heads, keys in parts:
            pair = _part(q, rows, heads), _part(k, rows, keys)
            multiplied(*pair, _part(dq, rows, heads), _part(dk, rows, keys), rows, heads, keys)
        if q_angle is not None and k_angle is not None:
            prepare.rotate(dq, dk, q_angle, k_angle, factor, back=True, into=(dq, dk))
        return dq, dk, dv, no_phase
    dq, dk = None, None
    sums = None if phase is None else prepare.phase_sums(q)
    for rows, heads, keys in parts:
        some_q, some_k, some_phase = _part(q, rows, heads), _part(k, rows, keys), _part(phase, heads)
        some_q_angle, some_k_angle = _rows(q_angle, rows), _rows(k_angle, rows)
        q2, k2 = prepare.polar(some_q, some_k, some_q_angle, some_k_angle, some_phase, preparation)
        # What is wide exists once: dq takes the place of queries that were read by then.
        dq2 = q2 if chosen == "stored" else prepare.expanded_like(q2, widths["qk"])
        dk2 = prepare.expanded_like(k2, widths["qk"])
        multiplied(q2, k2, dq2, dk2, rows, heads, keys)
        if dq is None or dk is None:
            # Not before the body has given back its own memory.
            dq, dk = _placewise(q), _placewise(k)
        some_dq, some_dk = _part(dq, rows, heads), _part(dk, rows, keys)
        some_sums = _part(sums, rows, ALL, heads)
        prepare.polar_backward(some_q, some_q_angle, some_phase, preparation, dq2, some_dq, some_sums)
        prepare.polar_backward(some_k, some_k_angle, None, preparation, dk2, some_dk, None)
    assert dq is not None, "there is always a part"
    assert dk is not None, "there is always a part"
    return dq, dk, dv, no_phase if sums is None else sums.sum((0, 1))


def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    preparation: str, factor: float, **view: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from phasewise.kernels import flash, prepare

    dv, no_phase = _placewise(v), q.new_empty(0, dtype=torch.float32)
    if q_angle is None or k_angle is None or preparation == "rope":
        dk = _placewise(k)
        held = flash.backward(q, k, v, out, lse, dout, dlse, (dk, dv), **view)
        dq = _placewise(q)
        if q_angle is None or k_angle is None:
            held.write(dq)
        else:
            held.turn_back(dq, dk, q_angle, k_angle, factor)
        return dq, dk, dv, no_phase
    q2, k2 = prepare.polar(q, k, q_angle, k_angle, phase, preparation)
    # What is wide exists once: dk takes the place of keys that were read by then, and queries go before dq comes.
    grad = flash.backward(q2, k2, v, out, lse, dout, dlse, (k2, dv), **view).expanded(q2)
    del q2
    dq, dk, sums = _placewise(q), _placewise(k), None if phase is None else prepare.phase_sums(q)
    prepare.polar_backward(q, q_angle, phase, preparation, grad, dq, sums)
    prepare.polar_backward(k, k_angle, None, preparation, k2, dk, None)
    return dq, dk, dv, no_phase if sums is None else sums.sum((0, 1))


def _part(x: Any, *parts: Part) -> Any:
    """Some rows and heads of x, if it is given; all of them for None."""
    return x if x is None or parts[-1] is None else x[parts]


def _rows(angle: Any, rows: Part) -> Any:
    return angle if angle.shape[0] == 1 else _part(angle, rows)


@torch.library.register_fake(separable_backward)
def _separable_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None, *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dphase = q.new_empty(0 if phase is None else phase.shape, dtype=torch.float32)
    return _placewise(q), _placewise(k), _placewise(v), dphase


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, *others = inputs[:11]
    ctx.settings = inputs[11:]
    out, lse, *rotated = output
    ctx.mark_non_differentiable(*rotated)
    ctx.set_materialize_grads(False)
    q, k = rotated if ctx.settings[0] == "rope" else (q, k)
    ctx.save_for_backward(q, k, v, out, lse, *others)


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *others = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 17
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dphase = separable_backward(q, k, v, out, lse, dout, dlse, *others, *ctx.settings)
    return dq, dk, dv, None, None, None if others[2] is None else dphase, *(None,) * 11


differentiable(separable, _gradient, _save)
last_derivative(separable_backward)
