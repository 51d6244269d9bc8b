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

from phasewise.kernels.prepare import expanded_like, tile_of
from phasewise.kernels.tiles import (
    EMPTY,
    LN2,
    LOG2E,
    UNSEEN,
    Places,
    block_width,
    ceil_div,
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
def key_tiles(
    span_ptr, row, tile, tiles, m, T, S, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys `[low, high)` a query tile visits, and `[full_low, full_high)`, which need no mask."""
    if PLACED:
        at = span_ptr + (row * tiles + tile) * 2
        low = tl.load(at) * BLOCK_N
        high = tl.load(at + 1) * BLOCK_N
        full_low = high
        full_high = high
    else:
        low, full_low, full_high, high = key_span(m, T, S, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
    return low, full_low, full_high, high


@triton.jit
def masked(
    scores, masking, i, i_segment, j, j_segment, slope, window, scale_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, SLOPED: tl.constexpr,
):  # fmt: skip
    """Scores, UNSEEN where hidden, and the factor that brings them to base 2 (left to a later multiply-add).

    All arguments broadcast, so either axis may hold the queries.
    """
    factor = scale_log2
    if SLOPED:
        scores = scores * scale_log2 - slope * tl.abs(i - j).to(tl.float32)
        factor = 1.0
    if masking:
        scores = tl.where(visible(i, i_segment, j, j_segment, window, CAUSAL, WINDOWED), scores, UNSEEN)
    return scores, factor


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, out_strides, lse_ptr, slopes_ptr, places, place_rows, span_ptr,
    H, GROUP, T, S, D, window, scale_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Output [B, H, T, D] and natural log-sum-exp [B, H, T]; the tiles with the most keys start first."""
    tiles = tl.cdiv(T, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    b = head // H
    h = head % H
    m = tile * BLOCK_M
    t = m + tl.arange(0, BLOCK_M)
    i, i_segment = load_places(places[0], places[1], b.to(tl.int64) * place_rows[0], t, T, S - T, PLACED)
    k_row = b.to(tl.int64) * place_rows[1]
    slope = tl.load(slopes_ptr + h) * LOG2E if SLOPED else 0.0
    q = load_tile(q_desc, b, h, m)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Above every hidden score, scaled or not, so that hidden keys weigh 0 from the start.
    top = tl.full([BLOCK_M], -1e20, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    row = tl.where(place_rows[0] > 0, b, 0)
    low, full_low, full_high, high = key_tiles(
        span_ptr, row, tile, tiles, m, T, S, window, CAUSAL, WINDOWED, PLACED, BLOCK_M, BLOCK_N
    )
    for n in tl.range(low, high, BLOCK_N):
        k = load_tile(k_desc, b, h // GROUP, n)
        scores = tl.dot(q, k.T, input_precision="ieee")
        j, j_segment = load_places(places[2], places[3], k_row, n + tl.arange(0, BLOCK_N), S, 0, PLACED)
        scores, factor = masked(
            scores, (n < full_low) | (n >= full_high), i[:, None], i_segment[:, None], j[None, :], j_segment[None, :],
            slope, window, scale_log2, CAUSAL, WINDOWED, SLOPED,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        p = tl.exp2(scores * factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v = load_tile(v_desc, b, h // GROUP, n)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, EMPTY, top * LN2 + tl.log(total))
    tl.store(lse_ptr + head.to(tl.int64) * T + t, lse, t < T)
    d = tl.arange(0, BLOCK_D)
    out_at = tile_of(out_ptr, out_strides, b.to(tl.int64), h, t, d)
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, (t[:, None] < T) & (d[None, :] < D))


@triton.jit
def statistics_kernel(
    out_ptr, out_strides, grad_ptr, grad_strides, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, H, T, D, PADDED,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Per row the log-sum-exp in base 2 and delta, what is subtracted from dp before it meets p.

    delta is sum_d out dout, less the gradient of the log-sum-exp. Rows that see nothing and rows from T to PADDED
    get +infinity and 0, so that their p is 0.
    """
    tiles = tl.cdiv(PADDED, BLOCK_M)
    head = tl.program_id(0) // tiles
    b = (head // H).to(tl.int64)
    h = head % H
    offsets = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (offsets[:, None] < T) & (d[None, :] < D)
    out = tl.load(tile_of(out_ptr, out_strides, b, h, offsets, d), inside, other=0.0).to(tl.float32)
    grad = tl.load(tile_of(grad_ptr, grad_strides, b, h, offsets, d), inside, other=0.0).to(tl.float32)
    at = head.to(tl.int64) * T + offsets
    delta = tl.sum(out * grad, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + at, offsets < T, other=0.0)
    lse = tl.load(lse_ptr + at, offsets < T, other=EMPTY)
    at = head.to(tl.int64) * PADDED + offsets
    tl.store(lse2_ptr + at, tl.where(lse <= EMPTY, float("inf"), lse * LOG2E), offsets < PADDED)
    tl.store(delta_ptr + at, delta, offsets < PADDED)


@triton.jit
def query_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse2_ptr, delta_ptr, dq_ptr, dq_strides, slopes_ptr, places, place_rows,
    span_ptr, H, GROUP, T, PADDED, S, E, window, scale, scale_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dq [B, H, T, E] = scale ds k, ds = p (dout v^T - delta)."""
    tiles = tl.cdiv(T, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    b = head // H
    h = head % H
    m = tile * BLOCK_M
    t = m + tl.arange(0, BLOCK_M)
    i, i_segment = load_places(places[0], places[1], b.to(tl.int64) * place_rows[0], t, T, S - T, PLACED)
    k_row = b.to(tl.int64) * place_rows[1]
    slope = tl.load(slopes_ptr + h) * LOG2E if SLOPED else 0.0
    q = load_tile(q_desc, b, h, m)
    dout = load_tile(dout_desc, b, h, m)
    at = head.to(tl.int64) * PADDED + t
    lse = tl.load(lse2_ptr + at)
    delta = tl.load(delta_ptr + at)
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    row = tl.where(place_rows[0] > 0, b, 0)
    low, full_low, full_high, high = key_tiles(
        span_ptr, row, tile, tiles, m, T, S, window, CAUSAL, WINDOWED, PLACED, BLOCK_M, BLOCK_N
    )
    for n in tl.range(low, high, BLOCK_N):
        k = load_tile(k_desc, b, h // GROUP, n)
        v = load_tile(v_desc, b, h // GROUP, n)
        scores = tl.dot(q, k.T, input_precision="ieee")
        dp = tl.dot(dout, v.T, input_precision="ieee")
        j, j_segment = load_places(places[2], places[3], k_row, n + tl.arange(0, BLOCK_N), S, 0, PLACED)
        scores, factor = masked(
            scores, (n < full_low) | (n >= full_high), i[:, None], i_segment[:, None], j[None, :], j_segment[None, :],
            slope, window, scale_log2, CAUSAL, WINDOWED, SLOPED,
        )  # fmt: skip
        p = tl.exp2(scores * factor - lse[:, None])
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    e = tl.arange(0, BLOCK_E)
    dq_at = tile_of(dq_ptr, dq_strides, b.to(tl.int64), h, t, e)
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), (t[:, None] < T) & (e[None, :] < E))


@triton.jit
def key_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse2_ptr, delta_ptr, dk_ptr, dk_strides, dv_ptr, dv_strides, slopes_ptr,
    places, place_rows, span_ptr, KEY_HEADS, GROUP, T, PADDED, S, E, D, window, scale, scale_log2,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, PLACED: tl.constexpr, SLOPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk [B, H / GROUP, S, E] = scale ds^T q and dv [B, H / GROUP, S, D] = p^T dout, summed over the group."""
    tiles = tl.cdiv(S, BLOCK_N)
    tile = tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles // KEY_HEADS
    key = tl.program_id(0) // tiles % KEY_HEADS
    n = tile * BLOCK_N
    s = n + tl.arange(0, BLOCK_N)
    q_row = b.to(tl.int64) * place_rows[0]
    j, j_segment = load_places(places[2], places[3], b.to(tl.int64) * place_rows[1], s, S, 0, PLACED)
    k = load_tile(k_desc, b, key, n)
    v = load_tile(v_desc, b, key, n)
    dk = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if PLACED:
        at_span = span_ptr + (tl.where(place_rows[0] > 0, b, 0) * tiles + tile) * 2
        low = tl.load(at_span) * BLOCK_M
        high = tl.load(at_span + 1) * BLOCK_M
        full_low = high
        full_high = high
    else:
        low, full_low, full_high, high = query_span(n, T, S, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
    for member in range(GROUP):
        h = key * GROUP + member
        row = (b.to(tl.int64) * KEY_HEADS * GROUP + h) * PADDED
        slope = tl.load(slopes_ptr + h) * LOG2E if SLOPED else 0.0
        for m in tl.range(low, high, BLOCK_M):
            q = load_tile(q_desc, b, h, m)
            dout = load_tile(dout_desc, b, h, m)
            t = m + tl.arange(0, BLOCK_M)
            lse = tl.load(lse2_ptr + row + t)
            delta = tl.load(delta_ptr + row + t)
            scores = tl.dot(k, q.T, input_precision="ieee")
            i, i_segment = load_places(places[0], places[1], q_row, t, T, S - T, PLACED)
            scores, factor = masked(
                scores, (m < full_low) | (m >= full_high), i[None, :], i_segment[None, :], j[:, None],
                j_segment[:, None], slope, window, scale_log2, CAUSAL, WINDOWED, SLOPED,
            )  # fmt: skip
            p = tl.exp2(scores * factor - lse[None, :])
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            dp = tl.dot(v, dout.T, input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    e = tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    dk_at = tile_of(dk_ptr, dk_strides, b.to(tl.int64), key, s, e)
    dv_at = tile_of(dv_ptr, dv_strides, b.to(tl.int64), key, s, d)
    tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), (s[:, None] < S) & (e[None, :] < E))
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), (s[:, None] < S) & (d[None, :] < D))


def _shared(
    q: Tensor,
    k: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    places: Places | None,
    slopes: Tensor | None,
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
    forward_kernel[(ceil_div(queries, block_m) * rows * heads,)](
        q_desc=describe(q, block_m, block_width(width)), k_desc=describe(k, block_n, block_width(width)),
        v_desc=describe(v, block_n, block_d), out_ptr=out, out_strides=out.stride(), lse_ptr=lse, span_ptr=spans,
        H=heads, D=v.shape[3], BLOCK_D=block_d, **arguments, **constants, **meta,
    )  # fmt: skip
    return out, lse


def row_statistics(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """float32 `[B, H, T]`, T up to the next multiple of 128: the log-sum-exp in base 2 and delta, for backward passes.

    128 rows are the most that a tile of these has.
    """
    rows, heads, queries, width = out.shape
    padded = ceil_div(queries, 128) * 128
    lse2, delta = (out.new_empty(rows, heads, padded, dtype=torch.float32) for _ in range(2))
    block_d = block_width(width)
    block_m = max(1, 4096 // block_d)
    statistics_kernel[(ceil_div(padded, block_m) * rows * heads,)](
        out, out.stride(), dout, dout.stride(), lse, None if dlse is None else dlse.contiguous(), lse2, delta,
        heads, queries, width, padded, BLOCK_M=block_m, BLOCK_D=block_d,
    )  # fmt: skip
    return lse2, delta


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    into: tuple[Tensor, Tensor, Tensor],
    *, scale: float, causal: bool, window: int | None, places: Places | None, slopes: Tensor | None,
) -> None:  # fmt: skip
    """Gradients of q, k and v, into given tensors, from those of the output and perhaps of the log-sum-exp."""
    rows, heads, queries, width = q.shape
    key_heads, keys, value_width = v.shape[1:]
    block_e, block_d = block_width(width), block_width(value_width)
    lse2, delta = row_statistics(out, dout, lse, dlse)
    arguments, constants = _shared(q, k, scale, causal, window, places, slopes)
    arguments |= {"lse2_ptr": lse2, "delta_ptr": delta, "PADDED": delta.shape[2], "scale": scale, "E": width}

    def descriptors(block_m: int, block_n: int) -> dict:
        return {
            "q_desc": describe(q, block_m, block_e),
            "k_desc": describe(k, block_n, block_e),
            "v_desc": describe(v, block_n, block_d),
            "dout_desc": describe(dout, block_m, block_d),
        }

    dq, dk, dv = into
    meta = launch("separable.query_grad", q, qk=width, v=value_width, length=keys)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    spans = None if places is None else places.key_spans(block_m, block_n, causal=causal, window=window)
    query_grad_kernel[(ceil_div(queries, block_m) * rows * heads,)](
        **descriptors(block_m, block_n), dq_ptr=dq, dq_strides=dq.stride(), span_ptr=spans, H=heads,
        BLOCK_E=block_e, **arguments, **constants, **meta,
    )  # fmt: skip
    meta = launch("separable.key_grad", q, qk=width, v=value_width, length=queries)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    spans = None if places is None else places.query_spans(block_m, block_n, causal=causal, window=window)
    key_grad_kernel[(ceil_div(keys, block_n) * rows * key_heads,)](
        **descriptors(block_m, block_n), dk_ptr=dk, dk_strides=dk.stride(), dv_ptr=dv, dv_strides=dv.stride(),
        span_ptr=spans, KEY_HEADS=key_heads, D=value_width, BLOCK_E=block_e, BLOCK_D=block_d,
        **arguments, **constants, **meta,
    )  # fmt: skip
