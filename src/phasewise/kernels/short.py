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
def pair(ptr, stride, t, c, inside, cos, sin, D: tl.constexpr, KIND: tl.constexpr):
    """The two parts of what is turned."""
    x = load(ptr, stride, t, c, inside)
    if KIND == "rope":
        y = load(ptr, stride, t, c + D // 2, inside)
        return x * cos - y * sin, y * cos + x * sin
    else:
        size, _ = magnitude(x, KIND)
        return size * cos, size * sin


@triton.jit
def turn_home(dx_ptr, x_ptr, stride, t, c, inside, d1, d2, cos, sin, D: tl.constexpr, KIND: tl.constexpr):
    """Store the gradient of what was turned, from those of its two parts; give its magnitude."""
    if KIND == "rope":
        store(dx_ptr, stride, t, c, inside, d1 * cos + d2 * sin)
        store(dx_ptr, stride, t, c + D // 2, inside, d2 * cos - d1 * sin)
        return cos
    else:
        size, slope = magnitude(load(x_ptr, stride, t, c, inside), KIND)
        store(dx_ptr, stride, t, c, inside, (d1 * cos + d2 * sin) * slope)
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
    x_ptr, out_ptr, start_ptr, length_ptr, cos_ptr, sin_ptr, phase_ptr, scale, H,
    D: tl.constexpr, n: tl.constexpr, KIND: tl.constexpr, PHASE: tl.constexpr, BLOCK: tl.constexpr,
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
        q1, q2 = pair(q_ptr, stride, t, c, inside, q_cos, q_sin, D, KIND)
        k1, k2 = pair(k_ptr, stride, t, c, inside, cos, sin, D, KIND)
        v = load(v_ptr, stride, t, tl.arange(0, D), inside).to(dtype)
        p = weights(q1.to(dtype), q2.to(dtype), k1.to(dtype), k2.to(dtype), t, length, scale)
        out = tl.dot(p.to(dtype), v, input_precision="ieee")
        store(out_ptr + start.to(tl.int64) * H * D + h * D, H * D, t, tl.arange(0, D), inside, out)


@triton.jit
def backward_kernel(
    x_ptr, dout_ptr, dx_ptr, dphase_ptr, start_ptr, length_ptr, cos_ptr, sin_ptr, phase_ptr, scale, H,
    D: tl.constexpr, n: tl.constexpr, KIND: tl.constexpr, PHASE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    start, length = tl.load(start_ptr + row), tl.load(length_ptr + row)
    dtype = x_ptr.dtype.element_ty
    t, c = tl.arange(0, BLOCK), tl.arange(0, n)
    inside, stride, d = t < length, 3 * H * D, tl.arange(0, D)
    q_at = start.to(tl.int64) * stride + h * D
    k_at, v_at = q_at + H * D, q_at + 2 * H * D
    cos, sin, q_cos, q_sin = turns(cos_ptr, sin_ptr, phase_ptr, h, H, t, c, inside, n, PHASE)
    q1, q2 = pair(x_ptr + q_at, stride, t, c, inside, q_cos, q_sin, D, KIND)
    k1, k2 = pair(x_ptr + k_at, stride, t, c, inside, cos, sin, D, KIND)
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
    turn_home(dx_ptr + k_at, x_ptr + k_at, stride, t, c, inside, dk1, dk2, cos, sin, D, KIND)
    dq1 = tl.dot(ds, k1, input_precision="ieee")
    dq2 = tl.dot(ds, k2, input_precision="ieee")
    _, _, q_cos, q_sin = turns(cos_ptr, sin_ptr, phase_ptr, h, H, t, c, inside, n, PHASE)
    size = turn_home(dx_ptr + q_at, x_ptr + q_at, stride, t, c, inside, dq1, dq2, q_cos, q_sin, D, KIND)
    if PHASE:
        dphase = tl.sum(tl.where(inside[:, None], (dq1 * q_sin - dq2 * q_cos) * size, 0.0), 0)
        tl.store(dphase_ptr + tl.program_id(0).to(tl.int64) * n + c, dphase)


def _settings(x: Tensor, cos: Tensor, preparation: str) -> dict[str, object]:
    polar = preparation != "rope"
    sizes = {"D": x.shape[3], "n": cos.shape[1], "BLOCK": LONGEST}
    return {**sizes, "KIND": preparation, "PHASE": polar, "num_warps": 4}


@torch.library.custom_op("phasewise::short_rows", mutates_args=())
@on_its_device
def short_rows(
    x: Tensor, start: Tensor, length: Tensor, cos: Tensor, sin: Tensor, phase: Tensor, turn: Tensor,
    preparation: str, scale: float,
) -> Tensor:  # fmt: skip
    """Attention `[N, H, D]` within rows of x `[N, 3, H, D]`: queries, keys, values.

    start, length: int64 [R], the first token and the number of tokens, at most 64, of each row; every token
    belongs to one. cos, sin: float32 [64, n] of each place's angles. phase: float32 [H, n], and turn [2, H, n] its
    cosines and sines, which get no gradient of their own; both empty for "rope". D and n are powers of two, from
    32 (n = D / 2 for "rope", else D).
    """
    x = x.contiguous()
    out = x.new_empty(x.shape[0], *x.shape[2:])
    grid = (len(start) * x.shape[2],)
    forward_kernel[grid](
        x, out, start, length, cos, sin, turn, scale, x.shape[2], **_settings(x, cos, preparation)
    )  # fmt: skip
    return out


@short_rows.register_fake
def _short_rows_fake(
    x: Tensor, start: Tensor, length: Tensor, cos: Tensor, sin: Tensor, phase: Tensor, turn: Tensor,
    preparation: str, scale: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], *x.shape[2:])


@torch.library.custom_op("phasewise::short_rows_backward", mutates_args=())
@on_its_device
def short_rows_backward(
    dout: Tensor, x: Tensor, start: Tensor, length: Tensor, cos: Tensor, sin: Tensor, phase: Tensor, turn: Tensor,
    preparation: str, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x `[N, 3, H, D]` and, a part from each row, of the phase, float32 `[R, H, n]`."""
    x, dout = x.contiguous(), dout.contiguous()
    dx, dphase = _short_rows_backward_fake(dout, x, start, length, cos, sin, phase, turn, preparation, scale)
    backward_kernel[(len(start) * x.shape[2],)](
        x, dout, dx, dphase, start, length, cos, sin, turn, scale, x.shape[2],
        **_settings(x, cos, preparation),
    )  # fmt: skip
    return dx, dphase


@short_rows_backward.register_fake
def _short_rows_backward_fake(
    dout: Tensor, x: Tensor, start: Tensor, length: Tensor, cos: Tensor, sin: Tensor, phase: Tensor, turn: Tensor,
    preparation: str, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parts = len(start) if phase.numel() else 0
    return torch.empty_like(x, memory_format=torch.contiguous_format), phase.new_empty(parts, *phase.shape)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.preparation, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx, dphase = torch.ops.phasewise.short_rows_backward(dout, *ctx.saved_tensors, ctx.preparation, ctx.scale)
    return dx, *(None,) * 4, dphase.sum(0) if ctx.needs_input_grad[5] else None, *(None,) * 3


short_rows.register_autograd(_gradient, setup_context=_save)
