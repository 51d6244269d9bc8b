"""The backward of wide attention by way of stored score gradients, a bounded number of heads at a time.

At widths (256, 128) the scores and dp cost 384 of the 1408 units of a two-pass backward, which makes them twice.
Here one pass per key tile makes dv and writes ds, in the inputs' precision, to a buffer; dq = ds k and dk = ds^T q
are then plain matrix products. Nothing is added atomically. For the static path: as many queries as keys, causal or
full, no window.

Letters as in `body`. The buffer holds ds^T in square blocks of SIDE keys by SIDE queries: for a head the blocks of
its first SIDE keys with all visible blocks of queries, then those of the next keys; causal rows of blocks shrink.
"""

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phasewise.kernels.body import load_row_statistics, load_tile, row_deltas
from phasewise.kernels.prepare import tile_of
from phasewise.kernels.tiles import UNSEEN, block_width, describe, launch


@triton.jit
def block_at(head, keys, queries, sides, SIDE: tl.constexpr, CAUSAL: tl.constexpr):
    """The buffer row of a head's block of the keys and queries (counted in blocks)."""
    if CAUSAL:
        return (head * (sides * (sides + 1) // 2) + keys * sides - keys * (keys + 1) // 2 + queries) * SIDE
    else:
        return ((head * sides + keys) * sides + queries) * SIDE


@triton.jit
def score_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, ds_desc, lse_ptr, delta_ptr, dv_ptr, dv_strides,
    KEY_HEADS, GROUP, T, D, scale_log2,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, SIDE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dv [B, H / GROUP, T, D] = p^T dout, and ds^T into the buffer; the keys most looked at first."""
    tile = tl.program_id(1)
    sides = tl.num_programs(1)
    b = tl.program_id(0) // KEY_HEADS
    key = tl.program_id(0) % KEY_HEADS
    n = tile * SIDE
    j = n + tl.arange(0, SIDE)
    k = load_tile(k_desc, b, key, n)
    v = load_tile(v_desc, b, key, n)
    dv = tl.zeros([SIDE, BLOCK_D], tl.float32)
    masked_up_to = tl.where(n + SIDE > T, T, n + SIDE - 1 if CAUSAL else 0)
    for member in range(GROUP):
        h = key * GROUP + member
        head = b * KEY_HEADS * GROUP + h
        for m in tl.range(n if CAUSAL else 0, T, BLOCK_M):
            q = load_tile(q_desc, b, h, m)
            dout = load_tile(dout_desc, b, h, m)
            i = m + tl.arange(0, BLOCK_M)
            lse, delta = load_row_statistics(lse_ptr, delta_ptr, head.to(tl.int64) * T, i, T)
            scores = tl.dot(k, q.T, input_precision="ieee")
            if m < masked_up_to:
                seen = (j < T)[:, None]
                if CAUSAL:
                    seen &= j[:, None] <= i[None, :]
                scores = tl.where(seen, scores, UNSEEN)
            p = tl.exp2(scores * scale_log2 - lse[None, :])
            dp = tl.dot(v, dout.T, input_precision="ieee")
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            ds = p * (dp - delta[None, :])
            ds_desc.store([block_at(head, tile, m // SIDE, sides, SIDE, CAUSAL), m % SIDE], ds.to(q.dtype))
    d = tl.arange(0, BLOCK_D)
    dv_at = tile_of(dv_ptr, dv_strides, b.to(tl.int64), key, j, d)
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), (j[:, None] < T) & (d[None, :] < D))


@triton.jit
def query_product_kernel(
    ds_desc, k_desc, dq_ptr, dq_strides, H, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, SIDE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dq [B, H, T, E] = scale ds k, SIDE queries a program, BLOCK_N keys at a time; longest rows first."""
    sides = tl.num_programs(1)
    tile = sides - 1 - tl.program_id(1)
    head = tl.program_id(0)
    b = head // H
    h = head % H
    m = tile * SIDE
    dq = tl.zeros([SIDE, BLOCK_E], tl.float32)
    for n in tl.range(0, tl.minimum(m + SIDE, T) if CAUSAL else T, BLOCK_N):
        ds = ds_desc.load([block_at(head, n // SIDE, tile, sides, SIDE, CAUSAL) + n % SIDE, 0])
        k = load_tile(k_desc, b, h // GROUP, n)
        dq = tl.dot(ds.T, k, dq, input_precision="ieee")
    t = m + tl.arange(0, SIDE)
    e = tl.arange(0, BLOCK_E)
    dq_at = tile_of(dq_ptr, dq_strides, b.to(tl.int64), h, t, e)
    tl.store(dq_at, (dq * scale).to(dq_ptr.dtype.element_ty), (t[:, None] < T) & (e[None, :] < E))


@triton.jit
def key_product_kernel(
    ds_desc, q_desc, dk_ptr, dk_strides, KEY_HEADS, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, SIDE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dk [B, H / GROUP, T, E] = scale ds^T q, SIDE keys a program, BLOCK_M queries at a time."""
    tile = tl.program_id(1)
    sides = tl.num_programs(1)
    b = tl.program_id(0) // KEY_HEADS
    key = tl.program_id(0) % KEY_HEADS
    n = tile * SIDE
    dk = tl.zeros([SIDE, BLOCK_E], tl.float32)
    for member in range(GROUP):
        h = key * GROUP + member
        head = b * KEY_HEADS * GROUP + h
        for m in tl.range(n if CAUSAL else 0, T, BLOCK_M):
            ds = ds_desc.load([block_at(head, tile, m // SIDE, sides, SIDE, CAUSAL), m % SIDE])
            q = load_tile(q_desc, b, h, m)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
    s = n + tl.arange(0, SIDE)
    e = tl.arange(0, BLOCK_E)
    dk_at = tile_of(dk_ptr, dk_strides, b.to(tl.int64), key, s, e)
    tl.store(dk_at, (dk * scale).to(dk_ptr.dtype.element_ty), (s[:, None] < T) & (e[None, :] < E))


def pieces(q: Tensor, key_heads: int, *, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Rows and key heads, at least one, with as many visible pairs as q has elements: whole rows, or heads of one."""
    rows, heads, length, _ = q.shape
    at_once = max(1, q.numel() * (2 if causal else 1) // (heads // key_heads * length**2))
    if at_once >= key_heads:
        step = triton.cdiv(rows, triton.cdiv(rows, at_once // key_heads))
        yield from ((slice(row, min(row + step, rows)), slice(0, key_heads)) for row in range(0, rows, step))
    else:
        step = triton.cdiv(key_heads, triton.cdiv(key_heads, at_once))
        starts = range(0, key_heads, step)
        for row in range(rows):
            yield from ((slice(row, row + 1), slice(head, min(head + step, key_heads))) for head in starts)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    into: tuple[Tensor, Tensor, Tensor], *, scale: float, causal: bool,
) -> None:  # fmt: skip
    """`body.backward` for as many queries as keys, no window, no positions and no slopes; dq may be q itself."""
    delta = row_deltas(out, dout, dlse)
    group = q.shape[1] // k.shape[1]
    for rows, keys in pieces(q, k.shape[1], causal=causal):
        queries = slice(keys.start * group, keys.stop * group)
        _backward(
            q[rows, queries], k[rows, keys], v[rows, keys], lse[rows, queries], delta[rows, queries],
            dout[rows, queries], (into[0][rows, queries], into[1][rows, keys], into[2][rows, keys]),
            scale=scale, causal=causal,
        )  # fmt: skip


def _backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dout: Tensor,
    into: tuple[Tensor, Tensor, Tensor], *, scale: float, causal: bool,
) -> None:  # fmt: skip
    rows, heads, length, width = q.shape
    key_heads, value_width = v.shape[1], v.shape[3]
    dq, dk, dv = into
    meta, query_meta, key_meta = (
        launch(f"separable.{name}", q, qk=width, v=value_width, length=length)
        for name in ("score_grad", "query_product", "key_product")
    )
    side, block_m, query_n, key_m = meta["SIDE"], meta["BLOCK_M"], query_meta["BLOCK_N"], key_meta["BLOCK_M"]
    assert side % block_m == 0, "blocks are made up of whole tiles of queries"
    assert side % query_n == 0, "blocks are made up of whole tiles of keys"
    assert block_m % key_m == 0, "the key product reads only what was written"
    block_e, block_d = block_width(width), block_width(value_width)
    sides = triton.cdiv(length, side)
    blocks = rows * heads * (sides * (sides + 1) // 2 if causal else sides * sides)
    ds = torch.empty(blocks * side, side, dtype=q.dtype, device=q.device)

    def stored(keys: int, queries: int) -> TensorDescriptor:
        return TensorDescriptor(ds, list(ds.shape), [side, 1], [keys, queries])

    shared = {"GROUP": heads // key_heads, "T": length, "CAUSAL": causal, "SIDE": side}
    products = {"E": width, "scale": scale, "BLOCK_E": block_e, **shared}
    score_grad_kernel[(rows * key_heads, sides)](
        describe(q, block_m, block_e), describe(k, side, block_e), describe(v, side, block_d),
        describe(dout, block_m, block_d), stored(side, block_m), lse, delta, dv, dv.stride(),
        KEY_HEADS=key_heads, D=value_width, scale_log2=scale * math.log2(math.e), BLOCK_D=block_d,
        **(shared | meta),
    )  # fmt: skip
    key_product_kernel[(rows * key_heads, sides)](
        stored(side, key_m), describe(q, key_m, block_e), dk, dk.stride(), KEY_HEADS=key_heads, **products,
        **key_meta,
    )  # fmt: skip
    # After the key product, which reads q: dq may take its place.
    query_product_kernel[(rows * heads, sides)](
        stored(query_n, side),
        describe(k, query_n, block_e),
        dq,
        dq.stride(),
        H=heads,
        **products,
        **query_meta,
    )
