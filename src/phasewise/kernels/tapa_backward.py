"""TAPA attention, backward: one pass for the queries and one for the keys and values, so that nothing is added twice.

Where tapa_joint.py serves, it takes the place of both. Letters and conventions of tapa_score.py. With
x = 2 pi phase strength and S = scale amplitude cos x: dS/dq_A = scale cos(x) k_A,
dS/dq_P = -scale amplitude sin(x) 2 pi strength k_P (for the linear phase 1 instead of k_P) and
dS/dalpha = -scale amplitude sin(x) x ln|i - j|. In the kernels `level` is the gradient by amplitude / scale and
`twist` the one by phase / (-scale), per turn where phases are counted in turns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasewise.kernels.body import load_tile, row_statistics
from phasewise.kernels.prepare import expanded_like
from phasewise.kernels.tapa_score import (
    EITHER,
    FAR,
    NEAR,
    TURN,
    Score,
    cosine,
    distance,
    far_above,
    far_below,
    gap_to,
    phase_product,
    place,
    place_arguments,
    place_keys,
    series_reach,
    sine,
    span_at,
    store_tile,
    tile_is_far,
)
from phasewise.kernels.tiles import (
    LOG2E,
    Places,
    block_width,
    describe,
    key_span,
    launch,
    load_places,
    query_span,
)


@triton.jit
def score_gradient(amplitude, phase, strength, lse, upstream, delta, scale_log2, FAST: tl.constexpr):
    """Softmax weights, level and twist."""
    angle = phase * strength
    wave = cosine(angle, FAST)
    weights = tl.exp2(amplitude * wave * scale_log2 - lse)
    slope = weights * (upstream - delta)
    return weights, slope * wave, (slope * amplitude) * (sine(angle, FAST) * strength)


@triton.jit
def query_grad_tiles(
    grad_amplitude, grad_phase, grad_alpha, amplitude_q, phase_q, above, lse, delta, k_a, k_p, v, batch, group,
    low, high, full_low, full_high, first_i, i, i_segment, k_index_ptr, k_segment_ptr, k_row, S, window, scale_log2,
    alpha, unit, reach,
    REACH: tl.constexpr, ALPHA: tl.constexpr, PLACED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    LINEAR: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Unscaled gradients by q_A [M, A], by q_P [M, P] ([M] when LINEAR, whose channels are alike) and by alpha [M]."""
    offsets_n = tl.arange(0, BLOCK_N)
    for first_n in tl.range(low, high, BLOCK_N):
        amplitude_k = load_tile(k_a, batch, group, first_n)
        phase_k = load_tile(k_p, batch, group, first_n)
        values = load_tile(v, batch, group, first_n)
        amplitude = tl.dot(amplitude_q, amplitude_k.T, input_precision=PRECISION)
        phase = phase_product(phase_q, phase_k, LINEAR, PRECISION)
        upstream = tl.dot(above, values.T, input_precision=PRECISION)
        j, j_segment = load_places(k_index_ptr, k_segment_ptr, k_row, first_n + offsets_n, S, 0, PLACED)
        amplitude, _, strength, rows, columns = place_keys(
            amplitude, phase, first_n, full_low, full_high, first_i, i, i_segment, j, j_segment, window, alpha, unit,
            reach, REACH, PLACED, CAUSAL, WINDOWED, FAST, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        _, level, twist = score_gradient(
            amplitude, phase, strength, lse[:, None], upstream, delta[:, None], scale_log2, FAST
        )
        grad_amplitude = tl.dot(
            level.to(amplitude_k.dtype), amplitude_k, grad_amplitude, input_precision=PRECISION
        )
        if LINEAR:
            grad_phase += tl.sum(twist, 1)
        else:
            grad_phase = tl.dot(twist.to(phase_k.dtype), phase_k, grad_phase, input_precision=PRECISION)
        if ALPHA:
            grad_alpha += tl.sum(twist * phase * tl.log(tl.maximum(distance(rows, columns), 1.0)), 1)
    return grad_amplitude, grad_phase, grad_alpha


@triton.jit
def query_grad_kernel(
    grad_q_ptr, grad_alpha_ptr, q_a, q_p, k_a, k_p, v, grad_out, lse_ptr, delta_ptr, alpha_ptr,
    q_index_ptr, q_segment_ptr, k_index_ptr, k_segment_ptr, span_ptr, q_row_stride, k_row_stride,
    stride_q_b, stride_q_h, stride_q_t, stride_q_d, H, T, padded, S, window, scale, unit, A, P,
    GROUP: tl.constexpr, PLACED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LINEAR: tl.constexpr,
    SERIES: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr, ALPHA: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of the queries [B, H, T, A + P] and, row by row, of alpha [B, H, T]."""
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
    scale_log2 = scale * LOG2E
    radians: tl.constexpr = 1.0 if FAST else TURN

    amplitude_q = load_tile(q_a, batch, head, first_m)
    phase_q = load_tile(q_p, batch, head, first_m)
    above = load_tile(grad_out, batch, head, first_m)
    row = (batch.to(tl.int64) * H + head) * T
    at = (batch.to(tl.int64) * H + head) * padded + offsets_m
    lse = tl.load(lse_ptr + at)
    delta = tl.load(delta_ptr + at)
    grad_amplitude = tl.zeros([BLOCK_M, BLOCK_A], tl.float32)
    grad_phase = tl.zeros([BLOCK_M] if LINEAR else [BLOCK_M, BLOCK_P], tl.float32)
    grad_alpha = tl.zeros([BLOCK_M], tl.float32)
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
            grad_amplitude, grad_phase, grad_alpha = query_grad_tiles(
                grad_amplitude, grad_phase, grad_alpha, amplitude_q, phase_q, above, lse, delta, k_a, k_p, v, batch,
                head // GROUP, low, full_high, full_low, full_high, first_i, i, i_segment, k_index_ptr, k_segment_ptr,
                k_row, S, window, scale_log2, alpha, unit, reach,
                FAR, ALPHA, PLACED, CAUSAL, WINDOWED, LINEAR, FAST, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            low = full_high
    rest: tl.constexpr = EITHER if SERIES and (PLACED or WINDOWED or not CAUSAL) else NEAR
    grad_amplitude, grad_phase, grad_alpha = query_grad_tiles(
        grad_amplitude, grad_phase, grad_alpha, amplitude_q, phase_q, above, lse, delta, k_a, k_p, v, batch,
        head // GROUP, low, high, full_low, full_high, first_i, i, i_segment, k_index_ptr, k_segment_ptr,
        k_row, S, window, scale_log2, alpha, unit, reach,
        rest, ALPHA, PLACED, CAUSAL, WINDOWED, LINEAR, FAST, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    if LINEAR:
        grad_phase = tl.broadcast_to(grad_phase[:, None], [BLOCK_M, BLOCK_P])
    grad_q_ptr += batch.to(tl.int64) * stride_q_b + head.to(tl.int64) * stride_q_h
    store_tile(grad_q_ptr, 0, offsets_m, T, stride_q_t, stride_q_d, grad_amplitude * scale, A, BLOCK_A)
    store_tile(
        grad_q_ptr, A, offsets_m, T, stride_q_t, stride_q_d, grad_phase * (radians * -scale), P, BLOCK_P
    )
    if ALPHA:
        tl.store(grad_alpha_ptr + row + offsets_m, grad_alpha * (radians * -scale), offsets_m < T)


@triton.jit
def key_grad_tiles(
    grad_amplitude, grad_phase, grad_values, amplitude_k, phase_k, values, q_a, q_p, grad_out, lse_ptr, delta_ptr,
    batch, head, low, high, full_low, full_high, first_n, j, j_segment, q_index_ptr, q_segment_ptr, q_row, T,
    shift, window, scale_log2, alpha, unit, reach,
    REACH: tl.constexpr, PLACED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LINEAR: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Unscaled gradients by k_A [N, A], by k_P [N, P] ([N] when LINEAR) and by v [N, V], from one query head."""
    for first_m in tl.range(low, high, BLOCK_M):
        offsets_m = tl.arange(0, BLOCK_M)
        amplitude_q = load_tile(q_a, batch, head, first_m)
        phase_q = load_tile(q_p, batch, head, first_m)
        above = load_tile(grad_out, batch, head, first_m)
        lse = tl.load(lse_ptr + first_m + offsets_m)
        delta = tl.load(delta_ptr + first_m + offsets_m)
        amplitude = tl.dot(amplitude_k, amplitude_q.T, input_precision=PRECISION)
        phase = phase_product(phase_k, phase_q, LINEAR, PRECISION)
        upstream = tl.dot(values, above.T, input_precision=PRECISION)
        i, i_segment = load_places(q_index_ptr, q_segment_ptr, q_row, first_m + offsets_m, T, shift, PLACED)
        if PLACED:
            rows = j
            columns = i
            far, middle, half = tile_is_far(
                rows, columns, j_segment, i_segment, window, reach, -1 if CAUSAL else 0, WINDOWED
            )
        else:
            rows = j - (first_m + shift)
            columns = offsets_m
            middle: tl.constexpr = BLOCK_M // 2
            half: tl.constexpr = BLOCK_M / 2
            far = (first_m >= full_low) & (first_m < full_high)
            far &= gap_to(first_n, BLOCK_N, first_m + shift + middle) >= reach * half
        amplitude, _, strength = place(
            amplitude, phase, far, rows, columns, middle, half, i[None, :], i_segment[None, :], j[:, None],
            j_segment[:, None], window, alpha, unit, REACH, FAST, CAUSAL, WINDOWED,
        )  # fmt: skip
        weights, level, twist = score_gradient(
            amplitude, phase, strength, lse[None, :], upstream, delta[None, :], scale_log2, FAST
        )
        grad_values = tl.dot(weights.to(above.dtype), above, grad_values, input_precision=PRECISION)
        grad_amplitude = tl.dot(
            level.to(amplitude_q.dtype), amplitude_q, grad_amplitude, input_precision=PRECISION
        )
        if LINEAR:
            grad_phase += tl.sum(twist, 1)
        else:
            grad_phase = tl.dot(twist.to(phase_q.dtype), phase_q, grad_phase, input_precision=PRECISION)
    return grad_amplitude, grad_phase, grad_values


@triton.jit
def key_grad_kernel(
    grad_k_ptr, grad_v_ptr, q_a, q_p, k_a, k_p, v, grad_out, lse_ptr, delta_ptr, alpha_ptr,
    q_index_ptr, q_segment_ptr, k_index_ptr, k_segment_ptr, span_ptr, q_row_stride, k_row_stride,
    stride_k_b, stride_k_h, stride_k_t, stride_k_d, stride_v_b, stride_v_h, stride_v_t, stride_v_d,
    G, T, padded, S, window, scale, unit, A, P, V,
    GROUP: tl.constexpr, PLACED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, LINEAR: tl.constexpr,
    SERIES: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys [B, G, S, A + P] and values [B, G, S, V], summed over the query heads of a group.

    The first keys are seen most under causality and start first. Tiles are transposed: their rows are keys.
    """
    tiles = tl.cdiv(S, BLOCK_N)
    tile = tl.program_id(0) % tiles
    batch = tl.program_id(0) // tiles // G
    group = tl.program_id(0) // tiles % G
    first_n = tile * BLOCK_N
    offsets_n = first_n + tl.arange(0, BLOCK_N)
    q_row = batch.to(tl.int64) * q_row_stride
    k_row = batch.to(tl.int64) * k_row_stride
    j, j_segment = load_places(k_index_ptr, k_segment_ptr, k_row, offsets_n, S, 0, PLACED)
    alpha = tl.load(alpha_ptr)
    reach = series_reach(alpha)
    scale_log2 = scale * LOG2E
    radians: tl.constexpr = 1.0 if FAST else TURN
    if PLACED:
        span_ptr += span_at(batch, tile, tiles, q_row_stride)
        low = tl.load(span_ptr) * BLOCK_M
        high = tl.load(span_ptr + 1) * BLOCK_M
        full_low = 0
        full_high = 0
    else:
        low, full_low, full_high, high = query_span(first_n, T, S, window, CAUSAL, WINDOWED, BLOCK_M, BLOCK_N)

    amplitude_k = load_tile(k_a, batch, group, first_n)
    phase_k = load_tile(k_p, batch, group, first_n)
    values = load_tile(v, batch, group, first_n)
    grad_amplitude = tl.zeros([BLOCK_N, BLOCK_A], tl.float32)
    grad_phase = tl.zeros([BLOCK_N] if LINEAR else [BLOCK_N, BLOCK_P], tl.float32)
    grad_values = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    far_low = high
    if SERIES and CAUSAL and not (WINDOWED or PLACED):
        far_low = tl.maximum(tl.minimum(far_above(first_n + BLOCK_N - 1, reach, S - T, BLOCK_M), high), low)
    rest: tl.constexpr = EITHER if SERIES and (PLACED or WINDOWED or not CAUSAL) else NEAR
    for member in range(GROUP):
        head = group * GROUP + member
        row = (batch.to(tl.int64) * G * GROUP + head) * padded
        grad_amplitude, grad_phase, grad_values = key_grad_tiles(
            grad_amplitude, grad_phase, grad_values, amplitude_k, phase_k, values, q_a, q_p, grad_out, lse_ptr + row,
            delta_ptr + row, batch, head, low, far_low, full_low, full_high, first_n, j, j_segment, q_index_ptr,
            q_segment_ptr, q_row, T, S - T, window, scale_log2, alpha, unit, reach,
            rest, PLACED, CAUSAL, WINDOWED, LINEAR, FAST, PRECISION, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if SERIES and CAUSAL and not (WINDOWED or PLACED):
            grad_amplitude, grad_phase, grad_values = key_grad_tiles(
                grad_amplitude, grad_phase, grad_values, amplitude_k, phase_k, values, q_a, q_p, grad_out,
                lse_ptr + row, delta_ptr + row, batch, head, far_low, high, full_low, full_high, first_n, j,
                j_segment, q_index_ptr, q_segment_ptr, q_row, T, S - T, window, scale_log2, alpha, unit, reach,
                FAR, PLACED, CAUSAL, WINDOWED, LINEAR, FAST, PRECISION, BLOCK_M, BLOCK_N,
            )  # fmt: skip

    if LINEAR:
        grad_phase = tl.broadcast_to(grad_phase[:, None], [BLOCK_N, BLOCK_P])
    grad_k_ptr += batch.to(tl.int64) * stride_k_b + group.to(tl.int64) * stride_k_h
    grad_v_ptr += batch.to(tl.int64) * stride_v_b + group.to(tl.int64) * stride_v_h
    store_tile(grad_k_ptr, 0, offsets_n, S, stride_k_t, stride_k_d, grad_amplitude * scale, A, BLOCK_A)
    store_tile(
        grad_k_ptr, A, offsets_n, S, stride_k_t, stride_k_d, grad_phase * (radians * -scale), P, BLOCK_P
    )
    store_tile(grad_v_ptr, 0, offsets_n, S, stride_v_t, stride_v_d, grad_values, V, BLOCK_V)


def one_pass(q: Tensor, k: Tensor, v: Tensor, places: Places | None, score: Score) -> bool:
    """Whether `tapa_joint` serves such tensors and is the faster way on their device."""
    if places is not None or score.linear or not score.causal or score.window is not None:
        return False
    (queries, width), (keys, v_width) = q.shape[2:], v.shape[2:]
    if queries > keys:
        return False
    if queries < keys and queries < launch("tapa.chunks", q, qk=width, v=v_width, length=keys)["queries"]:
        return False
    parts = (score.amplitude_dim, width - score.amplitude_dim)
    written_for = (parts, v_width) in (((32, 32), 64), ((64, 64), 128))
    row = launch("tapa.backward", q, qk=width, v=v_width, length=keys)
    return row["body"] == "joint" and written_for


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, out: Tensor,
    lse: Tensor, places: Places | None, score: Score, *, alpha_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and alpha, the last 0 unless it is asked for."""
    batch, heads, queries, width = q.shape
    groups, keys, v_width = v.shape[1:]
    grad_q, grad_k, grad_v = (expanded_like(x, x.shape[3]) for x in (q, k, v))
    widths = (score.amplitude_dim, width - score.amplitude_dim)
    block_v = block_width(v_width)
    lse2, delta = row_statistics(out, grad_out, lse, grad_lse)
    padded = delta.shape[2]
    if not alpha_grad and one_pass(q, k, v, places, score):
        from phasewise.kernels import tapa_joint

        meta = launch("tapa.joint", q, qk=width, v=v_width, length=keys)
        tapa_joint.backward((grad_q, grad_k, grad_v), q, k, v, grad_out, lse2, delta, alpha, score, meta)
        return grad_q, grad_k, grad_v, torch.zeros_like(alpha)

    shared = score.meta(q, k, places)
    meta = launch("tapa.query_grad", q, qk=width, v=v_width, length=keys)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    assert padded % block_m == 0
    spans = places and places.key_spans(block_m, block_n, causal=score.causal, window=score.window)
    rows = torch.empty_like(lse) if alpha_grad else None
    query_grad_kernel[(triton.cdiv(queries, block_m) * batch * heads,)](
        grad_q, rows, *score.parts(q, block_m), *score.parts(k, block_n), describe(v, block_n, block_v),
        describe(grad_out, block_m, block_v), lse2, delta, alpha, *place_arguments(places, spans),
        *grad_q.stride(), heads, queries, padded, keys, score.window or 0, score.scale, score.phase_unit(q), *widths,
        ALPHA=alpha_grad, **score.blocks(q), **shared, **meta,
    )  # fmt: skip

    meta = launch("tapa.key_grad", q, qk=width, v=v_width, length=queries)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    assert padded % block_m == 0
    spans = places and places.query_spans(block_m, block_n, causal=score.causal, window=score.window)
    key_grad_kernel[(triton.cdiv(keys, block_n) * batch * groups,)](
        grad_k, grad_v, *score.parts(q, block_m), *score.parts(k, block_n), describe(v, block_n, block_v),
        describe(grad_out, block_m, block_v), lse2, delta, alpha, *place_arguments(places, spans),
        *grad_k.stride(), *grad_v.stride(), groups, queries, padded, keys, score.window or 0, score.scale,
        score.phase_unit(q), *widths, v_width, BLOCK_V=block_v, **score.blocks(q), **shared, **meta,
    )  # fmt: skip
    grad_alpha = torch.zeros_like(alpha) if rows is None else rows.sum().reshape(alpha.shape)
    return grad_q, grad_k, grad_v, grad_alpha
