"""Causal attention within short rows of tokens laid end to end: one program does a whole row and head.

Letters: N tokens in all, R rows, T places of a tile, H heads, D channels, n angles. A row fits one tile, so
queries, keys and values are read once from the projection as it stands, are turned in registers, and the scores
never leave them; the backward makes them anew. No atomics: each gradient is written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasewise.kernels.hardware import on_its_device
from phasewise.kernels.operators import differentiable, last_derivative, operator
from phasewise.kernels.prepare import MAGNITUDES, magnitude

LONGEST = 64
PREPARATIONS = ("rope", *MAGNITUDES)


@triton.jit
def load(ptr, stride, t, c, inside):
    return tl.load(ptr + t[:, None].to(tl.int64) * stride + c[None, :], inside[:, None], other=0.0).to(
        tl.float32
    )


@triton.jit
def store(ptr, stride, t, c, inside, x):
    tl.store(ptr + t[:, None].to(tl.int64) * stride + c[None, :], x.to(ptr.dtype.element_ty), inside[:, None])


@triton.jit
def turns(cos_ptr, sin_ptr, phase_ptr, h, H, t, c, inside, n: tl.constexpr, PHASE: tl.constexpr):
    """cos and sin of the keys' angles, and of the queries', from which the head's phase is taken."""
    cos, sin = load(cos_ptr, n, t, c, inside), load(sin_ptr, n, t, c, inside)
    if PHASE:
        phase_cos = tl.load(phase_ptr + h * n + c)[None, :]
        phase_sin = tl.load(phase_ptr + (H + h) * n + c)[None, :]
        return cos, sin, cos * phase_cos + sin * phase_sin, sin * phase_cos - cos * phase_sin
    else:
        return cos, sin, cos, sin


@triton.jit
def over_rms(squares, epsilon, D: tl.constexpr):
    """1 / rms of each place's head, from the sum of its squares."""
    return (1.0 / tl.sqrt(squares / D + epsilon))[:, None]


@triton.jit
def pair(
    ptr, stride, t, c, inside, cos, sin, norm_ptr, epsilon, D: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The two parts of what is turned."""
    x = load(ptr, stride, t, c, inside)
    if KIND == "rope":
        y = load(ptr, stride, t, c + D // 2, inside)
        if NORM:
            r = over_rms(tl.sum(x * x + y * y, 1), epsilon, D)
            x, y = x * r * tl.load(norm_ptr + c)[None, :], y * r * tl.load(norm_ptr + c + D // 2)[None, :]
        return x * cos - y * sin, y * cos + x * sin
    else:
        if NORM:
            x = x * over_rms(tl.sum(x * x, 1), epsilon, D) * tl.load(norm_ptr + c)[None, :]
        size, _ = magnitude(x, KIND)
        return size * cos, size * sin


@triton.jit
def turn_home(
    dx_ptr, x_ptr, stride, t, c, inside, d1, d2, cos, sin, norm_ptr, dnorm_ptr, epsilon,
    D: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Store the gradient of what was turned, and of its norm's weights, from those of its two parts; give its
    magnitude."""
    if KIND == "rope":
        dx, dy, size = d1 * cos + d2 * sin, d2 * cos - d1 * sin, cos
        if NORM:
            x, y = load(x_ptr, stride, t, c, inside), load(x_ptr, stride, t, c + D // 2, inside)
            r = over_rms(tl.sum(x * x + y * y, 1), epsilon, D)
            tl.store(dnorm_ptr + c, tl.sum(dx * x * r, 0))
            tl.store(dnorm_ptr + c + D // 2, tl.sum(dy * y * r, 0))
            dx, dy = dx * tl.load(norm_ptr + c)[None, :], dy * tl.load(norm_ptr + c + D // 2)[None, :]
            along = tl.sum(dx * x + dy * y, 1)[:, None] * r * r / D
            dx, dy = r * (dx - x * along), r * (dy - y * along)
        store(dx_ptr, stride, t, c + D // 2, inside, dy)
    else:
        x = load(x_ptr, stride, t, c, inside)
        if NORM:
            r, weight = over_rms(tl.sum(x * x, 1), epsilon, D), tl.load(norm_ptr + c)[None, :]
            size, slope = magnitude(x * r * weight, KIND)
            dx = (d1 * cos + d2 * sin) * slope
            tl.store(dnorm_ptr + c, tl.sum(dx * x * r, 0))
            dx *= weight
            dx = r * (dx - x * (tl.sum(dx * x, 1)[:, None] * r * r / D))
        else:
            size, slope = magnitude(x, KIND)
            dx = (d1 * cos + d2 * sin) * slope
    store(dx_ptr, stride, t, c, inside, dx)
    return size


@triton.jit
def weights(q1, q2, k1, k2, t, length, scale):
    """softmax of the scores, float32 [T, T]."""
    scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scale
    seen = (t[None, :] <= t[:, None]) & (t[None, :] < length)
    scores = tl.where(seen, scores, -1e30)
    raised = tl.exp(scores - tl.max(scores, 1)[:, None])
    return raised / tl.sum(raised, 1)[:, None]


@triton.jit
def forward_kernel(
    x_ptr, out_ptr, start_ptr, length_ptr, cos_ptr, sin_ptr, phase_ptr, norm_ptr, epsilon, scale, H,
    D: tl.constexpr, n: tl.constexpr, KIND: tl.constexpr, PHASE: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + row), tl.load(length_ptr + row)
    if length > 0:
        dtype = x_ptr.dtype.element_ty
        t, c = tl.arange(0, BLOCK), tl.arange(0, n)
        inside, stride = t < length, 3 * H * D
        q_ptr = x_ptr + start.to(tl.int64) * stride + h * D
        k_ptr, v_ptr = q_ptr + H * D, q_ptr + 2 * H * D
        cos, sin, q_cos, q_sin = turns(cos_ptr, sin_ptr, phase_ptr, h, H, t, c, inside, n, PHASE)
        q1, q2 = pair(q_ptr, stride, t, c, inside, q_cos, q_sin, norm_ptr, epsilon, D, KIND, NORM)
        k1, k2 = pair(k_ptr, stride, t, c, inside, cos, sin, norm_ptr + D, epsilon, D, KIND, NORM)
        v = load(v_ptr, stride, t, tl.arange(0, D), inside).to(dtype)
        p = weights(q1.to(dtype), q2.to(dtype), k1.to(dtype), k2.to(dtype), t, length, scale)
        out = tl.dot(p.to(dtype), v, input_precision="ieee")
        store(out_ptr + start.to(tl.int64) * H * D + h * D, H * D, t, tl.arange(0, D), inside, out)


@triton.jit
def backward_kernel(
    x_ptr, dout_ptr, dx_ptr, dphase_ptr, dnorm_ptr, start_ptr, length_ptr, cos_ptr, sin_ptr, phase_ptr, norm_ptr,
    epsilon, scale, H,
    D: tl.constexpr, n: tl.constexpr, KIND: tl.constexpr, PHASE: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + row), tl.load(length_ptr + row)
    dtype = x_ptr.dtype.element_ty
    t, c = tl.arange(0, BLOCK), tl.arange(0, n)
    inside, stride, d = t < length, 3 * H * D, tl.arange(0, D)
    q_at = start.to(tl.int64) * stride + h * D
    k_at, v_at = q_at + H * D, q_at + 2 * H * D
    cos, sin, q_cos, q_sin = turns(cos_ptr, sin_ptr, phase_ptr, h, H, t, c, inside, n, PHASE)
    q1, q2 = pair(x_ptr + q_at, stride, t, c, inside, q_cos, q_sin, norm_ptr, epsilon, D, KIND, NORM)
    k1, k2 = pair(x_ptr + k_at, stride, t, c, inside, cos, sin, norm_ptr + D, epsilon, D, KIND, NORM)
    q1, q2, k1, k2 = q1.to(dtype), q2.to(dtype), k1.to(dtype), k2.to(dtype)
    p = tl.where(inside[:, None], weights(q1, q2, k1, k2, t, length, scale), 0.0)
    v = load(x_ptr + v_at, stride, t, d, inside).to(dtype)
    dout = load(dout_ptr + start.to(tl.int64) * H * D + h * D, H * D, t, d, inside).to(dtype)
    dv = tl.dot(tl.trans(p.to(dtype)), dout, input_precision="ieee")
    store(dx_ptr + v_at, stride, t, d, inside, dv)
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(dtype)
    dk1 = tl.dot(tl.trans(ds), q1, input_precision="ieee")
    dk2 = tl.dot(tl.trans(ds), q2, input_precision="ieee")
    # Angles and slopes are made again, since registers could not hold them meanwhile.
    cos, sin, _, _ = turns(cos_ptr, sin_ptr, phase_ptr, h, H, t, c, inside, n, PHASE)
    dnorm_ptr += tl.program_id(0).to(tl.int64) * 2 * D
    turn_home(
        dx_ptr + k_at, x_ptr + k_at, stride, t, c, inside, dk1, dk2, cos, sin, norm_ptr + D, dnorm_ptr + D, epsilon,
        D, KIND, NORM,
    )  # fmt: skip
    dq1 = tl.dot(ds, k1, input_precision="ieee")
    dq2 = tl.dot(ds, k2, input_precision="ieee")
    _, _, q_cos, q_sin = turns(cos_ptr, sin_ptr, phase_ptr, h, H, t, c, inside, n, PHASE)
    size = turn_home(
        dx_ptr + q_at, x_ptr + q_at, stride, t, c, inside, dq1, dq2, q_cos, q_sin, norm_ptr, dnorm_ptr, epsilon,
        D, KIND, NORM,
    )  # fmt: skip
    if PHASE:
        dphase = tl.sum(tl.where(inside[:, None], (dq1 * q_sin - dq2 * q_cos) * size, 0.0), 0)
        tl.store(dphase_ptr + tl.program_id(0).to(tl.int64) * n + c, dphase)


def _settings(x: Tensor, cos: Tensor, norm: Tensor, preparation: str) -> dict[str, object]:
    polar = preparation != "rope"
    sizes = {"D": x.shape[3], "n": cos.shape[1], "BLOCK": LONGEST}
    return {**sizes, "KIND": preparation, "PHASE": polar, "NORM": norm.numel() > 0, "num_warps": 4}


@operator
@on_its_device
def short_rows(
    x: Tensor, start: Tensor, length: Tensor, cos: Tensor, sin: Tensor, phase: Tensor, norm: Tensor, turn: Tensor,
    preparation: str, scale: float, epsilon: float,
) -> Tensor:  # fmt: skip
    """Attention `[N, H, D]` within rows of x `[N, 3, H, D]`: queries, keys, values.

    start, length: int64 [R], the first token and the number of tokens, at most 64, of each row; every token
    belongs to one. cos, sin: float32 [64, n] of each place's angles. phase: float32 [H, n], and turn [2, H, n] its
    cosines and sines, which get no gradient of their own; both empty for "rope". norm: float32 [2, D], the weights
    of an RMSNorm of each head's queries and keys, with its epsilon; empty without one. D and n are powers of two,
    from 32 (n = D / 2 for "rope", else D).
    """
    x = x.contiguous()
    out = x.new_empty(x.shape[0], *x.shape[2:])
    grid = (len(start) * x.shape[2],)
    forward_kernel[grid](
        x, out, start, length, cos, sin, turn, norm, epsilon, scale, x.shape[2],
        **_settings(x, cos, norm, preparation),
    )  # fmt: skip
    return out


@torch.library.register_fake(short_rows)
def _short_rows_fake(
    x: Tensor, start: Tensor, length: Tensor, cos: Tensor, sin: Tensor, phase: Tensor, norm: Tensor, turn: Tensor,
    preparation: str, scale: float, epsilon: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], *x.shape[2:])


@operator
@on_its_device
def short_rows_backward(
    dout: Tensor, x: Tensor, start: Tensor, length: Tensor, cos: Tensor, sin: Tensor, phase: Tensor, norm: Tensor,
    turn: Tensor, preparation: str, scale: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x `[N, 3, H, D]`, and a part from each row of the phase's, float32 `[R, H, n]`, and of the
    norm's, float32 `[R, H, 2, D]`."""
    x, dout = x.contiguous(), dout.contiguous()
    dx, dphase, dnorm = _short_rows_backward_fake(
        dout, x, start, length, cos, sin, phase, norm, turn, preparation, scale, epsilon
    )
    backward_kernel[(len(start) * x.shape[2],)](
        x, dout, dx, dphase, dnorm, start, length, cos, sin, turn, norm, epsilon, scale, x.shape[2],
        **_settings(x, cos, norm, preparation),
    )  # fmt: skip
    return dx, dphase, dnorm


@torch.library.register_fake(short_rows_backward)
def _short_rows_backward_fake(
    dout: Tensor, x: Tensor, start: Tensor, length: Tensor, cos: Tensor, sin: Tensor, phase: Tensor, norm: Tensor,
    turn: Tensor, preparation: str, scale: float, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dphase = phase.new_empty(len(start) if phase.numel() else 0, *phase.shape)
    return dx, dphase, norm.new_empty(len(start) if norm.numel() else 0, x.shape[2], *norm.shape)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.preparation, ctx.scale, ctx.epsilon = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx, dphase, dnorm = short_rows_backward(dout, *ctx.saved_tensors, ctx.preparation, ctx.scale, ctx.epsilon)
    needs_phase, needs_norm = ctx.needs_input_grad[5:7]
    d_phase = dphase.sum(0) if needs_phase else None
    return dx, *(None,) * 4, d_phase, dnorm.sum((0, 1)) if needs_norm else None, *(None,) * 4


differentiable(short_rows, _gradient, _save)
last_derivative(short_rows_backward)
