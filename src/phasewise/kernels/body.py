"""softmax(scale q k^T) v for any widths of q and v, forward and backward.

Letters: B rows, H query heads, T queries, S keys, E the width of q and k, D the width of v; GROUP query heads share a
key head. Tiles: BLOCK_M queries by BLOCK_N keys. Scores live in base 2 inside (scale_log2 = scale log2 e). The
backward takes two passes, one per query tile and one per key tile, so nothing is added atomically and a repeat gives
the same bits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasewise.kernels.prepare import expanded_like
from phasewise.kernels.tiles import (
    EMPTY,
    LN2,
    LOG2E,
    UNSEEN,
    Places,
    block_width,
    describe,
    key_span,
    launch,
    load_places,
    query_span,
    visible,
)


@triton.jit
def load_tile(descriptor, b, h, first):
    """Rows `[first, first + rows)` of one head as a matrix, zero outside."""
    block: tl.constexpr = descriptor.block_shape
    return descriptor.load([b, h, first, 0]).reshape(block[2], block[3])


@triton.jit
def forward_tiles(
    acc, top, total, q, k_desc, v_desc, b, h, low, high, i, i_segment, places, k_row, slope, S, window, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys `[low, high)`: acc [M, D], running maximum and sum [M]."""
    for n in tl.range(low, high, BLOCK_N):
        k = load_tile(k_desc, b, h, n)
        scores = tl.dot(q, k.T, input_precision="ieee")
        if MASKED or SLOPED:
            scores *= scale_log2
            j, j_segment = load_places(places[2], places[3], k_row, n + tl.arange(0, BLOCK_N), S, 0, PLACED)
            if SLOPED:
                scores -= slope * tl.abs(i[:, None] - j[None, :]).to(tl.float32)
            if MASKED:
                seen = visible(i[:, None], i_segment[:, None], j[None, :], j_segment[None, :], window, CAUSAL, WINDOWED)
                scores = tl.where(seen, scores, UNSEEN)
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
            p = tl.exp2(scores * scale_log2 - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc *= shrink[:, None]
        v = load_tile(v_desc, b, h, n)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, out_strides, lse_ptr, slopes_ptr, places, place_rows, span_ptr,
    H, GROUP, T, S, D, window, scale_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Output [B, H, T, D] and natural log-sum-exp [B, H, T]; the tiles with the most keys start first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    m = tile * BLOCK_M
    offsets = m + tl.arange(0, BLOCK_M)
    q_row = b.to(tl.int64) * place_rows[0]
    k_row = b.to(tl.int64) * place_rows[1]
    i, i_segment = load_places(places[0], places[1], q_row, offsets, T, S - T, PLACED)
    slope = tl.load(slopes_ptr + h) * LOG2E if SLOPED else 0.0
    q = load_tile(q_desc, b, h, m)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], UNSEEN / 10, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    key = h // GROUP
    if PLACED:
        at_span = span_ptr + (tl.where(place_rows[0] > 0, b, 0) * tl.num_programs(0) + tile) * 2
        low = tl.load(at_span) * BLOCK_N
        high = tl.load(at_span + 1) * BLOCK_N
        acc, top, total = forward_tiles(
            acc, top, total, q, k_desc, v_desc, b, key, low, high, i, i_segment, places, k_row, slope, S, window,
            scale_log2, True, CAUSAL, WINDOWED, True, SLOPED, BLOCK_N,
        )  # fmt: skip
    else:
        low, full_low, full_high, high = key_span(m, T, S, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
        if WINDOWED:
            acc, top, total = forward_tiles(
                acc, top, total, q, k_desc, v_desc, b, key, low, full_low, i, i_segment, places, k_row, slope, S,
                window, scale_log2, True, CAUSAL, True, False, SLOPED, BLOCK_N,
            )  # fmt: skip
        acc, top, total = forward_tiles(
            acc, top, total, q, k_desc, v_desc, b, key, full_low, full_high, i, i_segment, places, k_row, slope, S,
            window, scale_log2, False, CAUSAL, WINDOWED, False, SLOPED, BLOCK_N,
        )  # fmt: skip
        acc, top, total = forward_tiles(
            acc, top, total, q, k_desc, v_desc, b, key, full_high, high, i, i_segment, places, k_row, slope, S,
            window, scale_log2, True, CAUSAL, WINDOWED, False, SLOPED, BLOCK_N,
        )  # fmt: skip
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, EMPTY, top * LN2 + tl.log(total))
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * T + offsets, lse, offsets < T)
    d = tl.arange(0, BLOCK_D)
    out_row = out_ptr + b.to(tl.int64) * out_strides[0] + h.to(tl.int64) * out_strides[1]
    out_at = out_row + offsets[:, None].to(tl.int64) * out_strides[2] + d[None, :] * out_strides[3]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, (offsets[:, None] < T) & (d[None, :] < D))


@triton.jit
def delta_kernel(
    out_ptr, out_strides, grad_ptr, grad_strides, dlse_ptr, delta_ptr, H, T, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """sum_d out dout, less the gradient of the log-sum-exp: what is subtracted from dp before it meets p."""
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = offsets[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows < T) & (d < D)
    out_at = out_ptr + b * out_strides[0] + h * out_strides[1] + rows * out_strides[2] + d * out_strides[3]
    grad_at = grad_ptr + b * grad_strides[0] + h * grad_strides[1] + rows * grad_strides[2] + d * grad_strides[3]
    out = tl.load(out_at, inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_at, inside, other=0.0).to(tl.float32)
    at = tl.program_id(1).to(tl.int64) * T + offsets
    delta = tl.sum(out * grad, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, offsets < T, other=0.0)
    tl.store(delta_ptr + at, delta, offsets < T)


@triton.jit
def load_row_statistics(lse_ptr, delta_ptr, row, offsets, T):
    """Base-2 log-sum-exp, +infinity for rows that see nothing and rows past T (their p is 0), and delta."""
    inside = offsets < T
    lse = tl.load(lse_ptr + row + offsets, inside, other=EMPTY)
    return tl.where(lse <= EMPTY, float("inf"), lse * LOG2E), tl.load(delta_ptr + row + offsets, inside, other=0.0)


@triton.jit
def probability(
    scores, lse, i, i_segment, j, j_segment, slope, window, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """p from raw scores; all arguments broadcast, so either axis may hold the queries."""
    if SLOPED:
        scores = scores * scale_log2 - slope * tl.abs(i - j).to(tl.float32)
    else:
        scores *= scale_log2
    if MASKED:
        scores = tl.where(visible(i, i_segment, j, j_segment, window, CAUSAL, WINDOWED), scores, UNSEEN)
    return tl.exp2(scores - lse)


@triton.jit
def query_grad_tiles(
    dq, q, dout, lse, delta, k_desc, v_desc, b, h, low, high, i, i_segment, places, k_row, slope, S, window, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq [M, E], unscaled, over the keys `[low, high)`."""
    for n in tl.range(low, high, BLOCK_N):
        k = load_tile(k_desc, b, h, n)
        v = load_tile(v_desc, b, h, n)
        scores = tl.dot(q, k.T, input_precision="ieee")
        dp = tl.dot(dout, v.T, input_precision="ieee")
        j, j_segment = load_places(places[2], places[3], k_row, n + tl.arange(0, BLOCK_N), S, 0, PLACED)
        p = probability(
            scores, lse[:, None], i[:, None], i_segment[:, None], j[None, :], j_segment[None, :], slope, window,
            scale_log2, MASKED, CAUSAL, WINDOWED, SLOPED,
        )  # fmt: skip
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def query_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, dq_ptr, dq_strides, slopes_ptr, places, place_rows,
    span_ptr, H, GROUP, T, S, E, window, scale, scale_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dq [B, H, T, E] = scale ds k, ds = p (dout v^T - delta)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = tl.program_id(1) // H
    h = tl.program_id(1) % H
    m = tile * BLOCK_M
    offsets = m + tl.arange(0, BLOCK_M)
    q_row = b.to(tl.int64) * place_rows[0]
    k_row = b.to(tl.int64) * place_rows[1]
    i, i_segment = load_places(places[0], places[1], q_row, offsets, T, S - T, PLACED)
    slope = tl.load(slopes_ptr + h) * LOG2E if SLOPED else 0.0
    q = load_tile(q_desc, b, h, m)
    dout = load_tile(dout_desc, b, h, m)
    lse, delta = load_row_statistics(lse_ptr, delta_ptr, tl.program_id(1).to(tl.int64) * T, offsets, T)
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    key = h // GROUP
    if PLACED:
        at_span = span_ptr + (tl.where(place_rows[0] > 0, b, 0) * tl.num_programs(0) + tile) * 2
        low = tl.load(at_span) * BLOCK_N
        high = tl.load(at_span + 1) * BLOCK_N
        dq = query_grad_tiles(
            dq, q, dout, lse, delta, k_desc, v_desc, b, key, low, high, i, i_segment, places, k_row, slope, S, window,
            scale_log2, True, CAUSAL, WINDOWED, True, SLOPED, BLOCK_N,
        )  # fmt: skip
    else:
        low, full_low, full_high, high = key_span(m, T, S, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
        if WINDOWED:
            dq = query_grad_tiles(
                dq, q, dout, lse, delta, k_desc, v_desc, b, key, low, full_low, i, i_segment, places, k_row, slope,
                S, window, scale_log2, True, CAUSAL, True, False, SLOPED, BLOCK_N,
            )  # fmt: skip
        dq = query_grad_tiles(
            dq, q, dout, lse, delta, k_desc, v_desc, b, key, full_low, full_high, i, i_segment, places, k_row, slope,
            S, window, scale_log2, False, CAUSAL, WINDOWED, False, SLOPED, BLOCK_N,
        )  # fmt: skip
        dq = query_grad_tiles(
            dq, q, dout, lse, delta, k_desc, v_desc, b, key, full_high, high, i, i_segment, places, k_row, slope, S,
            window, scale_log2, True, CAUSAL, WINDOWED, False, SLOPED, BLOCK_N,
        )  # fmt: skip
    e = tl.arange(0, BLOCK_E)
    dq_row = dq_ptr + b.to(tl.int64) * dq_strides[0] + h.to(tl.int64) * dq_strides[1]
    dq_at = dq_row + offsets[:, None].to(tl.int64) * dq_strides[2] + e[None, :] * dq_strides[3]
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), (offsets[:, None] < T) & (e[None, :] < E))


@triton.jit
def key_grad_tiles(
    dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, row, b, h, low, high, j, j_segment, places, q_row, slope, T, S,
    window, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk [N, E], unscaled, and dv [N, D] over the queries `[low, high)` of one head; p and ds are transposed."""
    for m in tl.range(low, high, BLOCK_M):
        q = load_tile(q_desc, b, h, m)
        dout = load_tile(dout_desc, b, h, m)
        offsets = m + tl.arange(0, BLOCK_M)
        lse, delta = load_row_statistics(lse_ptr, delta_ptr, row, offsets, T)
        scores = tl.dot(k, q.T, input_precision="ieee")
        i, i_segment = load_places(places[0], places[1], q_row, offsets, T, S - T, PLACED)
        p = probability(
            scores, lse[None, :], i[None, :], i_segment[None, :], j[:, None], j_segment[:, None], slope, window,
            scale_log2, MASKED, CAUSAL, WINDOWED, SLOPED,
        )  # fmt: skip
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        dp = tl.dot(v, dout.T, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def key_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, dk_ptr, dk_strides, dv_ptr, dv_strides, slopes_ptr,
    places, place_rows, span_ptr, KEY_HEADS, GROUP, T, S, E, D, window, scale, scale_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk [B, H / GROUP, S, E] = scale ds^T q and dv [B, H / GROUP, S, D] = p^T dout, summed over the group."""
    tile = tl.program_id(0)
    b = tl.program_id(1) // KEY_HEADS
    key = tl.program_id(1) % KEY_HEADS
    n = tile * BLOCK_N
    offsets = n + tl.arange(0, BLOCK_N)
    q_row = b.to(tl.int64) * place_rows[0]
    k_row = b.to(tl.int64) * place_rows[1]
    j, j_segment = load_places(places[2], places[3], k_row, offsets, S, 0, PLACED)
    k = load_tile(k_desc, b, key, n)
    v = load_tile(v_desc, b, key, n)
    dk = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(GROUP):
        h = key * GROUP + member
        row = (b.to(tl.int64) * KEY_HEADS * GROUP + h) * T
        slope = tl.load(slopes_ptr + h) * LOG2E if SLOPED else 0.0
        if PLACED:
            at_span = span_ptr + (tl.where(place_rows[0] > 0, b, 0) * tl.num_programs(0) + tile) * 2
            low = tl.load(at_span) * BLOCK_M
            high = tl.load(at_span + 1) * BLOCK_M
            dk, dv = key_grad_tiles(
                dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, row, b, h, low, high, j, j_segment, places, q_row,
                slope, T, S, window, scale_log2, True, CAUSAL, WINDOWED, True, SLOPED, BLOCK_M,
            )  # fmt: skip
        else:
            low, full_low, full_high, high = query_span(n, T, S, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
            dk, dv = key_grad_tiles(
                dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, row, b, h, low, full_low, j, j_segment, places,
                q_row, slope, T, S, window, scale_log2, True, CAUSAL, WINDOWED, False, SLOPED, BLOCK_M,
            )  # fmt: skip
            dk, dv = key_grad_tiles(
                dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, row, b, h, full_low, full_high, j, j_segment,
                places, q_row, slope, T, S, window, scale_log2, False, CAUSAL, WINDOWED, False, SLOPED, BLOCK_M,
            )  # fmt: skip
            dk, dv = key_grad_tiles(
                dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, row, b, h, full_high, high, j, j_segment, places,
                q_row, slope, T, S, window, scale_log2, True, CAUSAL, WINDOWED, False, SLOPED, BLOCK_M,
            )  # fmt: skip
    inside = offsets[:, None] < S
    rows = offsets[:, None].to(tl.int64)
    e = tl.arange(0, BLOCK_E)[None, :]
    d = tl.arange(0, BLOCK_D)[None, :]
    dk_row = dk_ptr + b.to(tl.int64) * dk_strides[0] + key.to(tl.int64) * dk_strides[1]
    dv_row = dv_ptr + b.to(tl.int64) * dv_strides[0] + key.to(tl.int64) * dv_strides[1]
    dk_at = dk_row + rows * dk_strides[2] + e * dk_strides[3]
    dv_at = dv_row + rows * dv_strides[2] + d * dv_strides[3]
    tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), inside & (e < E))
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), inside & (d < D))


def _shared(
    q: Tensor, k: Tensor, scale: float, causal: bool, window: int | None, places: Places | None, slopes: Tensor | None
) -> tuple[dict, dict]:
    """Arguments and compile-time constants that every kernel of one attention call has in common."""
    arguments = {
        "slopes_ptr": slopes,
        "places": (None,) * 4
        if places is None
        else (places.q_index, places.q_segment, places.k_index, places.k_segment),
        "place_rows": (0, 0) if places is None else places.row_strides,
        "GROUP": q.shape[1] // k.shape[1],
        "T": q.shape[2],
        "S": k.shape[2],
        "window": 0 if window is None else window,
        "scale_log2": scale * math.log2(math.e),
    }
    constants = {
        "CAUSAL": causal,
        "WINDOWED": window is not None,
        "PLACED": places is not None,
        "SLOPED": slopes is not None,
    }
    return arguments, constants


def forward(
    q: Tensor, k: Tensor, v: Tensor,
    *, scale: float, causal: bool, window: int | None, places: Places | None, slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]`, stored place by place, and float32 log-sum-exp `[B, H, T]`.

    q is `[B, H, T, E]`, k `[B, H / group, S, E]`, v `[B, H / group, S, D]`, any strides; slopes float32 `[H]` subtract
    slope |i - j| from the scores.
    """
    rows, heads, queries, width = q.shape
    out = expanded_like(q, v.shape[3])
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    meta = launch("separable.forward", q, qk=width, v=v.shape[3], length=k.shape[2])
    block_m, block_n, block_d = meta["BLOCK_M"], meta["BLOCK_N"], block_width(v.shape[3])
    arguments, constants = _shared(q, k, scale, causal, window, places, slopes)
    spans = None if places is None else places.key_spans(block_m, block_n, causal=causal, window=window)
    forward_kernel[(triton.cdiv(queries, block_m), rows * heads)](
        q_desc=describe(q, block_m, block_width(width)), k_desc=describe(k, block_n, block_width(width)),
        v_desc=describe(v, block_n, block_d), out_ptr=out, out_strides=out.stride(), lse_ptr=lse, span_ptr=spans,
        H=heads, D=v.shape[3], BLOCK_D=block_d, **arguments, **constants, **meta,
    )  # fmt: skip
    return out, lse


def row_deltas(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """float32 `[B, H, T]`: sum_d out dout, less the gradient of the log-sum-exp."""
    rows, heads, queries, width = out.shape
    delta = torch.empty(rows, heads, queries, dtype=torch.float32, device=out.device)
    block_d = block_width(width)
    block_m = max(1, 4096 // block_d)
    delta_kernel[(triton.cdiv(queries, block_m), rows * heads)](
        out, out.stride(), dout, dout.stride(), None if dlse is None else dlse.contiguous(), delta,
        heads, queries, width, BLOCK_M=block_m, BLOCK_D=block_d,
    )  # fmt: skip
    return delta


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    *, scale: float, causal: bool, window: int | None, places: Places | None, slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v from those of the output and (optionally) of the log-sum-exp."""
    rows, heads, queries, width = q.shape
    key_heads, keys, value_width = v.shape[1:]
    block_e, block_d = block_width(width), block_width(value_width)
    delta = row_deltas(out, dout, dlse)
    arguments, constants = _shared(q, k, scale, causal, window, places, slopes)
    arguments |= {"lse_ptr": lse, "delta_ptr": delta, "scale": scale, "E": width}

    def descriptors(block_m: int, block_n: int) -> dict:
        return {
            "q_desc": describe(q, block_m, block_e),
            "k_desc": describe(k, block_n, block_e),
            "v_desc": describe(v, block_n, block_d),
            "dout_desc": describe(dout, block_m, block_d),
        }

    dq, dk, dv = expanded_like(q, width), expanded_like(k, width), expanded_like(v, value_width)
    meta = launch("separable.query_grad", q, qk=width, v=value_width, length=keys)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    spans = None if places is None else places.key_spans(block_m, block_n, causal=causal, window=window)
    query_grad_kernel[(triton.cdiv(queries, block_m), rows * heads)](
        **descriptors(block_m, block_n), dq_ptr=dq, dq_strides=dq.stride(), span_ptr=spans, H=heads,
        BLOCK_E=block_e, **arguments, **constants, **meta,
    )  # fmt: skip
    meta = launch("separable.key_grad", q, qk=width, v=value_width, length=queries)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    spans = None if places is None else places.query_spans(block_m, block_n, causal=causal, window=window)
    key_grad_kernel[(triton.cdiv(keys, block_n), rows * key_heads)](
        **descriptors(block_m, block_n), dk_ptr=dk, dk_strides=dk.stride(), dv_ptr=dv, dv_strides=dv.stride(),
        span_ptr=spans, KEY_HEADS=key_heads, D=value_width, BLOCK_E=block_e, BLOCK_D=block_d,
        **arguments, **constants, **meta,
    )  # fmt: skip
    return dq, dk, dv
