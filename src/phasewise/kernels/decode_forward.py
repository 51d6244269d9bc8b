"""A few queries against many keys: every key and value is read once, as it lies in the cache.

Letters: B batch, H query heads, G key heads, T queries, S keys, D and V widths, n angles. The H / G x T queries that
meet one key head are the rows of one tile; the keys are split over programs, whose parts a second kernel adds up.

Turning keys is cheap because an angle relative to its tile's first key is the same in every tile: cosines and sines
of these are made once a program, and the queries are turned back from tile to tile instead. Places that do not go on
by ones (padding apart) get cosines and sines of their own.

PoPE in half precision goes to decode_polar.py where that serves it.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasewise.kernels import decode_polar
from phasewise.kernels.decode_parts import (
    combined,
    pair,
    tiles_each,
    turned_back,
    turns,
)
from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.tapa_score import cosine, distance, phase_product, power
from phasewise.kernels.tiles import (
    EMPTY,
    LN2,
    LOG2E,
    UNSEEN,
    block_width,
    ceil_div,
    launch,
    load_places,
    power_of_two,
    visible,
)

Places = tuple[Tensor, Tensor, Tensor, Tensor]  # index and segment of the queries, of the keys
KERNELS = {
    "none": "plain", "rope": "rope", "softplus": "pope", "relu": "pope", "identity": "pope", "tapa": "tapa",
    "tapa-linear": "tapa",
}  # fmt: skip

SCAN: tl.constexpr = tl.constexpr(2048)


@triton.jit
def load_part(at, column_stride, inside, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Channels `[first, first + WIDTH)` of rows that start at the addresses `at`, zero outside."""
    c = tl.arange(0, BLOCK)
    seen = inside[:, None] & (c < WIDTH)[None, :]
    return tl.load(at[:, None] + (first + c).to(tl.int64)[None, :] * column_stride, seen, other=0.0)


@triton.jit
def steady_shift(index_ptr, segment_ptr, row, first, last, BLOCK: tl.constexpr):
    """Whether places go on by ones in `[first, last)`, padding apart, and how far they are from 0, 1, 2, ..."""
    n = tl.arange(0, BLOCK)
    low = tl.full([BLOCK], 1 << 62, tl.int64)
    high = tl.full([BLOCK], -(1 << 62), tl.int64)
    for start in range(first, last, BLOCK):
        j, segment = load_places(index_ptr, segment_ptr, row, start + n, last, 0, True)
        low = tl.minimum(low, tl.where(segment >= 0, j - (start + n), low))
        high = tl.maximum(high, tl.where(segment >= 0, j - (start + n), high))
    lowest, highest = tl.min(low), tl.max(high)
    return lowest >= highest, tl.where(lowest <= highest, lowest, 0)


@triton.jit(do_not_specialize=["rows", "S", "low", "window", "splits"])
def decode_kernel(
    part_ptr, lse_ptr, q_ptr, q_strides, k_ptr, k_strides, v_ptr, v_strides, rate_ptr, phase_ptr, slope_ptr,
    q_index_ptr, q_segment_ptr, k_index_ptr, k_segment_ptr, q_row_stride, k_row_stride,
    rows, H, T, S, low, window, splits, chunk, factor, scale_log2, alpha, unit,
    KIND: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, REST: tl.constexpr, V: tl.constexpr,
    GROUP: tl.constexpr, PHASE: tl.constexpr, SLOPED: tl.constexpr, PLACED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr, FAST: tl.constexpr, BLOCK_FIRST: tl.constexpr, BLOCK_SECOND: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp, float32 [splits, B H T, V] and [splits, B H T], over one split's tiles of keys."""
    TURNED: tl.constexpr = KIND != "none" and KIND != "tapa" and KIND != "tapa-linear"
    JOINT: tl.constexpr = KIND == "tapa" or KIND == "tapa-linear"
    row_tiles = tl.cdiv(GROUP * T, BLOCK_M)
    split = tl.program_id(0) % splits
    row_tile = tl.program_id(0) // splits % row_tiles
    group = tl.program_id(0) // splits // row_tiles % (H // GROUP)
    b = (tl.program_id(0) // splits // row_tiles // (H // GROUP)).to(tl.int64)
    dtype: tl.constexpr = q_ptr.dtype.element_ty

    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < GROUP * T
    h = group * GROUP + m // T
    t = m % T
    i, i_segment = load_places(q_index_ptr, q_segment_ptr, b * q_row_stride, t, T, S - T, PLACED)
    i_segment = tl.where(real, i_segment, -1)
    furthest = tl.where(real, i, -1)
    first = low + split * chunk
    last = tl.minimum(first + chunk, S)
    q_at = q_ptr + b * q_strides[0] + h.to(tl.int64) * q_strides[1] + t.to(tl.int64) * q_strides[2]
    x = load_part(q_at, q_strides[3], real, 0, FIRST, BLOCK_FIRST)
    y = x
    if SECOND > 0:
        y = load_part(q_at, q_strides[3], real, FIRST, SECOND, BLOCK_SECOND)
    if REST > 0:
        rest = load_part(q_at, q_strides[3], real, FIRST + SECOND, REST, BLOCK_REST)

    n = tl.arange(0, BLOCK_N)
    if TURNED:
        c = tl.arange(0, BLOCK_FIRST)
        rates = tl.load(rate_ptr + c, c < FIRST, other=0.0)
        origin = first
        steady = True
        if PLACED:
            steady, shift = steady_shift(k_index_ptr, k_segment_ptr, b * k_row_stride, first, last, SCAN)
            origin = tl.where(steady, first + shift, 0)
        q_cos, q_sin = turns((i - origin)[:, None], rates[None, :], FAST)
        if PHASE:
            phases = tl.load(
                phase_ptr + h[:, None] * FIRST + c[None, :], real[:, None] & (c < FIRST)[None, :], other=0.0
            )
            phase_cos, phase_sin = turns(phases.to(tl.float64), 1.0, FAST)
            q_cos, q_sin = q_cos * phase_cos + q_sin * phase_sin, q_sin * phase_cos - q_cos * phase_sin
        x, y = pair(x, y, q_cos, q_sin, KIND, FAST)
        inside = real[:, None] & (c < FIRST)[None, :]
        x, y = tl.where(inside, x * factor, 0.0), tl.where(inside, y * factor, 0.0)
        x1, x2 = x, y
        cos, sin = turns(n[:, None], rates[None, :], FAST)
        step_cos, step_sin = turns(tl.where(steady, BLOCK_N, 0), rates, FAST)
        if FAST and KIND != "rope":
            cos, sin = cos.to(dtype), sin.to(dtype)
    if SLOPED:
        slopes = tl.load(slope_ptr + h, real, other=0.0) * LOG2E

    top = tl.full([BLOCK_M], 0.1 * UNSEEN, tl.float32)
    # Summed over a row at the end alone, since that takes all warps.
    totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    k_ptr += b * k_strides[0] + group.to(tl.int64) * k_strides[1]
    v_ptr += b * v_strides[0] + group.to(tl.int64) * v_strides[1]
    for first_n in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        inside_n = first_n + n < S
        at = first_n + n.to(tl.int64)
        k_at = k_ptr + at * k_strides[2]
        k1 = load_part(k_at, k_strides[3], inside_n, 0, FIRST, BLOCK_FIRST)
        k2 = k1
        if SECOND > 0:
            k2 = load_part(k_at, k_strides[3], inside_n, FIRST, SECOND, BLOCK_SECOND)
        v = load_part(v_ptr + at * v_strides[2], v_strides[3], inside_n, 0, V, BLOCK_V)
        j, j_segment = load_places(k_index_ptr, k_segment_ptr, b * k_row_stride, first_n + n, S, 0, PLACED)
        if TURNED:
            if not steady:
                offset = tl.where(j_segment >= 0, j - origin, 0)
                cos_n, sin_n = turns(offset[:, None], rates[None, :], FAST)
                cos, sin = cos_n.to(cos.dtype), sin_n.to(sin.dtype)
            k1, k2 = pair(k1, k2, cos, sin, KIND, FAST)
            if steady & (not FAST):
                base_cos, base_sin = turns(first_n - first, rates, FAST)
                x1, x2 = turned_back(x, y, base_cos, base_sin)
        else:
            x1, x2 = x, y
        scores = tl.dot(x1.to(dtype), k1.to(dtype).T, input_precision="ieee")
        if TURNED:
            scores = tl.dot(x2.to(dtype), k2.to(dtype).T, scores, input_precision="ieee")
        if REST > 0:
            k3 = load_part(k_at, k_strides[3], inside_n, FIRST + SECOND, REST, BLOCK_REST)
            scores = tl.dot(rest, k3.T, scores, input_precision="ieee")
        if PLACED or WINDOWED or not CAUSAL:
            seen = visible(
                i[:, None], i_segment[:, None], j[None, :], j_segment[None, :], window, CAUSAL, WINDOWED
            )
        else:
            seen = j[None, :] <= furthest[:, None]
        if JOINT or SLOPED:
            gap = distance(i if PLACED else i - first_n, j if PLACED else n)
        if JOINT:
            phase = phase_product(x2, k2, KIND == "tapa-linear", "ieee")
            scores *= cosine(
                phase * tl.where(seen, power(gap, tl.full([], alpha, tl.float32), unit, FAST), 0.0), FAST
            )
        scores *= scale_log2
        if SLOPED:
            scores -= slopes[:, None] * gap
        scores = tl.where(seen, scores, UNSEEN)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        totals = totals * fade[:, None] + weights
        mixed = tl.dot(weights.to(dtype), v, mixed * fade[:, None], input_precision="ieee")
        top = higher
        if TURNED and FAST:
            # Not steady, queries stay where they are, and keys are turned from there.
            x1, x2 = turned_back(x1, x2, step_cos, step_sin)

    total = tl.sum(totals, 1)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    row = split.to(tl.int64) * rows + (b * H + h) * T + t
    tl.store(lse_ptr + row, tl.where(empty, EMPTY, top * LN2 + tl.log(total)), real)
    d = tl.arange(0, BLOCK_V)
    tl.store(
        part_ptr + row[:, None] * V + d[None, :], mixed / total[:, None], real[:, None] & (d < V)[None, :]
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor | None, phase: Tensor | None, slopes: Tensor | None,
    places: Places | None, *, kind: str, parts: tuple[int, int, int], factor: float, scale: float, alpha: float,
    unit: float, causal: bool, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, V]`, stored place by place, and float32 log-sum-exp `[B, H, T]`.

    rates: float64 [n], radians a place. parts: the widths of what is multiplied apart. unit: of the phase, in radians.
    """
    rows, heads, queries, width = q.shape
    groups, keys, v_width = v.shape[1:]
    low = 0 if window is None or places is not None else max(0, keys - queries - window + 1)
    if rates is not None and decode_polar.serves(
        q, k, v, kind=kind, placed=places is not None, window=window
    ):
        found = decode_polar.parts(
            q, k, v, rates, phase, kind=kind, factor=factor, scale=scale, causal=causal, low=low
        )
        return combined(*found, q)
    fast = q.is_cuda and q.dtype != torch.float32
    meta = launch(f"decode.{KERNELS[kind]}", q, qk=width, v=v_width, length=power_of_two(keys))
    room, stages = meta.pop("PROGRAMS") * multiprocessors(q.device), meta.pop("STAGES")
    block_m = min(64 if width <= 64 else 32, block_width(heads // groups * queries))
    block_n = meta["BLOCK_N"]
    programs = rows * groups * ceil_div(heads // groups * queries, block_m)
    chunk = tiles_each(ceil_div(keys - low, block_n), programs, room) * block_n
    splits = ceil_div(keys - low, chunk)
    total = rows * heads * queries
    part = torch.empty(splits, total, v_width, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(splits, total, dtype=torch.float32, device=q.device)
    q_row, k_row = (0, 0) if places is None else (x.stride(0) if x.shape[0] > 1 else 0 for x in places[::2])
    first, second, rest = parts
    decode_kernel[(programs * splits,)](
        part, part_lse, q, q.stride(), k, k.stride(), v, v.stride(), rates, phase, slopes,
        *(places or (None,) * 4), q_row, k_row,
        total, heads, queries, keys, low, window or 0, splits, chunk, factor, scale * math.log2(math.e), alpha,
        unit if fast else unit / (2 * math.pi),
        KIND=kind, FIRST=first, SECOND=second, REST=rest, V=v_width, GROUP=heads // groups,
        PHASE=phase is not None, SLOPED=slopes is not None, PLACED=places is not None, CAUSAL=causal,
        WINDOWED=window is not None, FAST=fast, BLOCK_FIRST=block_width(first),
        BLOCK_SECOND=block_width(max(second, 1)), BLOCK_REST=block_width(max(rest, 1)), BLOCK_V=block_width(v_width),
        BLOCK_M=block_m, STAGES=stages, **meta,
    )  # fmt: skip
    return combined(part, part_lse, q)
