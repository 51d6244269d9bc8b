"""The backward of wide attention by way of stored score gradients, a bounded number of heads at a time.

Recomputing the scores for dq and again for dk costs 384 of 1408 units at widths (256, 128). Here one pass per key
tile makes dv and writes ds, in the inputs' precision, to a buffer; dq = ds k and dk = ds^T q are then plain matrix
products. Nothing is added atomically. For the static path: as many queries as keys, causal or full, no window.

Letters as in `body`. A head's ds lies as one block of rows per key tile, `[T' - first visible query, BLOCK_N]`, T'
being T rounded up to whole key tiles; causal blocks shrink along the diagonal.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phasewise.kernels.body import load_row_statistics, load_tile, probability, row_deltas
from phasewise.kernels.prepare import expanded_like, magnitude, tile_of, turn_back
from phasewise.kernels.tiles import block_width, describe, launch


@triton.jit
def block_row(tile, tiles, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """The buffer row, within a head, at which query 0 of a key tile lies or (causal) would lie."""
    if CAUSAL:
        return (tile * tiles - tile * (tile - 1) // 2 - tile) * BLOCK_N
    else:
        return tile * tiles * BLOCK_N


@triton.jit
def score_grad_tiles(
    dv, k, v, q_desc, dout_desc, ds_desc, lse_ptr, delta_ptr, row, b, h, base, low, high, j, T, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, S,
):  # fmt: skip
    for m in tl.range(low, high, BLOCK_M):
        q = load_tile(q_desc, b, h, m)
        dout = load_tile(dout_desc, b, h, m)
        i = m + tl.arange(0, BLOCK_M)
        lse, delta = load_row_statistics(lse_ptr, delta_ptr, row, i, T)
        scores = tl.dot(k, q.T, input_precision="ieee")
        p = probability(
            scores, lse[None, :], i[None, :], 0, j[:, None], tl.where(j < S, 0, -1)[:, None], 0.0, 0, scale_log2,
            MASKED, CAUSAL, False, False,
        )  # fmt: skip
        dp = tl.dot(v, dout.T, input_precision="ieee")
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        ds_desc.store([base + m, 0], ds.T)
    return dv


@triton.jit
def score_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, ds_desc, lse_ptr, delta_ptr, dv_ptr, dv_strides,
    first_head, KEY_HEADS, GROUP, T, D, scale_log2,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dv [B, H / GROUP, T, D] = p^T dout, and ds of a chunk of key heads into the buffer."""
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    head = first_head + tl.program_id(0)
    b = head // KEY_HEADS
    key = head % KEY_HEADS
    n = tile * BLOCK_N
    j = n + tl.arange(0, BLOCK_N)
    k = load_tile(k_desc, b, key, n)
    v = load_tile(v_desc, b, key, n)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    head_rows = (tiles * (tiles + 1) // 2 if CAUSAL else tiles * tiles) * BLOCK_N
    for member in range(GROUP):
        h = key * GROUP + member
        row = (b.to(tl.int64) * KEY_HEADS * GROUP + h) * T
        base = (tl.program_id(0) * GROUP + member) * head_rows + block_row(tile, tiles, BLOCK_N, CAUSAL)
        low = n if CAUSAL else 0
        full = tl.minimum(n + BLOCK_N, T) if CAUSAL else 0
        full = tl.where(n + BLOCK_N > T, T, full)
        dv = score_grad_tiles(
            dv, k, v, q_desc, dout_desc, ds_desc, lse_ptr, delta_ptr, row, b, h, base, low, full, j, T, scale_log2,
            True, CAUSAL, BLOCK_M, T,
        )  # fmt: skip
        dv = score_grad_tiles(
            dv, k, v, q_desc, dout_desc, ds_desc, lse_ptr, delta_ptr, row, b, h, base, full, T, j, T, scale_log2,
            False, CAUSAL, BLOCK_M, T,
        )  # fmt: skip
    d = tl.arange(0, BLOCK_D)[None, :]
    rows = j[:, None].to(tl.int64)
    dv_at = dv_ptr + b.to(tl.int64) * dv_strides[0] + key.to(tl.int64) * dv_strides[1] + rows * dv_strides[2] + d
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), (rows < T) & (d < D))


@triton.jit
def store_halves(
    first, second, out_ptr, out_strides, partial_ptr, partial_row, b, h, rows, T, E,
    x_ptr, x_strides, cos_ptr, sin_ptr, turn_row, phase_cos_ptr, phase_sin_ptr, H,
    KIND: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A gradient in two halves [M, HALF]: as it is, or (KIND) carried back through PoPE's Cartesian form."""
    c = tl.arange(0, BLOCK_H)
    out_at = tile_of(out_ptr, out_strides, b, h, rows, c)
    kind = out_ptr.dtype.element_ty
    inside = (rows[:, None] < T) & (c[None, :] < HALF)
    if KIND == "none":
        tl.store(out_at, first.to(kind), inside)
        tl.store(out_at + HALF * out_strides[3], second.to(kind), inside & (c[None, :] < E - HALF))
    else:
        turn_at = b.to(tl.int64) * turn_row + rows[:, None].to(tl.int64) * HALF + c[None, :]
        cos = tl.load(cos_ptr + turn_at, inside, other=0.0)
        sin = tl.load(sin_ptr + turn_at, inside, other=0.0)
        if phase_cos_ptr is not None:
            cos, sin = turn_back(cos, sin, phase_cos_ptr, phase_sin_ptr, h, c, H, HALF)
        x = tl.load(tile_of(x_ptr, x_strides, b, h, rows, c), inside, other=0.0).to(tl.float32)
        mu, slope = magnitude(x, KIND)
        tl.store(out_at, ((first * cos + second * sin) * slope).to(kind), inside)
        if phase_cos_ptr is not None:
            turned = tl.where(inside, mu * (first * sin - second * cos), 0.0)
            tl.store(partial_ptr + (partial_row * H + h) * HALF + c, tl.sum(turned, 0), c < HALF)


@triton.jit
def load_half(descriptor, b, h, first, column):
    """Rows `[first, first + rows)` and columns from `column` on of one head as a matrix."""
    block: tl.constexpr = descriptor.block_shape
    return descriptor.load([b, h, first, column]).reshape(block[2], block[3])


@triton.jit
def query_product_kernel(
    ds_desc, k_desc, dq_ptr, dq_strides, partial_ptr, x_ptr, x_strides, cos_ptr, sin_ptr, turn_row,
    phase_cos_ptr, phase_sin_ptr, first_head, KEY_HEADS, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k for a chunk of heads, BLOCK_K of a key tile's BLOCK_N keys at a time."""
    tile_m = tl.num_programs(1) - 1 - tl.program_id(1)
    m = tile_m * BLOCK_M
    tiles = tl.cdiv(T, BLOCK_N)
    head = first_head * GROUP + tl.program_id(0)
    b = head // (KEY_HEADS * GROUP)
    h = head % (KEY_HEADS * GROUP)
    head_rows = (tiles * (tiles + 1) // 2 if CAUSAL else tiles * tiles) * BLOCK_N
    base = tl.program_id(0) * head_rows + m
    first = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_H], tl.float32)
    for n in tl.range(0, tl.minimum(m + BLOCK_M, T) if CAUSAL else T, BLOCK_K):
        ds = ds_desc.load([base + block_row(n // BLOCK_N, tiles, BLOCK_N, CAUSAL), n % BLOCK_N])
        first = tl.dot(ds, load_half(k_desc, b, h // GROUP, n, 0), first, input_precision="ieee")
        second = tl.dot(ds, load_half(k_desc, b, h // GROUP, n, HALF), second, input_precision="ieee")
    store_halves(
        first * scale, second * scale, dq_ptr, dq_strides, partial_ptr, b * tl.num_programs(1) + tile_m, b, h,
        m + tl.arange(0, BLOCK_M), T, E, x_ptr, x_strides, cos_ptr, sin_ptr, turn_row,
        phase_cos_ptr, phase_sin_ptr, KEY_HEADS * GROUP, KIND, HALF, BLOCK_H,
    )  # fmt: skip


@triton.jit
def key_product_kernel(
    ds_desc, q_desc, dk_ptr, dk_strides, x_ptr, x_strides, cos_ptr, sin_ptr, turn_row,
    first_head, KEY_HEADS, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk = scale ds^T q for a chunk of key heads."""
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    head = first_head + tl.program_id(0)
    b = head // KEY_HEADS
    key = head % KEY_HEADS
    n = tile * BLOCK_N
    head_rows = (tiles * (tiles + 1) // 2 if CAUSAL else tiles * tiles) * BLOCK_N
    first = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)
    for member in range(GROUP):
        base = (tl.program_id(0) * GROUP + member) * head_rows + block_row(tile, tiles, BLOCK_N, CAUSAL)
        for m in tl.range(n if CAUSAL else 0, T, BLOCK_M):
            ds = ds_desc.load([base + m, 0]).T
            first = tl.dot(ds, load_half(q_desc, b, key * GROUP + member, m, 0), first, input_precision="ieee")
            second = tl.dot(ds, load_half(q_desc, b, key * GROUP + member, m, HALF), second, input_precision="ieee")
    store_halves(
        first * scale, second * scale, dk_ptr, dk_strides, None, 0, b, key, n + tl.arange(0, BLOCK_N), T, E,
        x_ptr, x_strides, cos_ptr, sin_ptr, turn_row, None, None, KEY_HEADS, KIND, HALF, BLOCK_H,
    )  # fmt: skip


@dataclass(frozen=True)
class Polar:
    """The raw side of PoPE's expanded q and k: what carries their gradients back."""

    q: Tensor
    k: Tensor
    q_angle: Tensor
    k_angle: Tensor
    phase: Tensor | None
    kind: str


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    *, scale: float, causal: bool, polar: Polar | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v (and None), or with `polar` of the raw q, k, v and the phase.

    For as many queries as keys, no window, no positions and no slopes.
    """
    rows, heads, length, width = q.shape
    key_heads, value_width = v.shape[1], v.shape[3]
    group = heads // key_heads
    half = block_width(width) // 2 if polar is None else polar.q.shape[3]
    block_e, block_d, block_h = block_width(width), block_width(value_width), block_width(half)
    delta = row_deltas(out, dout, dlse)
    meta, query_meta, key_meta = (
        launch(f"separable.{name}", q, qk=width, v=value_width, length=length)
        for name in ("score_grad", "query_product", "key_product")
    )
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    assert block_n % block_m == 0 and block_n % query_meta["BLOCK_M"] == 0, "query tiles end where key tiles do"
    assert block_m % key_meta["BLOCK_M"] == 0, "the key product reads only rows that were written"
    tiles = triton.cdiv(length, block_n)
    query_tiles = triton.cdiv(length, query_meta["BLOCK_M"])
    if polar is None:
        dq, dk = expanded_like(q, width), expanded_like(k, width)
        partial = None
        q_raw = k_raw = (None, (0, 0, 0, 0), None, None, 0)
        turn = (None, None)
    else:
        dq, dk = expanded_like(q, half), expanded_like(k, half)
        turn = (None, None) if polar.phase is None else (polar.phase.cos(), polar.phase.sin())
        partial = None
        if polar.phase is not None:
            partial = torch.empty(rows * query_tiles, heads, half, dtype=torch.float32, device=q.device)
        q_raw, k_raw = _raw(polar.q, polar.q_angle), _raw(polar.k, polar.k_angle)
    dv = expanded_like(v, value_width)
    head_rows = (tiles * (tiles + 1) // 2 if causal else tiles * tiles) * block_n
    # As many key heads at a time as the raw q and k take memory, at least one.
    chunk = round((q.numel() + k.numel()) / (2 * group * head_rows * block_n))
    chunk = max(1, min(rows * key_heads, chunk))
    ds = torch.empty(chunk * group * head_rows, block_n, dtype=q.dtype, device=q.device)

    def stored(queries: int, keys: int = block_n) -> TensorDescriptor:
        return TensorDescriptor(ds, list(ds.shape), [block_n, 1], [queries, keys])

    shared = {"KEY_HEADS": key_heads, "GROUP": group, "T": length, "CAUSAL": causal}
    products = {
        "E": width, "scale": scale, "KIND": "none" if polar is None else polar.kind, "HALF": half, "BLOCK_H": block_h,
        "BLOCK_N": block_n,
    }  # fmt: skip
    q_tiles, k_tiles = describe(q, block_m, block_e), describe(k, block_n, block_e)
    v_tiles, dout_tiles = describe(v, block_n, block_d), describe(dout, block_m, block_d)
    k_halves, q_halves = describe(k, query_meta["BLOCK_K"], block_h), describe(q, key_meta["BLOCK_M"], block_h)
    for first in range(0, rows * key_heads, chunk):
        some = min(chunk, rows * key_heads - first)
        score_grad_kernel[(some, tiles)](
            q_tiles, k_tiles, v_tiles, dout_tiles, stored(block_m), lse, delta, dv, dv.stride(), first,
            D=value_width, scale_log2=scale * math.log2(math.e), BLOCK_D=block_d, **shared, **meta,
        )  # fmt: skip
        query_product_kernel[(some * group, query_tiles)](
            stored(query_meta["BLOCK_M"], query_meta["BLOCK_K"]), k_halves, dq, dq.stride(), partial, *q_raw, *turn,
            first, **products, **shared, **query_meta,
        )  # fmt: skip
        key_product_kernel[(some, tiles)](
            stored(key_meta["BLOCK_M"]), q_halves, dk, dk.stride(), *k_raw, first, **products, **shared, **key_meta,
        )  # fmt: skip
    return dq, dk, dv, None if partial is None else partial.sum(0)


def _raw(x: Tensor, angle: Tensor) -> tuple[Tensor, tuple[int, ...], Tensor, Tensor, int]:
    angle = angle.contiguous()
    return x, x.stride(), angle.cos(), angle.sin(), angle.stride(0) if angle.shape[0] > 1 else 0
