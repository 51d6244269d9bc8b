"""Queries and keys as plain attention wants them: PoPE's Cartesian form and RoPE's rotation, with their gradients.

Letters: B rows, H heads, T places, D channels, n angles. One pass over memory, float32 inside, one rounding at the
end. Angles arrive reduced to [-pi, pi] and are shared by the heads, so a program reads them once for `HEADS` of
them. FAST kernels, for half precision, leave sines, exponentials and reciprocals to the hardware. Nothing but the
raw input is needed for the gradients.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasewise.kernels.tiles import LOG2E, ceil_div, power_of_two

MAGNITUDES = ("softplus", "relu", "identity")
HELD_PLACES = 16  # of `Sums` that a program reads


@triton.jit
def instruction(x, PTX: tl.constexpr):
    """One float32 instruction of the hardware's."""
    return tl.inline_asm_elementwise(PTX, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def log1p(x, FAST: tl.constexpr):
    """ln(1 + x) for x in [0, 1] to 2.1e-7 of its value, or 8.4e-6 FAST: x times a fitted polynomial."""
    if FAST:
        series = -0.0238691252 * x + 0.101222217
        series = series * x - 0.210048631
        series = series * x + 0.325206667
        series = series * x - 0.499361366
        return (series * x + 0.999991596) * x
    else:
        series = 0.0051058258 * x - 0.0289919564
        series = series * x + 0.0773807384
        series = series * x - 0.135906002
        series = series * x + 0.190713096
        series = series * x - 0.248339455
        series = series * x + 0.333179343
        series = series * x - 0.499994357
        return (series * x + 0.999999965) * x


@triton.jit
def magnitude(x, KIND: tl.constexpr, FAST: tl.constexpr = False):
    """The magnitude of a channel and its derivative."""
    if KIND == "softplus":
        if FAST:
            small = instruction(tl.abs(x) * -LOG2E, "ex2.approx.ftz.f32 $0, $1;")
            part = instruction(1.0 + small, "rcp.approx.ftz.f32 $0, $1;")
        else:
            small = tl.exp(-tl.abs(x))
            part = 1.0 / (1.0 + small)
        return tl.maximum(x, 0.0) + log1p(small, FAST), tl.where(x >= 0.0, part, small * part)
    elif KIND == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    else:
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def turn(angle, FAST: tl.constexpr):
    """cos and sin; FAST takes the hardware's, 5e-7 off for an angle within a turn, 2e-6 within one and a half."""
    if FAST:
        return instruction(angle, "cos.approx.ftz.f32 $0, $1;"), instruction(
            angle, "sin.approx.ftz.f32 $0, $1;"
        )
    else:
        return tl.cos(angle), tl.sin(angle)


@triton.jit
def load_angle(angle_ptr, row_offset, t, c, T, n):
    """The angles of places t and channels c."""
    inside = (t[:, None] < T) & (c[None, :] < n)
    return tl.load(angle_ptr + row_offset + t[:, None].to(tl.int64) * n + c[None, :], inside, other=0.0)


@triton.jit
def tile_of(ptr, strides, b, h, t, c):
    """Addresses of rows t and channels c of one head."""
    row = ptr + b * strides[0] + h.to(tl.int64) * strides[1]
    return row + t[:, None].to(tl.int64) * strides[2] + c[None, :].to(tl.int64) * strides[3]


@triton.jit
def program(at, tiles, groups):
    """Tile, row of the batch and group of heads of program `at`, all on the grid's one unbounded axis."""
    return at % tiles, (at // tiles // groups).to(tl.int64), at // tiles % groups


@triton.jit
def expand(
    at, x_ptr, x_strides, out_ptr, out_strides, angle_ptr, angle_row, H, T, phase_ptr, D,
    KIND: tl.constexpr, PHASE: tl.constexpr, FAST: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """x [B, H, T, D] -> [mu cos, mu sin] [B, H, T, 2 D]."""
    tile, b, group = program(at, tl.cdiv(T, BLOCK_T), H // HEADS)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (c[None, :] < D)
    first = group * HEADS
    x_at = tile_of(x_ptr, x_strides, b, first, t, c)
    out_at = tile_of(out_ptr, out_strides, b, first, t, c)
    x = tl.load(x_at, inside, other=0.0)
    angle = load_angle(angle_ptr, b * angle_row, t, c, T, D)
    cos, sin = turn(angle, FAST)
    for head in range(HEADS):
        # The next head is on its way before this one is stored.
        x_at += x_strides[1]
        following = tl.load(x_at, inside & (head + 1 < HEADS), other=0.0)
        mu, _ = magnitude(x.to(tl.float32), KIND, FAST)
        if PHASE:
            cos, sin = turn(
                angle - tl.load(phase_ptr + (first + head) * D + c, c < D, other=0.0)[None, :], FAST
            )
        tl.store(out_at, (mu * cos).to(out_ptr.dtype.element_ty), inside)
        tl.store(out_at + D, (mu * sin).to(out_ptr.dtype.element_ty), inside)
        out_at += out_strides[1]
        x = following


@triton.jit
def polar_kernel(
    q_ptr, q_strides, q_out_ptr, q_out_strides, q_angle_ptr, q_angle_row, H, T,
    k_ptr, k_strides, k_out_ptr, k_out_strides, k_angle_ptr, k_angle_row, KEY_H, S, programs,
    phase_ptr, D,
    KIND: tl.constexpr, PHASE: tl.constexpr, FAST: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`expand` of queries, by the first `programs`, and of keys, which have no phase."""
    at = tl.program_id(0)
    if at < programs:
        expand(
            at, q_ptr, q_strides, q_out_ptr, q_out_strides, q_angle_ptr, q_angle_row, H, T, phase_ptr, D,
            KIND, PHASE, FAST, QUERY_HEADS, BLOCK_T, BLOCK_D,
        )  # fmt: skip
    else:
        expand(
            at - programs, k_ptr, k_strides, k_out_ptr, k_out_strides, k_angle_ptr, k_angle_row, KEY_H, S, phase_ptr, D,
            KIND, False, FAST, KEY_HEADS, BLOCK_T, BLOCK_D,
        )  # fmt: skip


@triton.jit
def held_by_threads(at_ptr, COLUMNS: tl.constexpr):
    """64 rows of float32 from the order in which the threads of a Hopper tensor core instruction hold a product.

    That is, from the outside in: eight columns, warp, row of eight, pair of columns, upper or lower eight, column.
    """
    x = tl.reshape(tl.load(at_ptr + tl.arange(0, 64 * COLUMNS)), [COLUMNS // 8, 4, 8, 4, 2, 2])
    return tl.reshape(tl.permute(x, [1, 4, 2, 0, 3, 5]), [64, COLUMNS])


@triton.jit
def polar_backward_kernel(
    x_ptr, x_strides, grad_ptr, grad_strides, scale, dx_ptr, dx_strides, sum_ptr, sum_strides,
    angle_ptr, angle_row, phase_ptr, H, T, D,
    KIND: tl.constexpr, PHASE: tl.constexpr, FAST: tl.constexpr, HELD: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Gradients of x and, per tile, of the phases: sums [B, tiles, H, D].

    HELD above 0: grad is `Sums` in tiles of so many places, times scale.
    """
    tile, b, group = program(tl.program_id(0), tl.cdiv(T, BLOCK_T), H // HEADS)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_D)
    inside = (t[:, None] < T) & (c[None, :] < D)
    first = group * HEADS
    x_at = tile_of(x_ptr, x_strides, b, first, t, c)
    if HELD > 0:
        grad_at = grad_ptr + b * grad_strides[0] + first.to(tl.int64) * grad_strides[1]
        grad_at += (tile * BLOCK_T // HELD).to(tl.int64) * (128 * HELD) + tile * BLOCK_T % HELD * 64
    else:
        grad_at = tile_of(grad_ptr, grad_strides, b, first, t, c)
    dx_at = tile_of(dx_ptr, dx_strides, b, first, t, c)
    angle = load_angle(angle_ptr, b * angle_row, t, c, T, D)
    cos, sin = turn(angle, FAST)
    for head in range(HEADS):
        x = tl.load(x_at, inside, other=0.0).to(tl.float32)
        if HELD > 0:
            grad_cos = tl.where(inside, tl.trans(held_by_threads(grad_at, BLOCK_T)) * scale, 0.0)
            grad_sin = tl.where(inside, tl.trans(held_by_threads(grad_at + 64 * HELD, BLOCK_T)) * scale, 0.0)
        else:
            grad_cos = tl.load(grad_at, inside, other=0.0).to(tl.float32)
            grad_sin = tl.load(grad_at + tl.cast(D, tl.int64) * grad_strides[3], inside, other=0.0).to(
                tl.float32
            )
        mu, slope = magnitude(x, KIND, FAST)
        if PHASE:
            h = first + head
            cos, sin = turn(angle - tl.load(phase_ptr + h * D + c, c < D, other=0.0)[None, :], FAST)
            turned = tl.sum(mu * (grad_cos * sin - grad_sin * cos), 0)
            sum_at = sum_ptr + b * sum_strides[0] + tile.to(tl.int64) * sum_strides[1] + h * sum_strides[2]
            tl.store(sum_at + c, turned, c < D)
        dx = (grad_cos * cos + grad_sin * sin) * slope
        tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), inside)
        x_at += x_strides[1]
        grad_at += grad_strides[1]
        dx_at += dx_strides[1]


@triton.jit
def add_up_kernel(sum_ptr, out_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """out [C] of sums [N, C], few columns a program."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for first in range(0, N, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = (n[:, None] < N) & (c[None, :] < C)
        total += tl.load(sum_ptr + n[:, None].to(tl.int64) * C + c[None, :], inside, other=0.0)
    tl.store(out_ptr + c, tl.sum(total, 0), c < C)


@triton.jit
def turn_pairs(
    at, x_ptr, x_strides, out_ptr, out_strides, angle_ptr, angle_row, H, T, factor, D, n,
    BACK: tl.constexpr, FAST: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """x [B, H, T, D] with the pairs (c, c + n), c < n, turned (back) and scaled; channels from 2 n on as they are."""
    tile, b, group = program(at, tl.cdiv(T, BLOCK_T), H // HEADS)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_N)
    inside = (t[:, None] < T) & (c[None, :] < n)
    cos, sin = turn(load_angle(angle_ptr, b * angle_row, t, c, T, n), FAST)
    cos *= factor
    sin *= -factor if BACK else factor
    first_at = tile_of(x_ptr, x_strides, b, group * HEADS, t, c)
    out_at = tile_of(out_ptr, out_strides, b, group * HEADS, t, c)
    kind = out_ptr.dtype.element_ty
    for head in range(HEADS):
        first = tl.load(first_at, inside, other=0.0).to(tl.float32)
        second = tl.load(first_at + tl.cast(n, tl.int64) * x_strides[3], inside, other=0.0).to(tl.float32)
        tl.store(out_at, (first * cos - second * sin).to(kind), inside)
        tl.store(
            out_at + tl.cast(n, tl.int64) * out_strides[3], (second * cos + first * sin).to(kind), inside
        )
        if BLOCK_REST > 0:
            rest = 2 * n + tl.arange(0, BLOCK_REST)
            keep_rest = (t[:, None] < T) & (rest[None, :] < D)
            passing = tl.load(tile_of(x_ptr, x_strides, b, group * HEADS + head, t, rest), keep_rest)
            tl.store(tile_of(out_ptr, out_strides, b, group * HEADS + head, t, rest), passing, keep_rest)
        first_at += x_strides[1]
        out_at += out_strides[1]


@triton.jit
def rotate_kernel(
    q_ptr, q_strides, q_out_ptr, q_out_strides, q_angle_ptr, q_angle_row, H, T,
    k_ptr, k_strides, k_out_ptr, k_out_strides, k_angle_ptr, k_angle_row, KEY_H, S, programs,
    factor, D, n, BACK: tl.constexpr, FAST: tl.constexpr,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """`turn_pairs` of queries, by the first `programs`, and of keys."""
    at = tl.program_id(0)
    if at < programs:
        turn_pairs(
            at, q_ptr, q_strides, q_out_ptr, q_out_strides, q_angle_ptr, q_angle_row, H, T, factor, D, n,
            BACK, FAST, QUERY_HEADS, BLOCK_T, BLOCK_N, BLOCK_REST,
        )  # fmt: skip
    else:
        turn_pairs(
            at - programs, k_ptr, k_strides, k_out_ptr, k_out_strides, k_angle_ptr, k_angle_row, KEY_H, S, factor, D, n,
            BACK, FAST, KEY_HEADS, BLOCK_T, BLOCK_N, BLOCK_REST,
        )  # fmt: skip


@triton.jit
def turn_sums(
    at, sum_ptr, sum_head, out_ptr, out_strides, angle_ptr, angle_row, H, T, factor,
    FAST: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The pairs (c, c + N) of sums, for a head 64 rows of the first half of its channels, then of the second, turned
    back and scaled into out [B, H, T, 2 N]."""
    tile, b, group = program(at, tl.cdiv(T, 64), H // HEADS)
    t = tile * 64 + tl.arange(0, 64)
    c = tl.arange(0, N)
    inside = (t[:, None] < T) & (c[None, :] < N)
    cos, sin = turn(load_angle(angle_ptr, b * angle_row, t, c, T, N), FAST)
    cos *= factor
    sin *= factor
    sum_at = sum_ptr + (b * H + group * HEADS) * sum_head + tile.to(tl.int64) * (128 * N)
    out_at = tile_of(out_ptr, out_strides, b, group * HEADS, t, c)
    kind = out_ptr.dtype.element_ty
    for _ in range(HEADS):
        first = held_by_threads(sum_at, N)
        second = held_by_threads(sum_at + 64 * N, N)
        tl.store(out_at, (first * cos + second * sin).to(kind), inside)
        tl.store(out_at + N * out_strides[3], (second * cos - first * sin).to(kind), inside)
        sum_at += sum_head
        out_at += out_strides[1]


@triton.jit
def finish_rotated_kernel(
    sum_ptr, sum_head, q_ptr, q_strides, q_angle_ptr, q_angle_row, H, T, q_factor,
    k_ptr, k_strides, k_angle_ptr, k_angle_row, KEY_H, S, k_factor, programs,
    FAST: tl.constexpr, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, BLOCK_T: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`turn_sums` into the queries' gradient, by the first `programs`, and the keys' turned back in place."""
    at = tl.program_id(0)
    if at < programs:
        turn_sums(
            at, sum_ptr, sum_head, q_ptr, q_strides, q_angle_ptr, q_angle_row, H, T, q_factor, FAST, QUERY_HEADS, N
        )  # fmt: skip
    else:
        turn_pairs(
            at - programs, k_ptr, k_strides, k_ptr, k_strides, k_angle_ptr, k_angle_row, KEY_H, S, k_factor, 2 * N, N,
            True, FAST, KEY_HEADS, BLOCK_T, N, 0,
        )  # fmt: skip


class Sums(NamedTuple):
    """A gradient `[B, H, T, 2 D]`, D = 64, as flash-attn-4 adds it up: float32, without the softmax's scale.

    values is `[B, H, ...]`; a head has tiles of `rows` places, these the 64 channels of the first half by places, then
    those of the second, both as `held_by_threads` has 64 rows.
    """

    values: Tensor
    scale: float
    rows: int


def _grouped(heads: int) -> int:
    """How many heads share a program: as many, up to eight, as divide all of them."""
    return next(count for count in range(8, 0, -1) if heads % count == 0)


def _places(length: int, elements: int, columns: int) -> int:
    """How many places a program of `elements` elements has, one head's."""
    return max(1, min(power_of_two(length), elements // columns))


def _programs(x: Tensor, block_t: int, group: int) -> int:
    rows, heads, length, _ = x.shape
    return ceil_div(length, block_t) * rows * (heads // group)


def _pair(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, q_angle: Tensor, k_angle: Tensor, columns: int
) -> tuple[tuple[int], tuple[Any, ...], dict[str, int]]:
    """Grid, arguments and meta-parameters of a kernel that prepares queries and keys."""
    query, key = (
        (x, x.stride(), out, out.stride(), angle, row_step(angle), x.shape[1], x.shape[2])
        for x, out, angle in ((q, q_out, q_angle), (k, k_out, k_angle))
    )  # fmt: skip
    heads, key_heads = _grouped(q.shape[1]), _grouped(k.shape[1])
    block_t = _places(max(q.shape[2], k.shape[2]), 2048, columns)
    programs = _programs(q, block_t, heads)
    meta = {"QUERY_HEADS": heads, "KEY_HEADS": key_heads, "BLOCK_T": block_t, "num_warps": 8}
    return (programs + _programs(k, block_t, key_heads),), (*query, *key, programs), meta


def fast(x: Tensor) -> bool:
    """Whether the hardware's functions are good enough: for half precision."""
    return x.is_cuda and x.dtype != torch.float32


def row_step(angle: Tensor) -> int:
    """Elements from one row's angles to the next one's; 0 where one row serves the batch."""
    return angle.stride(0) if angle.shape[0] > 1 else 0


def expanded_like(x: Tensor, width: int) -> Tensor:
    """Uninitialised `[B, H, T, width]`, stored place by place with the heads side by side."""
    rows, heads, length, _ = x.shape
    place = heads * width
    return x.new_empty_strided((rows, heads, length, width), (length * place, width, place, 1))


def polar(
    q: Tensor, k: Tensor, q_angle: Tensor, k_angle: Tensor, phase: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    """PoPE's Cartesian forms `[B, H, T, 2 D]`, cosine half first, of q and k `[B, H, T, D]`.

    Angles are float32 `[B | 1, T, D]`, reduced; phase float32 `[H, D]` or None is subtracted from the queries'.
    """
    width = q.shape[3]
    q2, k2 = expanded_like(q, 2 * width), expanded_like(k, 2 * width)
    block_d = power_of_two(width)
    grid, arguments, meta = _pair(q, k, q2, k2, q_angle, k_angle, block_d)
    polar_kernel[grid](
        *arguments, phase, width, KIND=kind, PHASE=phase is not None, FAST=fast(q), BLOCK_D=block_d, **meta
    )
    return q2, k2


def phase_sums(x: Tensor, places: int | None = None) -> Tensor:
    """Uninitialised float32 `[B, tiles, H, D]`: what is left of the gradient of x's phases, by tiles of so many places.

    Without a number, those of `polar_backward`.
    """
    rows, heads, length, width = x.shape
    tiles = ceil_div(length, places or _backward_meta(x, True)["BLOCK_T"])
    return torch.empty(rows, tiles, heads, width, dtype=torch.float32, device=x.device)


def phase_gradient(sums: Tensor) -> Tensor:
    """The gradient of the phase, float32 `[H, D]`, once its `phase_sums` are there."""
    gradient = sums.new_empty(sums.shape[2:])
    columns = gradient.numel()
    add_up_kernel[(ceil_div(columns, 8),)](
        sums, gradient, sums.shape[0] * sums.shape[1], columns, BLOCK_N=1024, BLOCK_C=8, num_warps=8
    )
    return gradient


def _backward_meta(x: Tensor, phased: bool) -> dict[str, int]:
    # Phases are summed within a program, which few warps do best.
    elements, warps = (1024, 2) if phased else (2048, 8)
    block_d = power_of_two(x.shape[3])
    block_t = _places(x.shape[2], elements, block_d)
    return {"HEADS": _grouped(x.shape[1]), "BLOCK_T": block_t, "BLOCK_D": block_d, "num_warps": warps}


def polar_backward(
    x: Tensor,
    angle: Tensor,
    phase: Tensor | None,
    kind: str,
    grad: Tensor | Sums,
    dx: Tensor,
    sums: Tensor | None,
) -> None:
    """Write the gradient of x into dx, given that of what `polar` made of it.

    No atomics: the gradient of the phase, `[H, D]`, is left as a sum per tile in `sums`, laid out by `phase_sums`.
    """
    meta = _backward_meta(x, phase is not None)
    if isinstance(grad, Sums):
        given, strides, scale = grad.values, (*grad.values.stride()[:2], 0, 0), grad.scale
        meta |= {"HELD": grad.rows, "BLOCK_T": HELD_PLACES}
    else:
        given, strides, scale = grad, grad.stride(), 1.0
        meta |= {"HELD": 0}
    _, heads, length, width = x.shape
    polar_backward_kernel[(_programs(x, meta["BLOCK_T"], meta["HEADS"]),)](
        x, x.stride(), given, strides, scale, dx, dx.stride(), sums, (0, 0, 0) if sums is None else sums.stride()[:3],
        angle, row_step(angle), phase, heads, length, width, KIND=kind, PHASE=phase is not None, FAST=fast(x), **meta,
    )  # fmt: skip


def rotate(
    q: Tensor, k: Tensor, q_angle: Tensor, k_angle: Tensor, factor: float,
    *, back: bool = False, into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RoPE's rotation of the pairs (c, c + n) of q and k `[B, H, T, D]` by their angles, times factor.

    Angles are float32 `[B | 1, T, n]`. `back=True` turns the other way: the gradient of the rotation. into: where the
    result goes; it may be q and k themselves.
    """
    width, n = q.shape[3], q_angle.shape[2]
    into = (expanded_like(q, width), expanded_like(k, width)) if into is None else into
    block_n, rest = power_of_two(n), width - 2 * n
    grid, arguments, meta = _pair(q, k, *into, q_angle, k_angle, 2 * block_n)
    rotate_kernel[grid](
        *arguments, factor, width, n, BACK=back, FAST=fast(q), BLOCK_N=block_n,
        BLOCK_REST=power_of_two(rest) if rest else 0, **meta,
    )  # fmt: skip
    return into


def finish_rotated(
    dq_sum: Tensor, scale: float, dq: Tensor, dk: Tensor | None, q_angle: Tensor, k_angle: Tensor | None, factor: float
) -> None:  # fmt: skip
    """`rotate` back of scale times float32 sums, into dq, and of dk, if given, in place; of width 2 n, half precision.

    dq_sum `[B, H, ...]` holds a head's sums as `turn_sums` has them, in whole blocks of 64 rows.
    """
    n = q_angle.shape[2]
    keys, k_angle = (dq, q_angle) if dk is None or k_angle is None else (dk, k_angle)
    heads, key_heads = _grouped(dq.shape[1]), _grouped(keys.shape[1])
    block_t = _places(keys.shape[2], 2048, 2 * n)
    programs = _programs(dq, 64, heads)
    finish_rotated_kernel[(programs + (0 if dk is None else _programs(dk, block_t, key_heads)),)](
        dq_sum, dq_sum.stride(1), dq, dq.stride(), q_angle, row_step(q_angle), dq.shape[1], dq.shape[2], scale * factor,
        keys, keys.stride(), k_angle, row_step(k_angle), keys.shape[1], keys.shape[2], factor, programs,
        FAST=fast(dq), QUERY_HEADS=heads, KEY_HEADS=key_heads, BLOCK_T=block_t, N=n, num_warps=8,
    )  # fmt: skip
