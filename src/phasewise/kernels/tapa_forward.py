"""TAPA attention, forward. Letters and conventions of tapa_score.py."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasewise.kernels.body import load_tile
from phasewise.kernels.prepare import expanded_like
from phasewise.kernels.tapa_score import (
    EITHER,
    FAR,
    NEAR,
    Score,
    cosine,
    far_below,
    phase_product,
    place_arguments,
    place_keys,
    series_reach,
    span_at,
    store_tile,
)
from phasewise.kernels.tiles import (
    EMPTY,
    LN2,
    UNSEEN,
    Places,
    block_width,
    describe,
    key_span,
    launch,
    load_places,
)


@triton.jit
def forward_tiles(
    mixed, top, total, amplitude_q, phase_q, k_a, k_p, v, batch, group, low, high, full_low, full_high, first_i,
    i, i_segment, k_index_ptr, k_segment_ptr, k_row, S, window, scale_log2, alpha, unit, reach,
    REACH: tl.constexpr, PLACED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LINEAR: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys `[low, high)`: mixed [M, V], running maximum (unscaled) and sum [M]."""
    offsets_n = tl.arange(0, BLOCK_N)
    for first_n in tl.range(low, high, BLOCK_N):
        amplitude_k = load_tile(k_a, batch, group, first_n)
        phase_k = load_tile(k_p, batch, group, first_n)
        amplitude = tl.dot(amplitude_q, amplitude_k.T, input_precision=PRECISION)
        phase = phase_product(phase_q, phase_k, LINEAR, PRECISION)
        j, j_segment = load_places(k_index_ptr, k_segment_ptr, k_row, first_n + offsets_n, S, 0, PLACED)
        amplitude, phase, strength, _, _ = place_keys(
            amplitude, phase, first_n, full_low, full_high, first_i, i, i_segment, j, j_segment, window, alpha, unit,
            reach, REACH, PLACED, CAUSAL, WINDOWED, FAST, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        scores = amplitude * cosine(phase * strength, FAST)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores * scale_log2 - (higher * scale_log2)[:, None])
        fade = tl.exp2((top - higher) * scale_log2)
        total = total * fade + tl.sum(weights, 1)
        values = load_tile(v, batch, group, first_n)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * fade[:, None], input_precision=PRECISION)
        top = higher
    return mixed, top, total


@triton.jit
def forward_kernel(
    out_ptr, lse_ptr, q_a, q_p, k_a, k_p, v, alpha_ptr,
    q_index_ptr, q_segment_ptr, k_index_ptr, k_segment_ptr, span_ptr, q_row_stride, k_row_stride,
    stride_out_b, stride_out_h, stride_out_t, stride_out_d, H, T, S, window, scale_log2, unit, V,
    GROUP: tl.constexpr, PLACED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LINEAR: tl.constexpr,
    SERIES: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Output [B, H, T, V] and natural log-sum-exp [B, H, T]; the tiles that see most start first."""
    tiles = tl.cdiv(T, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // H
    head = tl.program_id(0) // tiles % H
    first_m = tile * BLOCK_M
    offsets_m = first_m + tl.arange(0, BLOCK_M)
    first_i = first_m + S - T
    q_row = batch.to(tl.int64) * q_row_stride
    k_row = batch.to(tl.int64) * k_row_stride
    i, i_segment = load_places(q_index_ptr, q_segment_ptr, q_row, offsets_m, T, S - T, PLACED)
    alpha = tl.load(alpha_ptr)
    reach = series_reach(alpha)

    amplitude_q = load_tile(q_a, batch, head, first_m)
    phase_q = load_tile(q_p, batch, head, first_m)
    top = tl.full([BLOCK_M], 0.1 * UNSEEN, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    if PLACED:
        span_ptr += span_at(batch, tile, tiles, q_row_stride)
        low = tl.load(span_ptr) * BLOCK_N
        high = tl.load(span_ptr + 1) * BLOCK_N
        full_low = 0
        full_high = 0
    else:
        low, full_low, full_high, high = key_span(first_m, T, S, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)
        if SERIES and CAUSAL and not WINDOWED:
            full_high = tl.minimum(full_high, far_below(first_i, reach, BLOCK_N))
            mixed, top, total = forward_tiles(
                mixed, top, total, amplitude_q, phase_q, k_a, k_p, v, batch, head // GROUP, low, full_high, full_low,
                full_high, first_i, i, i_segment, k_index_ptr, k_segment_ptr, k_row, S, window, scale_log2, alpha,
                unit, reach, FAR, PLACED, CAUSAL, WINDOWED, LINEAR, FAST, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            low = full_high
    rest: tl.constexpr = EITHER if SERIES and (PLACED or WINDOWED or not CAUSAL) else NEAR
    mixed, top, total = forward_tiles(
        mixed, top, total, amplitude_q, phase_q, k_a, k_p, v, batch, head // GROUP, low, high, full_low, full_high,
        first_i, i, i_segment, k_index_ptr, k_segment_ptr, k_row, S, window, scale_log2, alpha, unit, reach,
        rest, PLACED, CAUSAL, WINDOWED, LINEAR, FAST, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    mixed /= total[:, None]
    lse = tl.where(empty, EMPTY, top * scale_log2 * LN2 + tl.log(total))
    row = (batch.to(tl.int64) * H + head) * T
    tl.store(lse_ptr + row + offsets_m, lse, offsets_m < T)
    out_ptr += batch.to(tl.int64) * stride_out_b + head.to(tl.int64) * stride_out_h
    store_tile(out_ptr, 0, offsets_m, T, stride_out_t, stride_out_d, mixed, V, BLOCK_V)


def forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, places: Places | None, score: Score
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, V]`, stored place by place, and float32 log-sum-exp `[B, H, T]`."""
    batch, heads, queries, width = q.shape
    keys, v_width = v.shape[2:]
    out = expanded_like(q, v_width)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    meta = launch("tapa.forward", q, qk=width, v=v_width, length=keys)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    spans = places and places.key_spans(block_m, block_n, causal=score.causal, window=score.window)
    forward_kernel[(triton.cdiv(queries, block_m) * batch * heads,)](
        out, lse, *score.parts(q, block_m), *score.parts(k, block_n), describe(v, block_n, block_width(v_width)),
        alpha, *place_arguments(places, spans), *out.stride(),
        heads, queries, keys, score.window or 0, score.scale * math.log2(math.e), score.phase_unit(q), v_width,
        BLOCK_V=block_width(v_width), **score.meta(q, k, places), **meta,
    )  # fmt: skip
    return out, lse
