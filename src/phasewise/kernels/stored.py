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
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phasewise.kernels.body import load_row_statistics, load_tile, row_deltas
from phasewise.kernels.prepare import Turn, expanded_like, polar, polar_backward, tile_of
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


@dataclass(frozen=True)
class Polar:
    """PoPE's preparation of raw q and k, done and undone a chunk at a time."""

    q_angle: Tensor
    k_angle: Tensor
    phase: Tensor | None
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
    *, scale: float, causal: bool, polar_form: Polar | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v and the phase (or None); with `polar_form` q and k are raw.

    For as many queries as keys, no window, no positions and no slopes. No more than a chunk of expanded queries,
    keys and their gradients exists at a time.
    """
    rows, heads, length, width = q.shape
    key_heads, value_width = v.shape[1], v.shape[3]
    group = heads // key_heads
    delta = row_deltas(out, dout, dlse)
    dq, dk, dv = (expanded_like(x, x.shape[3]) for x in (q, k, v))
    if polar_form is None:
        q_turn = k_turn = None
    else:
        width *= 2
        q_turn, k_turn = Turn.of(polar_form.q_angle, polar_form.phase), Turn.of(polar_form.k_angle, None)
    dphase = None if q_turn is None or q_turn.phase is None else torch.zeros_like(q_turn.phase[0])
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
    head_rows = (sides * (sides + 1) // 2 if causal else sides * sides) * side
    # As many key heads at a time as q, k and v take memory, at least one.
    at_once = max(1, round((q.numel() + k.numel() + v.numel()) / (group * head_rows * side)))
    pieces = list(chunks(rows, key_heads, at_once))
    largest = max((r.stop - r.start) * (h.stop - h.start) for r, h in pieces) * group * head_rows
    ds = torch.empty(largest, side, dtype=q.dtype, device=q.device)

    def stored(keys: int, queries: int) -> TensorDescriptor:
        return TensorDescriptor(ds, list(ds.shape), [side, 1], [keys, queries])

    shared = {"GROUP": group, "T": length, "CAUSAL": causal, "SIDE": side}
    products = {"E": width, "scale": scale, "BLOCK_E": block_e, **shared}
    for some_rows, some_heads in pieces:
        q_part = (some_rows, slice(some_heads.start * group, some_heads.stop * group))
        k_part = (some_rows, some_heads)
        some_q, some_k, some_v, some_dout = q[q_part], k[k_part], v[k_part], dout[q_part]
        some_dq, some_dk, some_dv = dq[q_part], dk[k_part], dv[k_part]
        if polar_form is not None:
            some_q = polar(some_q, *_part(polar_form.q_angle, polar_form.phase, *q_part), polar_form.kind)
            some_k = polar(some_k, *_part(polar_form.k_angle, None, *k_part), polar_form.kind)
            some_dq, some_dk = expanded_like(some_q, width), expanded_like(some_k, width)
        queries_at_once, keys_at_once = some_q.shape[0] * some_q.shape[1], some_k.shape[0] * some_k.shape[1]
        key_heads_here = some_k.shape[1]
        score_grad_kernel[(keys_at_once, sides)](
            describe(some_q, block_m, block_e), describe(some_k, side, block_e), describe(some_v, side, block_d),
            describe(some_dout, block_m, block_d), stored(side, block_m), lse[q_part], delta[q_part],
            some_dv, some_dv.stride(), KEY_HEADS=key_heads_here, D=value_width,
            scale_log2=scale * math.log2(math.e), BLOCK_D=block_d, **(shared | meta),
        )  # fmt: skip
        query_product_kernel[(queries_at_once, sides)](
            stored(query_n, side), describe(some_k, query_n, block_e), some_dq, some_dq.stride(),
            H=some_q.shape[1], **products, **query_meta,
        )  # fmt: skip
        key_product_kernel[(keys_at_once, sides)](
            stored(side, key_m), describe(some_q, key_m, block_e), some_dk, some_dk.stride(),
            KEY_HEADS=key_heads_here, **products, **key_meta,
        )  # fmt: skip
        if polar_form is not None and q_turn is not None and k_turn is not None:
            turned = polar_backward(q[q_part], q_turn.part(*q_part), polar_form.kind, some_dq, dq[q_part])
            polar_backward(k[k_part], k_turn.part(*k_part), polar_form.kind, some_dk, dk[k_part])
            if dphase is not None and turned is not None:
                dphase[q_part[1]] += turned
    return dq, dk, dv, dphase


def _part(angle: Tensor, phase: Tensor | None, rows: slice, heads: slice) -> tuple[Tensor, Tensor | None]:
    return angle if angle.shape[0] == 1 else angle[rows], None if phase is None else phase[heads]
