"""Queries and keys as plain attention wants them: PoPE's Cartesian form and RoPE's rotation, with their gradients.

Letters: B rows, H heads, T places, D channels, n angles. One pass over memory, float32 inside, one rounding at the
end. Angles arrive reduced to [-pi, pi] and are shared by the heads, so a program computes their sines once for
`HEADS` of them. Nothing but the raw input is needed for the gradients.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAGNITUDES = ("softplus", "relu", "identity")


@triton.jit
def log1p(x):
    """ln(1 + x) for x in [0, 1] to 2.1e-7 of its value: x times a least-squares polynomial of degree 8."""
    series = 0.0051058258 * x - 0.0289919564
    series = series * x + 0.0773807384
    series = series * x - 0.135906002
    series = series * x + 0.190713096
    series = series * x - 0.248339455
    series = series * x + 0.333179343
    series = series * x - 0.499994357
    return (series * x + 0.999999965) * x


@triton.jit
def magnitude(x, KIND: tl.constexpr):
    """The magnitude of a channel and its derivative."""
    if KIND == "softplus":
        small = tl.exp(-tl.abs(x))
        return tl.maximum(x, 0.0) + log1p(small), tl.where(x >= 0.0, 1.0, small) / (1.0 + small)
    elif KIND == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    else:
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def load_turn(angle_ptr, row_offset, t, c, T, n):
    """cos and sin of the angles of places t and channels c."""
    inside = (t[:, None] < T) & (c[None, :] < n)
    angle = tl.load(angle_ptr + row_offset + t[:, None].to(tl.int64) * n + c[None, :], inside, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def turn_back(cos, sin, phase_cos_ptr, phase_sin_ptr, h, c, H, n):
    """cos and sin of angle - phase: the phases of one head, subtracted."""
    keep = (c < n) & (h < H)
    phase_cos = tl.load(phase_cos_ptr + h * n + c, keep, other=1.0)[None, :]
    phase_sin = tl.load(phase_sin_ptr + h * n + c, keep, other=0.0)[None, :]
    return cos * phase_cos + sin * phase_sin, sin * phase_cos - cos * phase_sin


@triton.jit
def tile_of(ptr, strides, b, h, t, c):
    """Addresses of rows t and channels c of one head."""
    row = ptr + b * strides[0] + h.to(tl.int64) * strides[1]
    return row + t[:, None].to(tl.int64) * strides[2] + c[None, :] * strides[3]


@triton.jit
def program(tiles, groups):
    """Tile, row of the batch and group of heads of this program, all on the grid's one unbounded axis."""
    at = tl.program_id(0)
    return at % tiles, (at // tiles // groups).to(tl.int64), at // tiles % groups


@triton.jit
def polar_kernel(
    x_ptr, x_strides, out_ptr, out_strides, angle_ptr, angle_row, phase_cos_ptr, phase_sin_ptr, H, T, D,
    KIND: tl.constexpr, PHASE: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x [B, H, T, D] -> [mu cos, mu sin] [B, H, T, 2 D]."""
    tile, b, group = program(tl.cdiv(T, BLOCK_T), tl.cdiv(H, HEADS))
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (c[None, :] < D)
    first = group * HEADS
    x = tl.load(tile_of(x_ptr, x_strides, b, first, t, c), inside, other=0.0)
    cos, sin = load_turn(angle_ptr, b * angle_row, t, c, T, D)
    for head in range(HEADS):
        h = first + head
        # The next head is on its way before this one is stored.
        following = tl.load(tile_of(x_ptr, x_strides, b, h + 1, t, c), inside & (h + 1 < H), other=0.0)
        mu, _ = magnitude(x.to(tl.float32), KIND)
        head_cos, head_sin = cos, sin
        if PHASE:
            head_cos, head_sin = turn_back(cos, sin, phase_cos_ptr, phase_sin_ptr, h, c, H, D)
        out_at = tile_of(out_ptr, out_strides, b, h, t, c)
        tl.store(out_at, (mu * head_cos).to(out_ptr.dtype.element_ty), inside & (h < H))
        tl.store(out_at + D, (mu * head_sin).to(out_ptr.dtype.element_ty), inside & (h < H))
        x = following


@triton.jit
def polar_backward_kernel(
    x_ptr, x_strides, grad_ptr, grad_strides, dx_ptr, dx_strides, partial_ptr,
    cos_ptr, sin_ptr, turn_row, phase_cos_ptr, phase_sin_ptr, H, T, D,
    KIND: tl.constexpr, PHASE: tl.constexpr, TILES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of x for TILES tiles of one head and, per program, of its phases: partial [B, programs, H, D]."""
    programs = tl.cdiv(T, TILES * BLOCK_T)
    tile, b, h = program(programs, H)
    c = tl.arange(0, BLOCK_D)
    t = tile * TILES * BLOCK_T + tl.arange(0, BLOCK_T)
    turned = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    phase_cos, phase_sin = 1.0, 0.0
    if PHASE:
        phase_cos = tl.load(phase_cos_ptr + h * D + c, c < D, other=1.0)[None, :]
        phase_sin = tl.load(phase_sin_ptr + h * D + c, c < D, other=0.0)[None, :]
    for _ in tl.range(0, TILES, num_stages=2):
        inside = (t[:, None] < T) & (c[None, :] < D)
        grad_at = tile_of(grad_ptr, grad_strides, b, h, t, c)
        turn_at = b * turn_row + t[:, None].to(tl.int64) * D + c[None, :]
        x = tl.load(tile_of(x_ptr, x_strides, b, h, t, c), inside, other=0.0).to(tl.float32)
        grad_cos = tl.load(grad_at, inside, other=0.0).to(tl.float32)
        grad_sin = tl.load(grad_at + D * grad_strides[3], inside, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + turn_at, inside, other=0.0)
        sin = tl.load(sin_ptr + turn_at, inside, other=0.0)
        if PHASE:
            cos, sin = cos * phase_cos + sin * phase_sin, sin * phase_cos - cos * phase_sin
        mu, slope = magnitude(x, KIND)
        dx = (grad_cos * cos + grad_sin * sin) * slope
        tl.store(tile_of(dx_ptr, dx_strides, b, h, t, c), dx.to(dx_ptr.dtype.element_ty), inside)
        if PHASE:
            turned += mu * (grad_cos * sin - grad_sin * cos)
        t += BLOCK_T
    if PHASE:
        row = (b * programs + tile) * H + h
        tl.store(partial_ptr + row * D + c, tl.sum(turned, 0), c < D)


@triton.jit
def rotate_kernel(
    x_ptr, x_strides, out_ptr, out_strides, angle_ptr, angle_row, factor, H, T, D, n,
    BACK: tl.constexpr, HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """x [B, H, T, D] with the pairs (c, c + n), c < n, turned (back) and scaled; channels from 2 n on as they are."""
    tile, b, group = program(tl.cdiv(T, BLOCK_T), tl.cdiv(H, HEADS))
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_N)
    inside = (t[:, None] < T) & (c[None, :] < n)
    cos, sin = load_turn(angle_ptr, b * angle_row, t, c, T, n)
    cos *= factor
    sin *= -factor if BACK else factor
    for head in range(HEADS):
        h = group * HEADS + head
        keep = inside & (h < H)
        first_at = tile_of(x_ptr, x_strides, b, h, t, c)
        first = tl.load(first_at, keep, other=0.0).to(tl.float32)
        second = tl.load(first_at + n * x_strides[3], keep, other=0.0).to(tl.float32)
        out_at = tile_of(out_ptr, out_strides, b, h, t, c)
        kind = out_ptr.dtype.element_ty
        tl.store(out_at, (first * cos - second * sin).to(kind), keep)
        tl.store(out_at + n * out_strides[3], (second * cos + first * sin).to(kind), keep)
        if BLOCK_REST > 0:
            rest = 2 * n + tl.arange(0, BLOCK_REST)
            keep_rest = (t[:, None] < T) & (rest[None, :] < D) & (h < H)
            passing = tl.load(tile_of(x_ptr, x_strides, b, h, t, rest), keep_rest)
            tl.store(tile_of(out_ptr, out_strides, b, h, t, rest), passing, keep_rest)


def _grid(x: Tensor, columns: int) -> tuple[tuple[int], dict[str, int]]:
    rows, heads, length, _ = x.shape
    block_t = max(1, min(triton.next_power_of_2(length), 2048 // columns))
    group = min(heads, 8)
    programs = triton.cdiv(length, block_t) * rows * triton.cdiv(heads, group)
    return (programs,), {"HEADS": group, "BLOCK_T": block_t, "num_warps": 8}


def expanded_like(x: Tensor, width: int) -> Tensor:
    """Uninitialised `[B, H, T, width]`, stored place by place with the heads side by side."""
    rows, heads, length, _ = x.shape
    return x.new_empty(rows, length, heads, width).transpose(1, 2)


def _turn(phase: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if phase is None else (phase.cos(), phase.sin())


def polar(x: Tensor, angle: Tensor, phase: Tensor | None, kind: str) -> Tensor:
    """PoPE's Cartesian form `[B, H, T, 2 D]`, cosine half first, of x `[B, H, T, D]`.

    angle is float32 `[B | 1, T, D]`, reduced; phase float32 `[H, D]` is subtracted (queries) or None (keys).
    """
    width = x.shape[3]
    out = expanded_like(x, 2 * width)
    block_d = triton.next_power_of_2(width)
    grid, meta = _grid(x, block_d)
    polar_kernel[grid](
        x, x.stride(), out, out.stride(), angle, angle.stride(0) if angle.shape[0] > 1 else 0, *_turn(phase),
        x.shape[1], x.shape[2], width, KIND=kind, PHASE=phase is not None, BLOCK_D=block_d, **meta,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Turn:
    """float32 cosines and sines `[B | 1, T, D]` of PoPE's angles, and `[H, D]` of its phases or None."""

    cos: Tensor
    sin: Tensor
    phase: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, angle: Tensor, phase: Tensor | None) -> "Turn":
        angle = angle.contiguous()
        return cls(angle.cos(), angle.sin(), None if phase is None else (phase.cos(), phase.sin()))


def polar_backward(x: Tensor, turn: Turn, kind: str, grad: Tensor, dx: Tensor) -> Tensor | None:
    """Write the gradient of x into dx, given that of `polar`'s output; return that of the phase, `[H, D]`.

    No atomics: programs leave partial sums, which are added in a fixed order.
    """
    rows, heads, length, width = x.shape
    block_d = triton.next_power_of_2(width)
    block_t = max(1, 2048 // block_d)
    tiles = 8 if length * rows * heads * block_d > 2**22 else 1
    programs = triton.cdiv(length, block_t * tiles)
    partial = None
    if turn.phase is not None:
        partial = torch.empty(rows, programs, heads, width, dtype=torch.float32, device=x.device)
    polar_backward_kernel[(programs * heads * rows,)](
        x, x.stride(), grad, grad.stride(), dx, dx.stride(), partial,
        turn.cos, turn.sin, turn.cos.stride(0) if turn.cos.shape[0] > 1 else 0, *(turn.phase or (None, None)),
        heads, length, width, KIND=kind, PHASE=turn.phase is not None, TILES=tiles, BLOCK_T=block_t, BLOCK_D=block_d,
        num_warps=8,
    )  # fmt: skip
    return None if partial is None else partial.sum((0, 1))


def rotate(
    x: Tensor, angle: Tensor, factor: float, *, back: bool = False, out: Tensor | None = None
) -> Tensor:
    """RoPE's rotation of the pairs (c, c + n) of x `[B, H, T, D]` by angle float32 `[B | 1, T, n]`, times factor.

    `back=True` turns the other way: the gradient of the rotation.
    """
    width, n = x.shape[3], angle.shape[2]
    out = expanded_like(x, width) if out is None else out
    block_n = triton.next_power_of_2(n)
    rest = width - 2 * n
    grid, meta = _grid(x, 2 * block_n)
    rotate_kernel[grid](
        x, x.stride(), out, out.stride(), angle, angle.stride(0) if angle.shape[0] > 1 else 0, factor,
        x.shape[1], x.shape[2], width, n, BACK=back, BLOCK_N=block_n,
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0, **meta,
    )  # fmt: skip
    return out
