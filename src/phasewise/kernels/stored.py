"""The backward of wide attention by way of stored score gradients, a bounded number of heads at a time.

Recomputing the scores for dq and again for dk costs 384 of 1408 units at widths (256, 128). Here one pass per key
tile makes dv and writes ds, in the inputs' precision, to a buffer; dq = ds k and dk = ds^T q are then plain matrix
products. Nothing is added atomically. For the static path: as many queries as keys, causal or full, no window.

Letters as in `body`. A head's ds lies as one block of rows per key tile, `[T' - first visible query, BLOCK_N]`, T'
being T rounded up to whole key tiles; causal blocks shrink along the diagonal.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phasewise.kernels.body import load_row_statistics, load_tile, row_deltas
from phasewise.kernels.prepare import Turn, expanded_like, polar_backward, tile_of
from phasewise.kernels.tiles import UNSEEN, block_width, describe, launch


@triton.jit
def block_row(tile, tiles, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """The buffer row, within a head, at which query 0 of a key tile lies or (causal) would lie."""
    if CAUSAL:
        return (tile * tiles - tile * (tile - 1) // 2 - tile) * BLOCK_N
    else:
        return tile * tiles * BLOCK_N


@triton.jit
def score_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, ds_desc, lse_ptr, delta_ptr, dv_ptr, dv_strides,
    first_head, KEY_HEADS, GROUP, T, D, scale_log2,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STORED_N: tl.constexpr,
):  # fmt: skip
    """dv [B, H / GROUP, T, D] = p^T dout, and ds of a chunk of key heads into the buffer."""
    tile = tl.program_id(1) * BLOCK_N // STORED_N
    tiles = tl.cdiv(T, STORED_N)
    head = first_head + tl.program_id(0)
    b = head // KEY_HEADS
    key = head % KEY_HEADS
    n = tl.program_id(1) * BLOCK_N
    j = n + tl.arange(0, BLOCK_N)
    k = load_tile(k_desc, b, key, n)
    v = load_tile(v_desc, b, key, n)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    head_rows = (tiles * (tiles + 1) // 2 if CAUSAL else tiles * tiles) * STORED_N
    for member in range(GROUP):
        h = key * GROUP + member
        row = (b.to(tl.int64) * KEY_HEADS * GROUP + h) * T
        base = (tl.program_id(0) * GROUP + member) * head_rows + block_row(tile, tiles, STORED_N, CAUSAL)
        # Queries before n see none of the keys, but share their rows with the other keys of the stored tile.
        full = n + BLOCK_N - 1 if CAUSAL else 0
        for m in tl.range(tile * STORED_N if CAUSAL else 0, T, BLOCK_M):
            q = load_tile(q_desc, b, h, m)
            dout = load_tile(dout_desc, b, h, m)
            i = m + tl.arange(0, BLOCK_M)
            lse, delta = load_row_statistics(lse_ptr, delta_ptr, row, i, T)
            scores = tl.dot(k, q.T, input_precision="ieee")
            if (m < full) | (n + BLOCK_N > T):
                seen = (j < T)[:, None]
                if CAUSAL:
                    seen &= j[:, None] <= i[None, :]
                scores = tl.where(seen, scores, UNSEEN)
            p = tl.exp2(scores * scale_log2 - lse[None, :])
            dp = tl.dot(v, dout.T, input_precision="ieee")
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            ds_desc.store([base + m, n % STORED_N], ds.T)
    d = tl.arange(0, BLOCK_D)[None, :]
    rows = j[:, None].to(tl.int64)
    dv_at = dv_ptr + b.to(tl.int64) * dv_strides[0] + key.to(tl.int64) * dv_strides[1] + rows * dv_strides[2] + d
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), (rows < T) & (d < D))


@triton.jit
def query_product_kernel(
    ds_desc, k_desc, dq_ptr, dq_strides, first_row, first_query_head, first_head, KEY_HEADS, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k for a chunk of heads, BLOCK_K of a key tile's BLOCK_N keys at a time."""
    m = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    tiles = tl.cdiv(T, BLOCK_N)
    head = first_head * GROUP + tl.program_id(0)
    b = head // (KEY_HEADS * GROUP)
    h = head % (KEY_HEADS * GROUP)
    head_rows = (tiles * (tiles + 1) // 2 if CAUSAL else tiles * tiles) * BLOCK_N
    base = tl.program_id(0) * head_rows + m
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for n in tl.range(0, tl.minimum(m + BLOCK_M, T) if CAUSAL else T, BLOCK_K):
        ds = ds_desc.load([base + block_row(n // BLOCK_N, tiles, BLOCK_N, CAUSAL), n % BLOCK_N])
        k = load_tile(k_desc, b, h // GROUP, n)
        dq = tl.dot(ds, k, dq, input_precision="ieee")
    t = m + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    dq_at = tile_of(dq_ptr, dq_strides, (b - first_row).to(tl.int64), h - first_query_head, t, e)
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), (t[:, None] < T) & (e[None, :] < E))


@triton.jit
def key_product_kernel(
    ds_desc, q_desc, dk_ptr, dk_strides, first_row, first_key_head, first_head, KEY_HEADS, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dk = scale ds^T q for a chunk of key heads."""
    tile = tl.program_id(1)
    tiles = tl.num_programs(1)
    head = first_head + tl.program_id(0)
    b = head // KEY_HEADS
    key = head % KEY_HEADS
    n = tile * BLOCK_N
    head_rows = (tiles * (tiles + 1) // 2 if CAUSAL else tiles * tiles) * BLOCK_N
    dk = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for member in range(GROUP):
        base = (tl.program_id(0) * GROUP + member) * head_rows + block_row(tile, tiles, BLOCK_N, CAUSAL)
        for m in tl.range(n if CAUSAL else 0, T, BLOCK_M):
            ds = ds_desc.load([base + m, 0])
            q = load_tile(q_desc, b, key * GROUP + member, m)
            dk = tl.dot(ds.T, q, dk, input_precision="ieee")
    s = n + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    dk_at = tile_of(dk_ptr, dk_strides, (b - first_row).to(tl.int64), key - first_key_head, s, e)
    tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), (s[:, None] < T) & (e[None, :] < E))


@dataclass(frozen=True)
class Polar:
    """The raw side of PoPE's expanded q and k: what carries their gradients back."""

    q: Tensor
    k: Tensor
    q_turn: Turn
    k_turn: Turn
    kind: str


def chunks(rows: int, heads: int, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Rows and heads in pieces of about `at_once` heads: whole rows, or heads of one row."""
    if at_once >= heads:
        step = max(1, at_once // heads)
        yield from ((slice(row, min(row + step, rows)), slice(0, heads)) for row in range(0, rows, step))
    else:
        for row in range(rows):
            starts = range(0, heads, at_once)
            yield from ((slice(row, row + 1), slice(head, min(head + at_once, heads))) for head in starts)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    *, scale: float, causal: bool, polar: Polar | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v (and None), or with `polar` of the raw q, k, v and the phase.

    For as many queries as keys, no window, no positions and no slopes. With `polar` a chunk's wide gradients are
    carried back at once, so that no more than a chunk of them exists.
    """
    rows, heads, length, width = q.shape
    key_heads, value_width = v.shape[1], v.shape[3]
    group = heads // key_heads
    block_e, block_d = block_width(width), block_width(value_width)
    delta = row_deltas(out, dout, dlse)
    meta, query_meta, key_meta = (
        launch(f"separable.{name}", q, qk=width, v=value_width, length=length)
        for name in ("score_grad", "query_product", "key_product")
    )
    block_m, block_n, stored_n = meta["BLOCK_M"], meta["BLOCK_N"], meta["STORED_N"]
    assert stored_n % block_m == 0 and stored_n % query_meta["BLOCK_M"] == 0, "query tiles end where stored tiles do"
    assert stored_n % block_n == 0 and stored_n % query_meta["BLOCK_K"] == 0, "key tiles make up a stored tile"
    assert block_m % key_meta["BLOCK_M"] == 0, "the key product reads only rows that were written"
    tiles = triton.cdiv(length, stored_n)
    raw_q, raw_k = (q, k) if polar is None else (polar.q, polar.k)
    dq, dk, dv = (expanded_like(x, x.shape[3]) for x in (raw_q, raw_k, v))
    dphase = None if polar is None or polar.q_turn.phase is None else torch.zeros_like(polar.q_turn.phase[0])
    head_rows = (tiles * (tiles + 1) // 2 if causal else tiles * tiles) * stored_n
    # As many key heads at a time as the raw q and k take memory, at least one.
    pieces = list(chunks(rows, key_heads, max(1, round((q.numel() + k.numel()) / (2 * group * head_rows * stored_n)))))
    largest = max((r.stop - r.start) * (h.stop - h.start) for r, h in pieces)
    ds = torch.empty(largest * group * head_rows, stored_n, dtype=q.dtype, device=q.device)

    def stored(queries: int, keys: int) -> TensorDescriptor:
        return TensorDescriptor(ds, list(ds.shape), [stored_n, 1], [queries, keys])

    shared = {"KEY_HEADS": key_heads, "GROUP": group, "T": length, "CAUSAL": causal}
    products = {"E": width, "scale": scale, "BLOCK_N": stored_n, "BLOCK_E": block_e}
    q_tiles, k_tiles = describe(q, block_m, block_e), describe(k, block_n, block_e)
    v_tiles, dout_tiles = describe(v, block_n, block_d), describe(dout, block_m, block_d)
    k_product, q_product = describe(k, query_meta["BLOCK_K"], block_e), describe(q, key_meta["BLOCK_M"], block_e)
    for some_rows, some_heads in pieces:
        query_heads = slice(some_heads.start * group, some_heads.stop * group)
        count = (some_rows.stop - some_rows.start) * (some_heads.stop - some_heads.start)
        first = some_rows.start * key_heads + some_heads.start
        wide_q, wide_k = dq[some_rows, query_heads], dk[some_rows, some_heads]
        if polar is not None:
            wide_q, wide_k = expanded_like(wide_q, width), expanded_like(wide_k, width)
        score_grad_kernel[(count, tiles * (stored_n // block_n))](
            q_tiles, k_tiles, v_tiles, dout_tiles, stored(block_m, block_n), lse, delta, dv, dv.stride(), first,
            D=value_width, scale_log2=scale * math.log2(math.e), BLOCK_D=block_d, **shared, **meta,
        )  # fmt: skip
        query_product_kernel[(count * group, triton.cdiv(length, query_meta["BLOCK_M"]))](
            stored(query_meta["BLOCK_M"], query_meta["BLOCK_K"]), k_product, wide_q, wide_q.stride(),
            some_rows.start, query_heads.start, first, **products, **shared, **query_meta,
        )  # fmt: skip
        key_product_kernel[(count, tiles)](
            stored(key_meta["BLOCK_M"], stored_n), q_product, wide_k, wide_k.stride(),
            some_rows.start, some_heads.start, first, **products, **shared, **key_meta,
        )  # fmt: skip
        if polar is not None:
            q_part, k_part = (some_rows, query_heads), (some_rows, some_heads)
            turned = polar_backward(polar.q[q_part], polar.q_turn.part(*q_part), polar.kind, wide_q, dq[q_part])
            polar_backward(polar.k[k_part], polar.k_turn.part(*k_part), polar.kind, wide_k, dk[k_part])
            if dphase is not None:
                dphase[query_heads] += turned
    return dq, dk, dv, dphase
