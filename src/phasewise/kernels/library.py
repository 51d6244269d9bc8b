"""The operator `phasewise::separable`: its implementation, fakes and gradient, known to torch.compile.

One operator serves NoPE, RoPE and PoPE. For the gradient it saves what is as wide as q and k: RoPE's rotated queries
and keys, whose rotation needs no others for its gradient, and the raw ones of the rest, of which PoPE's expanded ones
are made anew in the backward.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from phasewise.kernels.hardware import on_its_device
from phasewise.kernels.operators import differentiable, direct, last_derivative, operator, placewise

Body = Literal["triton", "flash", "cudnn"]
Preparation = Literal["none", "rope", "softplus", "relu", "identity"]
BODIES: tuple[Body, ...] = get_args(Body)
PREPARATIONS: tuple[Preparation, ...] = get_args(Preparation)
LARGE = 2**24  # elements of queries above which a backward is done in halves
JOINT = ((64, 64), (128, 128))  # widths of queries and of values that the backward in one pass takes
JOINT_POLAR = ((128, 64),)  # those of PoPE's expanded queries, whose sums are read by 64 channels
FLASH_UNEQUAL = ((128, 64), (192, 96), (256, 128))  # widths of queries and of values: PoPE's


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
    from phasewise.kernels import ahead, borrowed, prepare
    from phasewise.kernels import body as own
    from phasewise.kernels.tiles import EMPTY_LSE, Places, bounded, launch

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
    q2, k2, rotated = q, k, ()
    placed = any(x is not None for x in (q_index, q_segment, k_index, k_segment))
    seen = q.shape[2] <= k.shape[2] or not causal  # every query sees a key
    if body == "triton" and not placed and window is None and slopes is None and seen:
        widths = {"qk": q.shape[3] * (1 if preparation in ("none", "rope") else 2), "v": v.shape[3]}
        body = launch("separable.triton.forward", q, **widths, length=k.shape[2])["body"]
    if q_angle is not None and k_angle is not None:
        beside = None
        if body in ("flash", "hopper"):
            beside = ahead.plan(body, q, k, v, q_angle.shape[2], preparation, causal=causal, window=window)
        if beside is not None:
            if body == "flash":
                from phasewise.kernels.flash_ahead import forward
            else:
                from phasewise.kernels.hopper_ahead import forward

            options = {"preparation": preparation, "factor": factor, "scale": scale}
            out, lse, *made = forward(q, k, v, q_angle, k_angle, phase, beside, **options)
            return out, lse, *(made if preparation == "rope" else _nothing(q))
        if preparation == "rope":
            rotated = q2, k2 = prepare.rotate(q, k, q_angle, k_angle, factor)
        else:
            q2, k2 = prepare.polar(q, k, q_angle, k_angle, phase, preparation)
    if body == "flash":
        from phasewise.kernels import flash

        out, lse = flash.forward(q2, k2, v, scale=scale, causal=causal, window=window)
    elif body == "hopper":
        from phasewise.kernels import hopper_forward

        out, lse = hopper_forward.forward(q2, k2, v, scale=scale, causal=causal)
    elif body == "cudnn":
        out, lse = borrowed.cudnn_forward(q2, k2, v, scale=scale, causal=causal)
    else:
        places = Places.of(q, k, q_index, q_segment, k_index, k_segment)
        out, lse = own.forward(
            q2, k2, v, scale=scale, causal=causal, window=window, places=places, slopes=slopes
        )
    return out, lse, *(rotated or _nothing(q))


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of rotated queries and keys."""
    return q.new_empty(0), q.new_empty(0)


@torch.library.register_fake(separable)
def _separable_fake(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    slopes: Tensor | None, preparation: str, *settings: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, heads, queries, _ = q.shape
    out = q.new_empty(rows, queries, heads, v.shape[3]).transpose(1, 2)
    rotated = (placewise(x) if preparation == "rope" else q.new_empty(0) for x in (q, k))
    return out, q.new_empty(rows, heads, queries, dtype=torch.float32), *rotated


def flash_goes_back(*, qk: int, v: int, grouped: bool) -> bool:
    """Whether flash-attn-4's backward is right for these widths.

    Up to 128 channels it adds up a query's gradient in multiples of 16, and reads the sums in multiples of 32. Of
    unequal widths it refuses grouped heads and, as (64, 32) and (256, 192), many outright.
    """
    if qk == v:
        return qk > 128 or -qk % 32 < 16
    return (qk, v) in FLASH_UNEQUAL and not grouped


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
    from phasewise.kernels import prepare
    from phasewise.kernels.tiles import Places, block_width, bounded, launch

    if q.numel() == 0 or k.numel() == 0:
        empty = _separable_backward_fake(q, k, v, out, lse, dout, dlse, q_angle, k_angle, phase)
        return tuple(x.zero_() for x in empty)
    q_angle, k_angle, phase, slopes = _dense(q_angle, k_angle, phase, slopes)
    polar = preparation not in ("none", "rope")
    widths = {"qk": q.shape[3] * (2 if polar else 1), "v": v.shape[3]}
    positions = (q_index, q_segment, k_index, k_segment)
    placed = any(x is not None for x in positions)
    window = bounded(window, q, k, positions)
    if body == "cudnn" or (
        body == "flash" and not flash_goes_back(**widths, grouped=q.shape[1] > k.shape[1])
    ):
        body = "triton"  # cuDNN's backward does not repeat its bits
    # Of polar coordinates stored score gradients take whole tiles of channels, which are two halves.
    whole = not polar or widths["qk"] == block_width(widths["qk"])
    simple = q.shape[2] == k.shape[2] and window is None and slopes is None and not placed and whole
    chosen = launch(f"separable.{body}.backward", q, **widths, length=k.shape[2])["body"] if simple else body
    served = JOINT_POLAR if polar else JOINT
    if chosen == "joint" and not (causal and (widths["qk"], widths["v"]) in served):
        chosen = body

    view = {"scale": scale, "causal": causal}
    given = (q, k, v, out, lse, dout, dlse, q_angle, k_angle, phase, preparation, factor)
    if chosen == "flash":
        return _flash_backward(*given, window=window, **view)
    if chosen == "joint":
        return _joint_backward(*given, scale=scale)
    if chosen == "stored":
        # At most a quarter above RoPE's memory, which is more with flash-attn-4.
        return _stored_backward(*given, at_once=3 if body == "flash" else 2, **view)
    view |= {"window": window, "places": Places.of(q, k, *positions), "slopes": slopes}
    if polar:
        return _polar_backward(*given[:-1], **view)
    dq, dk, dv = (placewise(x) for x in (q, k, v))
    own.backward(q, k, v, out, lse, dout, dlse, (dq, dk, dv), **view)
    if preparation == "rope":
        prepare.rotate(dq, dk, q_angle, k_angle, factor, back=True, into=(dq, dk))
    return dq, dk, dv, q.new_empty(0, dtype=torch.float32)


def halves(q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Rows and key heads to work on together, so that what is wide exists for half of them; small ones at once."""
    rows, key_heads = k.shape[:2]
    every = slice(0, rows), slice(0, key_heads)
    if q.numel() < LARGE or rows * key_heads < 2:
        return [every]
    if rows > 1:
        return [(part, every[1]) for part in (slice(0, rows // 2), slice(rows // 2, rows))]
    return [(every[0], part) for part in (slice(0, key_heads // 2), slice(key_heads // 2, key_heads))]


def _polar_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor, k_angle: Tensor, phase: Tensor | None, preparation: str,
    *, places: Any, slopes: Tensor | None, **view: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from phasewise.kernels import body as own
    from phasewise.kernels import prepare

    dq, dk, dv = (placewise(x) for x in (q, k, v))
    sums = None if phase is None else prepare.phase_sums(q)
    group = q.shape[1] // k.shape[1]

    def backward(rows: slice, keys: slice) -> None:
        heads = slice(keys.start * group, keys.stop * group)
        some_q, some_k = q[rows, heads], k[rows, keys]
        some_q_angle, some_k_angle = (x if x.shape[0] == 1 else x[rows] for x in (q_angle, k_angle))
        some_phase, some_slopes = (x if x is None else x[heads] for x in (phase, slopes))
        q2, k2 = prepare.polar(some_q, some_k, some_q_angle, some_k_angle, some_phase, preparation)
        dq2, dk2 = placewise(q2), placewise(k2)
        some = (x if x is None else x[rows, heads] for x in (out, lse, dout, dlse))
        here = places if places is None else places.of_rows(rows)
        into = (dq2, dk2, dv[rows, keys])
        own.backward(q2, k2, v[rows, keys], *some, into, places=here, slopes=some_slopes, **view)
        some_sums = sums if sums is None else sums[rows, :, heads]
        prepare.polar_backward(some_q, some_q_angle, some_phase, preparation, dq2, dq[rows, heads], some_sums)
        prepare.polar_backward(some_k, some_k_angle, None, preparation, dk2, dk[rows, keys], None)

    for rows, keys in halves(q, k):
        backward(rows, keys)
    return dq, dk, dv, _phase_gradient(sums, q)


def _from_polar(
    q: Tensor, k: Tensor, q_angle: Tensor, k_angle: Tensor, phase: Tensor | None, preparation: str, dq2: Any, dk2: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and the phase from those of what `prepare.polar` made of them."""
    from phasewise.kernels import prepare

    dq, dk, sums = placewise(q), placewise(k), None if phase is None else prepare.phase_sums(q)
    prepare.polar_backward(q, q_angle, phase, preparation, dq2, dq, sums)
    prepare.polar_backward(k, k_angle, None, preparation, dk2, dk, None)
    return dq, dk, _phase_gradient(sums, q)


def _phase_gradient(sums: Tensor | None, q: Tensor) -> Tensor:
    """Empty when there is no phase."""
    from phasewise.kernels import prepare

    return q.new_empty(0, dtype=torch.float32) if sums is None else prepare.phase_gradient(sums)


def _joint_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    preparation: str, factor: float, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from phasewise.kernels import body as own
    from phasewise.kernels import joint, prepare

    dq, dk, dv = (placewise(x) for x in (q, k, v))
    statistics = own.row_statistics(out, dout, lse, dlse)
    sums = None if phase is None else prepare.phase_sums(q)
    group = q.shape[1] // k.shape[1]

    def backward(rows: slice, keys: slice) -> None:
        heads = slice(keys.start * group, keys.stop * group)
        some_q, some_k = q[rows, heads], k[rows, keys]
        some = (v[rows, keys], *(x[rows, heads] for x in (dout, *statistics)))
        into = dq[rows, heads], dk[rows, keys], dv[rows, keys]
        turned = q_angle is not None and k_angle is not None
        angles = [x if x.shape[0] == 1 else x[rows] for x in (q_angle, k_angle) if x is not None]
        if turned and preparation != "rope":
            some_phase = phase if phase is None else phase[heads]
            some_sums = sums if sums is None else sums[rows, :, heads]
            q2, k2 = prepare.polar(some_q, some_k, *angles, some_phase, preparation)
            dq2 = joint.backward(q2, k2, *some, (k2, into[2]), scale=scale, by_channels=True)
            held = prepare.Sums(dq2.flatten(2), scale, 64)
            prepare.polar_backward(some_q, angles[0], some_phase, preparation, held, into[0], some_sums)
            prepare.polar_backward(some_k, angles[1], None, preparation, k2, into[1], None)
            return
        held = joint.backward(some_q, some_k, *some, into[1:], scale=scale, by_channels=False).flatten(2)
        half = q.shape[3] // 2
        if turned and angles[0].shape[2] == half:
            prepare.finish_rotated(held, scale, *into[:2], *angles, factor)
            return
        prepare.finish_rotated(
            held, scale, into[0], None, q.new_zeros(1, q.shape[2], half, dtype=torch.float32), None, 1.0
        )
        if turned:
            prepare.rotate(*into[:2], *angles, factor, back=True, into=into[:2])

    for rows, keys in halves(q, k):
        backward(rows, keys)
    return dq, dk, dv, _phase_gradient(sums, q)


def _stored_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    preparation: str, factor: float, *, at_once: int, scale: float, causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from phasewise.kernels import body as own
    from phasewise.kernels import prepare, stored

    dq, dk, dv = (placewise(x) for x in (q, k, v))
    statistics = own.row_statistics(out, dout, lse, dlse)
    elements, group = q.numel() + k.numel(), q.shape[1] // k.shape[1]
    wide = 0 if q_angle is None or preparation == "rope" else 2
    sums = None if phase is None else prepare.phase_sums(q, stored.side(q, 2 * q.shape[3], v))
    for rows, keys in stored.pieces(q, k, wide=wide, limit=at_once * elements, causal=causal):
        heads = slice(keys.start * group, keys.stop * group)
        q2, k2, some_v = q[rows, heads], k[rows, keys], v[rows, keys]
        some = (x[rows, heads] for x in (dout, *statistics))
        into = (dq[rows, heads], dk[rows, keys], dv[rows, keys])
        polar = None
        if q_angle is not None and k_angle is not None and preparation != "rope":
            turned = (
                *(x if x.shape[0] == 1 else x[rows] for x in (q_angle, k_angle)),
                phase if phase is None else phase[heads],
            )
            polar = stored.Polar(preparation, q2, k2, *turned, sums if sums is None else sums[rows, :, heads])
            q2, k2 = prepare.polar(q2, k2, *turned, preparation)
        options = {"polar": polar, "limit": 2 * elements, "scale": scale, "causal": causal}
        stored.backward(q2, k2, some_v, *some, into, **options)
    if q_angle is not None and k_angle is not None and preparation == "rope":
        prepare.rotate(dq, dk, q_angle, k_angle, factor, back=True, into=(dq, dk))
    return dq, dk, dv, _phase_gradient(sums, q)


def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None,
    preparation: str, factor: float, **view: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from phasewise.kernels import flash_backward, prepare

    dv, no_phase = placewise(v), q.new_empty(0, dtype=torch.float32)
    if q_angle is None or k_angle is None or preparation == "rope":
        dk = placewise(k)
        turned = k_angle if factor == 1.0 else None
        held = flash_backward.backward(q, k, v, out, lse, dout, dlse, (dk, dv), angles=turned, **view)
        dq = placewise(q)
        if q_angle is None or k_angle is None:
            held.write(dq)
        else:
            held.turn_back(dq, dk, q_angle, k_angle, factor)
        return dq, dk, dv, no_phase
    q2, k2 = prepare.polar(q, k, q_angle, k_angle, phase, preparation)
    # What is wide exists once: dk takes the place of keys that were read by then, and queries go before dq comes.
    grad = flash_backward.backward(q2, k2, v, out, lse, dout, dlse, (k2, dv), **view).expanded(q2)
    del q2
    dq, dk, dphase = _from_polar(q, k, q_angle, k_angle, phase, preparation, grad, k2)
    return dq, dk, dv, dphase


@torch.library.register_fake(separable_backward)
def _separable_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    q_angle: Tensor | None, k_angle: Tensor | None, phase: Tensor | None, *rest: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dphase = q.new_empty(0 if phase is None else phase.shape, dtype=torch.float32)
    return placewise(q), placewise(k), placewise(v), dphase


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
    dq, dk, dv, dphase = _separable_backward(q, k, v, out, lse, dout, dlse, *others, *ctx.settings)
    return dq, dk, dv, None, None, None if others[2] is None else dphase, *(None,) * 11


differentiable(separable, _gradient, _save)
last_derivative(separable_backward)
_separable_backward = direct(separable_backward)
