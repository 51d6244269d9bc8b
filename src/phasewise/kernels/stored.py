"""The backward of wide attention by way of stored score gradients, a bounded number of them at a time.

At widths (256, 128) the scores and dp cost 384 of the 1408 units of a two-pass backward, which makes them twice.
Here one pass per key tile makes dv and writes ds, in the inputs' precision, to a buffer; dq = ds k and dk = ds^T q
are then plain matrix products, made in one launch. Nothing is added atomically. For the static path: as many queries
as keys, causal or full, no window.

Letters as in `body`. The buffer holds ds^T in square blocks of SIDE keys by SIDE queries: for a head the blocks of
its first queries with all visible blocks of keys, then those of the next queries. It takes the queries from the
block `first` up to the block `last`; of a long sequence that is a part, and what dk and dv have gathered so far
waits in float32 until all queries were seen.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phasewise.kernels.body import load_tile
from phasewise.kernels.hardware import capability
from phasewise.kernels.prepare import fast, load_angle, magnitude, row_step, tile_of, turn
from phasewise.kernels.tiles import UNSEEN, block_width, ceil_div, describe, launch

PLACES = (
    "first",
    "last",
    "blocks",
    "sides",
    "heads",
    "together",
)  # not to be compiled for anew when they change
HOPPER_ROWS = 64  # keys of a group of warps there: the rows of one tensor core instruction


@triton.jit
def place(at, tiles, heads, together):
    """Tile and head of program `at`: the tiles of `together` heads, whose inputs stay in the cache, before others."""
    first = at // (tiles * together) * together
    within = at - first * tiles
    here = tl.minimum(together, heads - first)
    return within // here, first + within % here


@triton.jit
def block_at(head, keys, queries, first, blocks, sides, SIDE: tl.constexpr, CAUSAL: tl.constexpr):
    """The buffer row of a head's block of the keys and queries (counted in blocks), of `blocks` a head."""
    if CAUSAL:
        within = queries * (queries + 1) // 2 - first * (first + 1) // 2 + keys
    else:
        within = (queries - first) * sides + keys
    return (head * blocks + within) * SIDE


@triton.jit
def sum_at(sum_ptr, head, tile, sides, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the float32 sums of a key tile wait for the next queries: [heads, sides, SIDE, BLOCK]."""
    row = (head * sides + tile).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    return sum_ptr + row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def load_raw(x_ptr, x_strides, b, h, tile, T, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):
    """The tile that was expanded to polar coordinates; 0 without a KIND."""
    if KIND is None:
        return 0
    else:
        t = tile * ROWS + tl.arange(0, ROWS)
        c = tl.arange(0, BLOCK_E // 2)
        return tl.load(tile_of(x_ptr, x_strides, b, h, t, c), (t < T)[:, None], other=0.0)


@triton.jit
def write(
    grad, out_ptr, out_strides, x, angle_ptr, angle_row, phase_ptr, phases_ptr, phases_strides,
    b, h, tile, T, E, keep,
    KIND: tl.constexpr, FAST: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A tile's gradient, or with a KIND that of x, expanded to polar coordinates, and its sum of the phases."""
    t = tile * ROWS + tl.arange(0, ROWS)
    kind = out_ptr.dtype.element_ty
    if KIND is None:
        e = tl.arange(0, BLOCK_E)
        inside = (t[:, None] < T) & (e[None, :] < E) & keep
        tl.store(tile_of(out_ptr, out_strides, b, h, t, e), grad.to(kind), inside)
    else:
        D: tl.constexpr = BLOCK_E // 2
        grad_cos, grad_sin = grad.reshape([ROWS, 2, D]).permute(0, 2, 1).split()
        c = tl.arange(0, D)
        inside = (t[:, None] < T) & (c[None, :] < D) & keep
        angle = load_angle(angle_ptr, b * angle_row, t, c, T, D)
        if phase_ptr is not None:
            angle -= tl.load(phase_ptr + h * D + c)[None, :]
        cos, sin = turn(angle, FAST)
        mu, slope = magnitude(x.to(tl.float32), KIND, FAST)
        dx = (grad_cos * cos + grad_sin * sin) * slope
        tl.store(tile_of(out_ptr, out_strides, b, h, t, c), dx.to(kind), inside)
        if phase_ptr is not None:
            turned = tl.where(inside, mu * (grad_cos * sin - grad_sin * cos), 0.0)
            row = phases_ptr + b * phases_strides[0] + h * phases_strides[2]
            row += tile.to(tl.int64) * phases_strides[1]
            tl.store(row + c, tl.sum(turned, 0))


@triton.jit(do_not_specialize=PLACES)
def score_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, ds_desc, lse2_ptr, delta_ptr, dv_ptr, dv_strides, sum_ptr,
    first, last, blocks, sides, heads, together, KEY_HEADS, GROUP, T, PADDED, D, scale_log2,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, SIDE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dv [B, H / GROUP, T, D] = p^T dout, and ds^T into the buffer; the keys most looked at first."""
    tile, key_head = place(tl.program_id(0), last if CAUSAL else sides, heads, together)
    b = key_head // KEY_HEADS
    key = key_head % KEY_HEADS
    n = tile * SIDE
    j = n + tl.arange(0, SIDE)
    k = load_tile(k_desc, b, key, n)
    v = load_tile(v_desc, b, key, n)
    dv = tl.zeros([SIDE, BLOCK_D], tl.float32)
    low = first * SIDE
    high = tl.minimum(last * SIDE, T)
    if CAUSAL:
        low = tl.maximum(low, n)
    if sum_ptr is not None:
        waiting = sum_at(sum_ptr, key_head, tile, sides, SIDE, BLOCK_D)
        dv = tl.load(waiting, first > (tile if CAUSAL else 0), other=0.0)
    masked_up_to = tl.where(n + SIDE > T, T, n + SIDE - 1 if CAUSAL else 0)
    for member in range(GROUP):
        h = key * GROUP + member
        head = b * KEY_HEADS * GROUP + h
        for m in tl.range(low, high, BLOCK_M):
            q = load_tile(q_desc, b, h, m)
            dout = load_tile(dout_desc, b, h, m)
            i = m + tl.arange(0, BLOCK_M)
            row = head.to(tl.int64) * PADDED + i
            lse = tl.load(lse2_ptr + row)
            delta = tl.load(delta_ptr + row)
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
            at = block_at(head, tile, m // SIDE, first, blocks, sides, SIDE, CAUSAL)
            ds_desc.store([at, m % SIDE], ds.to(q.dtype))
    if sum_ptr is not None:
        tl.store(sum_at(sum_ptr, key_head, tile, sides, SIDE, BLOCK_D), dv, last < sides)
    d = tl.arange(0, BLOCK_D)
    dv_at = tile_of(dv_ptr, dv_strides, b.to(tl.int64), key, j, d)
    inside = (j[:, None] < T) & (d[None, :] < D)
    tl.store(dv_at, dv.to(dv_ptr.dtype.element_ty), inside & (last == sides))


@triton.jit
def key_product(
    tile, key_head, ds_desc, q_desc, dk_ptr, dk_strides, sum_ptr, x_ptr, x_strides, angle_ptr, angle_row,
    first, last, blocks, sides, KEY_HEADS, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr,
    BLOCK_K: tl.constexpr, SIDE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A tile's gradient of keys, from dk [B, H / GROUP, T, E] = scale ds^T q, BLOCK_K queries at a time."""
    b = key_head // KEY_HEADS
    key = key_head % KEY_HEADS
    n = tile * SIDE
    dk = tl.zeros([SIDE, BLOCK_E], tl.float32)
    low = first * SIDE
    high = tl.minimum(last * SIDE, T)
    if CAUSAL:
        low = tl.maximum(low, n)
    if sum_ptr is not None:
        waiting = sum_at(sum_ptr, key_head, tile, sides, SIDE, BLOCK_E)
        dk = tl.load(waiting, first > (tile if CAUSAL else 0), other=0.0)
    for member in range(GROUP):
        h = key * GROUP + member
        head = b * KEY_HEADS * GROUP + h
        for m in tl.range(low, high, BLOCK_K):
            row = block_at(head, tile, m // SIDE, first, blocks, sides, SIDE, CAUSAL)
            ds = ds_desc.load([row, m % SIDE])
            q = load_tile(q_desc, b, h, m)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
    if sum_ptr is not None:
        tl.store(sum_at(sum_ptr, key_head, tile, sides, SIDE, BLOCK_E), dk, last < sides)
    x = load_raw(x_ptr, x_strides, b.to(tl.int64), key, tile, T, KIND, SIDE, BLOCK_E)
    write(
        dk * scale, dk_ptr, dk_strides, x, angle_ptr, angle_row, None, None, None,
        b.to(tl.int64), key, tile, T, E, last == sides, KIND, FAST, SIDE, BLOCK_E,
    )  # fmt: skip


@triton.jit
def query_product(
    tile, head, ds_desc, k_desc, dq_ptr, dq_strides, x_ptr, x_strides, angle_ptr, angle_row, phase_ptr, phases_ptr,
    phases_strides, first, last, blocks, sides, H, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr,
    BLOCK_K: tl.constexpr, SIDE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A tile's gradient of queries, from dq [B, H, T, E] = scale ds k, BLOCK_K keys at a time."""
    b = head // H
    h = head % H
    m = tile * SIDE
    # On its way while the product is made; a program that makes dk has no registers to spare for it.
    x = load_raw(x_ptr, x_strides, b.to(tl.int64), h, tile, T, KIND, SIDE, BLOCK_E)
    dq = tl.zeros([SIDE, BLOCK_E], tl.float32)
    for n in tl.range(0, tl.minimum(m + SIDE, T) if CAUSAL else T, BLOCK_K):
        row = block_at(head, n // SIDE, tile, first, blocks, sides, SIDE, CAUSAL)
        ds = ds_desc.load([row + n % SIDE, 0])
        k = load_tile(k_desc, b, h // GROUP, n)
        dq = tl.dot(ds.T, k, dq, input_precision="ieee")
    write(
        dq * scale, dq_ptr, dq_strides, x, angle_ptr, angle_row, phase_ptr, phases_ptr, phases_strides,
        b.to(tl.int64), h, tile, T, E, True, KIND, FAST, SIDE, BLOCK_E,
    )  # fmt: skip


@triton.jit(do_not_specialize=PLACES)
def products_kernel(
    q_ds_desc, k_desc, dq_ptr, dq_strides, q_raw_ptr, q_raw_strides, q_angle_ptr, q_angle_row,
    phase_ptr, phases_ptr, phases_strides,
    k_ds_desc, q_desc, dk_ptr, dk_strides, sum_ptr, k_raw_ptr, k_raw_strides, k_angle_ptr, k_angle_row,
    first, last, blocks, sides, heads, together, KEY_HEADS, GROUP, T, E, scale,
    CAUSAL: tl.constexpr, KIND: tl.constexpr, FAST: tl.constexpr,
    BLOCK_K: tl.constexpr, SIDE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`query_product`, longest rows first, then `key_product` of `together` heads of keys, before those of others.

    In one launch, as the later parts of a long sequence have fewer programs of queries than there are processors.
    """
    at = tl.program_id(0)
    several = together * (GROUP * (last - first) + (last if CAUSAL else sides))
    first_head = at // several * together
    here = tl.minimum(together, heads - first_head)
    at %= several
    programs = here * GROUP * (last - first)
    if at < programs:
        query_product(
            last - 1 - at // (here * GROUP), first_head * GROUP + at % (here * GROUP),
            q_ds_desc, k_desc, dq_ptr, dq_strides, q_raw_ptr, q_raw_strides, q_angle_ptr, q_angle_row,
            phase_ptr, phases_ptr, phases_strides, first, last, blocks, sides, KEY_HEADS * GROUP, GROUP, T, E, scale,
            CAUSAL, KIND, FAST, BLOCK_K, SIDE, BLOCK_E,
        )  # fmt: skip
    else:
        at -= programs
        key_product(
            at // here, first_head + at % here,
            k_ds_desc, q_desc, dk_ptr, dk_strides, sum_ptr, k_raw_ptr, k_raw_strides, k_angle_ptr, k_angle_row,
            first, last, blocks, sides, KEY_HEADS, GROUP, T, E, scale, CAUSAL, KIND, FAST, BLOCK_K, SIDE, BLOCK_E,
        )  # fmt: skip


def score_grad(
    grid: tuple[int], q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
    stored: Callable[[int, int], TensorDescriptor], rows: tuple[Tensor, Tensor], into: tuple, **numbers: Any,
) -> None:  # fmt: skip
    """`score_grad_kernel`, or what takes its place where the hardware has more to offer."""
    hopper = capability(q.device) == (9, 0)
    block_m, block_e, block_d = numbers["BLOCK_M"], block_width(q.shape[3]), block_width(v.shape[3])
    keys = HOPPER_ROWS if hopper else numbers["SIDE"]
    descriptors = (
        describe(q, block_m, block_e), describe(k, keys, block_e), describe(v, keys, block_d),
        describe(dout, block_m, block_d), stored(keys, block_m),
    )  # fmt: skip
    if hopper:
        from phasewise.kernels import stored_hopper, tapa_joint

        statistics = (tapa_joint.tiled(x.flatten(0, 1), (1, block_m)) for x in rows)
        stored_hopper.score_grad_kernel[grid](
            *map(stored_hopper.laid_out, descriptors), *statistics, *into, **numbers
        )
    else:
        score_grad_kernel[grid](
            *descriptors, *rows, *into, PADDED=rows[0].shape[2], BLOCK_D=block_d, **numbers
        )


class Polar(NamedTuple):
    """What `prepare.polar` made queries and keys from, to which their gradients go back; of a power of two channels.

    sums: the gradient of the phase by tiles, of as many places as `side` says, as `prepare.phase_sums` lays them out.
    """

    kind: str
    q: Tensor
    k: Tensor
    q_angle: Tensor
    k_angle: Tensor
    phase: Tensor | None
    sums: Tensor | None

    @property
    def of_queries(self) -> tuple:
        """What the query product carries back by."""
        strides = None if self.sums is None else self.sums.stride()[:3]
        return self.q, self.q.stride(), self.q_angle, row_step(self.q_angle), self.phase, self.sums, strides

    @property
    def of_keys(self) -> tuple:
        """What the key product carries back by."""
        return self.k, self.k.stride(), self.k_angle, row_step(self.k_angle)


def side(q: Tensor, width: int, v: Tensor) -> int:
    """How many places a block of score gradients has on each side, for queries of a width and values v."""
    return launch("separable.score_grad", q, qk=width, v=v.shape[3], length=q.shape[2])["SIDE"]


def pieces(q: Tensor, k: Tensor, *, wide: int, limit: int, causal: bool) -> list[tuple[slice, slice]]:
    """Rows and key heads to work on together: as many as `limit` elements of score gradients and of what is wide serve,
    which are `wide` times as many as q and k have.

    They are whole rows, or heads of one row; at least two heads, as one leaves processors idle.
    """
    rows, key_heads = k.shape[:2]
    expanded = wide * (q.numel() + k.numel()) // (rows * key_heads)
    at_once = max(min(2, key_heads), limit // (_pairs(q, k, causal) + expanded))
    if at_once >= key_heads:
        step = ceil_div(rows, ceil_div(rows, at_once // key_heads))
        return [(slice(row, min(row + step, rows)), slice(0, key_heads)) for row in range(0, rows, step)]
    step = ceil_div(key_heads, ceil_div(key_heads, at_once))
    starts = range(0, key_heads, step)
    parts = [slice(head, min(head + step, key_heads)) for head in starts]
    return [(slice(row, row + 1), part) for row in range(rows) for part in parts]


def _pairs(q: Tensor, k: Tensor, causal: bool) -> int:
    """About how many pairs of a query and a key one key head sees."""
    return max(1, q.shape[1] // k.shape[1] * q.shape[2] ** 2 // (2 if causal else 1))


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor,
    into: tuple[Tensor, Tensor, Tensor], *, polar: Polar | None, limit: int, scale: float, causal: bool,
) -> None:  # fmt: skip
    """`body.backward` for as many queries as keys, no window, no positions and no slopes.

    polar: what dq and dk are the gradients of, if not of q and k. lse2 and delta are `body.row_statistics`. limit
    bounds the elements of ds, about: queries are taken in as many parts as that needs.
    """
    rows, heads, length, width = q.shape
    key_heads, value_width = v.shape[1], v.shape[3]
    dq, dk, dv = into
    meta, product_meta = (
        launch(f"separable.{name}", q, qk=width, v=value_width, length=length)
        for name in ("score_grad", "products")
    )
    side, block_m, block_k = meta["SIDE"], meta["BLOCK_M"], product_meta["BLOCK_K"]
    assert side % block_m == 0, "blocks are made up of whole tiles of queries"
    assert side % block_k == 0, "blocks are made up of whole tiles of queries and of keys"
    assert block_m % block_k == 0, "the products read only what was written"
    block_e, block_d = block_width(width), block_width(value_width)
    sides = ceil_div(length, side)

    def blocks_before(queries: int) -> int:
        return queries * (queries + 1) // 2 if causal else queries * sides

    parts = ceil_div(rows * key_heads * _pairs(q, k, causal), limit)
    bounds = [round(sides * (part / parts) ** (0.5 if causal else 1.0)) for part in range(parts + 1)]
    ranges = [(first, last, blocks_before(last) - blocks_before(first)) for first, last in pairwise(bounds)]
    ds = q.new_empty(rows * heads * max(blocks for *_, blocks in ranges) * side, side)
    dk_sum, dv_sum = (
        None if parts == 1 else q.new_empty(rows * key_heads, sides * side, block, dtype=torch.float32)
        for block in (block_e, block_d)
    )

    def stored(keys: int, queries: int) -> TensorDescriptor:
        return TensorDescriptor(ds, list(ds.shape), [side, 1], [keys, queries])

    shared = {"sides": sides, "GROUP": heads // key_heads, "T": length, "CAUSAL": causal, "SIDE": side}
    products = {"E": width, "scale": scale, "BLOCK_E": block_e, "KIND": polar and polar.kind, "FAST": fast(q)}
    for first, last, blocks in ranges:
        if first == last:
            continue
        here = {"first": first, "last": last, "blocks": blocks, **shared}
        key_tiles = last if causal else sides
        score_grad(
            (rows * key_heads * key_tiles,), q, k, v, dout, stored, (lse2, delta), (dv, dv.stride(), dv_sum),
            heads=rows * key_heads, KEY_HEADS=key_heads, D=value_width,
            scale_log2=scale * math.log2(math.e), **(here | meta),
        )  # fmt: skip
        products_kernel[(rows * (heads * (last - first) + key_heads * key_tiles),)](
            stored(block_k, side), describe(k, block_k, block_e), dq, dq.stride(),
            *((None,) * 7 if polar is None else polar.of_queries),
            stored(side, block_k), describe(q, block_k, block_e), dk, dk.stride(), dk_sum,
            *((None,) * 4 if polar is None else polar.of_keys),
            heads=rows * key_heads, KEY_HEADS=key_heads, **products, **here, **product_meta,
        )  # fmt: skip
