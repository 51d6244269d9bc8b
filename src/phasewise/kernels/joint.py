"""The backward in one pass for compute capability 9.0: each score is made once and gives all three gradients.

Letters as in `body`. A program owns 128 keys, 64 of them for each of two groups of warps, and walks over the queries
that see them. Score gradients of a step go to shared memory; in the next step each group makes half of the channels
of the queries' gradient from both groups' ds, so that the groups may be most of a step apart and one makes p and ds
while the tensor cores work for the other. One warp loads ahead, two add up the queries' gradient in an order that
never varies (tapa_turns.py). Of even heads that is later keys first: neighbours walk two steps apart, about what a
turn takes. Of odd heads it is the first keys first, from the last queries on, so that a launch ends with short
programs: they begin one after another, as those of even heads before them end.

For as many queries as keys, causal, without window, positions or slopes, in half precision. It has no interpreter;
`body.backward` states the same.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# Kernels annotate compile-time values as gl.constexpr and use them as what they hold.

import math

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phasewise.kernels.stored_hopper import await_group, exp2, laid_out, tile_in
from phasewise.kernels.tapa_joint import tiled, unknown_zero
from phasewise.kernels.tapa_turns import await_turn, begin_adding, end_turn, queries_of, turn_of, work_of
from phasewise.kernels.tiles import UNSEEN, ceil_div, describe, launch

GROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # keys of a group: the rows of one tensor core instruction
HALVES = gl.constexpr(2)  # of the channels of queries and keys, each a tile that the tensor cores read whole
SIDE_BY_SIDE = 32_768  # queries walked over at once, whose inputs and sums the second-level cache holds
HELD = gl.constexpr(256)  # float32 sums side by side, as the copy engine takes them


@gluon.jit
def turn_in(stride, tile, m, T, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many tiles of keys add to the tile of queries at m before this one, in a head that walks by `stride`."""
    return gl.where(stride > 0, turn_of(tile, m, T, T, BLOCK_M, BLOCK_N), tile)


@gluon.jit
def queries_at(step, start, stride, count):
    """Member of the group of query heads and first query of a step: for each `count` tiles from `start` by `stride`."""
    member = step // count
    return member, start + (step - member * count) * stride


@gluon.jit
def load(
    q_desc, k_desc, v_desc, dout_desc, row_descs, k_smem, v_smem, q_smem, dout_smem, row_smem, keys_ready, full, empty,
    b, key, heads, n, start, stride, count, GROUP: gl.constexpr,
):  # fmt: skip
    """Keys and values once; then tile by tile what belongs to queries, as soon as their stage is free."""
    HALF: gl.constexpr = q_desc.block_shape[3]
    STAGES: gl.constexpr = dout_smem.shape[0]
    BYTES: gl.constexpr = (
        HALVES * q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 2 * row_descs[0].block_type.nbytes
    )
    mbarrier.expect(keys_ready, GROUPS * (HALVES * k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for group in gl.static_range(GROUPS):
        first = n + ROWS * group
        for half in gl.static_range(HALVES):
            place = k_smem.index(HALVES * group + half)
            tma.async_copy_global_to_shared(k_desc, [b, key, first, HALF * half], keys_ready, place)
        tma.async_copy_global_to_shared(v_desc, [b, key, first, 0], keys_ready, v_smem.index(group))
    for step in range(GROUP * count):
        member, m = queries_at(step, start, stride, count)
        h = key * GROUP + member
        at = [b * heads * GROUP + h, m]
        stage = step % STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
        mbarrier.expect(ready, BYTES)
        for half in gl.static_range(HALVES):
            place = q_smem.index(HALVES * stage + half)
            tma.async_copy_global_to_shared(q_desc, [b, h, m, HALF * half], ready, place)
        tma.async_copy_global_to_shared(dout_desc, [b, h, m, 0], ready, dout_smem.index(stage))
        for part in gl.static_range(2):
            tma.async_copy_global_to_shared(row_descs[part], at, ready, row_smem[part].index(stage))


@gluon.jit
def add_queries(
    sum_desc, turn_ptr, grads, ready, free, first_tile, tiles, tile, start, stride, count, T,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, PARITY: gl.constexpr,
):  # fmt: skip
    """Adds what every other step gives to dq to what the programs of later keys have added."""
    SUM_ROWS: gl.constexpr = sum_desc.block_shape[0]
    for step in range(PARITY, GROUP * count, 2):
        member, m = queries_at(step, start, stride, count)
        at = first_tile + member * tiles + m // BLOCK_M
        turn = turn_in(stride, tile, m, T, BLOCK_M, BLOCK_N)
        mbarrier.wait(ready.index(PARITY), step // 2 & 1)
        await_turn(turn_ptr + at, turn)
        for half in gl.static_range(HALVES):
            place = [(HALVES * at + half) * SUM_ROWS, 0]
            if turn == 0:
                tma.async_copy_shared_to_global(sum_desc, place, grads.index(HALVES * PARITY + half))
            else:
                begin_adding(sum_desc, place, grads.index(HALVES * PARITY + half))
        tma.store_wait(0)
        mbarrier.arrive(free.index(PARITY))
        end_turn(turn_ptr + at, turn + 1)


@gluon.jit
def begin_scores(group, stage, step, k_smem, q_smem):
    """Begins k q^T for a group's keys and the queries of a stage."""
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, LAYOUT)
    own = unknown_zero(step) + HALVES * group
    first = tile_in(q_smem, HALVES * stage).permute((1, 0))
    second = tile_in(q_smem, HALVES * stage + 1).permute((1, 0))
    scores = warpgroup_mma(tile_in(k_smem, own), first, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(tile_in(k_smem, own + 1), second, scores, is_async=True)


@gluon.jit
def begin_queries(half, last, k_smem, ds_smem, BY_CHANNELS: gl.constexpr):
    """Begins a half of dq, or of dq^T BY_CHANNELS, of the step `last`, for all keys; of a step -1, anything."""
    BLOCK_M: gl.constexpr = ds_smem.shape[2]
    HALF: gl.constexpr = k_smem.shape[4]
    first = unknown_zero(last) + half
    at = (last & 1) * GROUPS
    if BY_CHANNELS:
        CHANNELS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
        nothing = gl.zeros([HALF, BLOCK_M], gl.float32, CHANNELS)
        k = tile_in(k_smem, first).permute((1, 0))
        dq = warpgroup_mma(k, ds_smem.index(at), nothing, use_acc=False, is_async=True)
        k = tile_in(k_smem, first + HALVES).permute((1, 0))
        dq = warpgroup_mma(k, ds_smem.index(at + 1), dq, is_async=True)
    else:
        PLACES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        nothing = gl.zeros([BLOCK_M, HALF], gl.float32, PLACES)
        ds = ds_smem.index(at).permute((1, 0))
        dq = warpgroup_mma(ds, tile_in(k_smem, first), nothing, use_acc=False, is_async=True)
        ds = ds_smem.index(at + 1).permute((1, 0))
        dq = warpgroup_mma(ds, tile_in(k_smem, first + HALVES), dq, is_async=True)
    return dq


@gluon.jit
def as_held(x):
    """64 rows in the order of `prepare.held_by_threads`: 16 bytes of a thread side by side."""
    COLUMNS: gl.constexpr = x.shape[1]
    parts = gl.permute(gl.reshape(x, [4, 2, 8, COLUMNS // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    return gl.reshape(parts, [ROWS * COLUMNS // HELD, HELD])


@gluon.jit
def gradients(
    group: gl.constexpr, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, grads, keys_ready, full, empty, stored,
    ready, free, first_in, dk_ptr, dk_strides, dv_ptr, dv_strides, b, key, n, start, stride, count, T,
    scale, scale_log2, GROUP: gl.constexpr, AHEAD: gl.constexpr, BY_CHANNELS: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, and half of the channels of what all keys of the program add to dq."""
    STAGES: gl.constexpr = dout_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    HALF: gl.constexpr = q_smem.shape[4]
    BLOCK_D: gl.constexpr = dout_smem.shape[4]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    v_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    dtype: gl.constexpr = q_smem.dtype
    first = n + ROWS * group
    j = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, score_layout))
    dk_first = gl.zeros([ROWS, HALF], gl.float32, dk_layout)
    dk_second = gl.zeros([ROWS, HALF], gl.float32, dk_layout)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, dv_layout)
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, score_layout)
    steps = GROUP * count
    mbarrier.wait(keys_ready, 0)
    if AHEAD:
        v_held = tile_in(v_smem, group).load(v_layout)
        mbarrier.wait(full.index(0), 0)
        scores = begin_scores(group, unknown_zero(n), n, k_smem, q_smem)
        scores = warpgroup_mma_wait(0, deps=[scores])
    for step in range(steps):
        _, m = queries_at(step, start, stride, count)
        stage = step % STAGES
        parity = step & 1
        other = parity ^ 1
        dout = tile_in(dout_smem, stage)
        if AHEAD:
            dp = warpgroup_mma(v_held, dout.permute((1, 0)), nothing, use_acc=False, is_async=True)
        else:
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            scores = begin_scores(group, stage, step, k_smem, q_smem)
            v = tile_in(v_smem, unknown_zero(step) + group)
            dp = warpgroup_mma(v, dout.permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
        if m < first + ROWS - 1:
            scores = gl.where(j[:, None] <= (m + columns)[None, :], scores, UNSEEN)
        lse2 = row_smem[0].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, score_layout))
        p = exp2(scores * scale_log2 - lse2[None, :])
        p_half = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, dv_layout, 2))
        dv = warpgroup_mma(p_half, dout, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        delta = row_smem[1].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, score_layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        # Both groups have made dq of what lies there.
        mbarrier.wait(ready.index(parity), (step // 2 + 1) & 1)
        ds_smem.index(parity * GROUPS + group).store(ds)
        fence_async_shared()
        await_group()
        mbarrier.arrive(stored.index(parity))
        if AHEAD:
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
        mbarrier.wait(stored.index(other), ((step + 1) // 2 + 1) & 1)
        if AHEAD:
            mbarrier.wait(first_in.index(group), (step + 1 + group) & 1)
        dq = begin_queries(group, step - 1, k_smem, ds_smem, BY_CHANNELS)
        ds_half = gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout, 2))
        dk_first = warpgroup_mma(ds_half, tile_in(q_smem, HALVES * stage), dk_first, is_async=True)
        dk_second = warpgroup_mma(ds_half, tile_in(q_smem, HALVES * stage + 1), dk_second, is_async=True)
        if AHEAD:
            following = step + 1
            next_stage = following % STAGES
            mbarrier.wait(full.index(next_stage), following // STAGES & 1, pred=following < steps)
            scores = begin_scores(group, next_stage, step, k_smem, q_smem)
            dv, dq = warpgroup_mma_wait(4, deps=[dv, dq])
        else:
            dv, dq = warpgroup_mma_wait(2, deps=[dv, dq])
        mbarrier.wait(free.index(other), ((step + 1) // 2) & 1, pred=step > 0)
        grads.index(HALVES * other + group).store(as_held(dq))
        fence_async_shared()
        await_group()
        mbarrier.arrive(ready.index(other), pred=step > 0)
        if AHEAD:
            scores, dk_first, dk_second = warpgroup_mma_wait(0, deps=[scores, dk_first, dk_second])
            mbarrier.arrive(first_in.index(1 - group))
        else:
            dk_first, dk_second = warpgroup_mma_wait(0, deps=[dk_first, dk_second])
            await_group()
            mbarrier.arrive(empty.index(stage))
    last = steps & 1 ^ 1
    mbarrier.wait(stored.index(last), ((steps + 1) // 2 + 1) & 1)
    dq = begin_queries(group, steps - 1, k_smem, ds_smem, BY_CHANNELS)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.wait(free.index(last), ((steps + 1) // 2) & 1)
    grads.index(HALVES * last + group).store(as_held(dq))
    fence_async_shared()
    await_group()
    mbarrier.arrive(ready.index(last))
    store_rows(dk_ptr, dk_strides, b, key, first, 0, T, dk_first * scale)
    store_rows(dk_ptr, dk_strides, b, key, first, HALF, T, dk_second * scale)
    store_rows(dv_ptr, dv_strides, b, key, first, 0, T, dv)


@gluon.jit
def store_rows(ptr, strides, b, h, first_row, first_column, length, values):
    """Rows of one head of a tensor [B, H, T, D], from a column on."""
    LAYOUT: gl.constexpr = values.type.layout
    rows = first_row + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    columns = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    ptr += b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    at = rows.to(gl.int64)[:, None] * strides[2] + columns[None, :] * strides[3]
    gl.store(ptr + at, values.to(ptr.dtype.element_ty), (rows < length)[:, None])


@gluon.jit(do_not_specialize=("KEY_HEADS", "T", "together"))
def joint_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse2_desc, delta_desc, sum_desc,
    dk_ptr, dk_strides, dv_ptr, dv_strides, turn_ptr, KEY_HEADS, T, together, scale, scale_log2,
    GROUP: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, BY_CHANNELS: gl.constexpr,
):  # fmt: skip
    """dk, dv and, tile by tile, the unscaled dq in float32; turn_ptr: all zeros."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    HALF: gl.constexpr = q_desc.block_shape[3]
    key_tiles = gl.cdiv(T, BLOCK_N)
    tiles = gl.cdiv(T, BLOCK_M)
    ticket = gl.atomic_add(turn_ptr, 1, sem="relaxed")
    key_head, tile, way = work_of(
        ticket, gl.num_programs(0) // key_tiles, together, key_tiles, 2 - KEY_HEADS % 2
    )
    b = key_head // KEY_HEADS
    key = key_head % KEY_HEADS
    n = tile * BLOCK_N
    low, _, count = queries_of(tile, T, T, BLOCK_M, BLOCK_N)
    start = low + way * (count - 1) * BLOCK_M
    stride = (1 - 2 * way) * BLOCK_M
    k_smem = gl.allocate_shared_memory(dtype, [GROUPS * HALVES, 1, 1, ROWS, HALF], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [GROUPS, 1, 1, ROWS, v_desc.block_shape[3]], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES * HALVES, 1, 1, BLOCK_M, HALF], q_desc.layout)
    dout_smem = gl.allocate_shared_memory(
        dtype, [STAGES, 1, 1, BLOCK_M, dout_desc.block_shape[3]], dout_desc.layout
    )
    row_smem = (
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse2_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_desc.layout),
    )
    DS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK_M, element_bitwidth=16, rank=2)
    ds_smem = gl.allocate_shared_memory(dtype, [2 * GROUPS, ROWS, BLOCK_M], DS)
    grads = gl.allocate_shared_memory(
        gl.float32, [2 * HALVES, sum_desc.block_shape[0], HELD], sum_desc.layout
    )
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], ONE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    # stored: both groups' ds of a step are there; ready: so are both halves of its dq; free: which have been taken
    stored = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    # first_in: a group may begin its products, as the other one's are done. Made only where it is waited for: the
    # compiler writes what it hands to partitions over a barrier that none of them takes, and when processes share a
    # GPU, each change between them puts the barrier back.
    first_in = ()
    if AHEAD:
        first_in = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], ONE)
    mbarrier.init(keys_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    for parity in gl.static_range(2):
        mbarrier.init(stored.index(parity), count=GROUPS)
        mbarrier.init(ready.index(parity), count=GROUPS)
        mbarrier.init(free.index(parity), count=1)
        if AHEAD:
            mbarrier.init(first_in.index(parity), count=1)
    fence_async_shared()
    turns = turn_ptr + 1
    first_tile = key_head * GROUP * tiles
    gl.warp_specialize(
        [
            (gradients, (
                0, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, grads, keys_ready, full, empty, stored, ready,
                free, first_in, dk_ptr, dk_strides, dv_ptr, dv_strides, b, key, n, start, stride, count, T,
                scale, scale_log2, GROUP, AHEAD, BY_CHANNELS,
            )),
            (gradients, (
                1, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, grads, keys_ready, full, empty, stored, ready,
                free, first_in, dk_ptr, dk_strides, dv_ptr, dv_strides, b, key, n, start, stride, count, T,
                scale, scale_log2, GROUP, AHEAD, BY_CHANNELS,
            )),
            (load, (
                q_desc, k_desc, v_desc, dout_desc, (lse2_desc, delta_desc), k_smem, v_smem, q_smem, dout_smem, row_smem,
                keys_ready, full, empty, b, key, KEY_HEADS, n, start, stride, count, GROUP,
            )),
            (add_queries, (
                sum_desc, turns, grads, ready, free, first_tile, tiles, tile, start, stride, count, T,
                BLOCK_M, BLOCK_N, GROUP, 0,
            )),
            (add_queries, (
                sum_desc, turns, grads, ready, free, first_tile, tiles, tile, start, stride, count, T,
                BLOCK_M, BLOCK_N, GROUP, 1,
            )),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor, into: tuple[Tensor, Tensor],
    *, scale: float, by_channels: bool,
) -> Tensor:  # fmt: skip
    """Writes the gradients of k and v, of which k's may take k's place, and gives that of q but for its scale.

    That is float32 `[B, H, T / 64, 2, 32 E]`, for 64 places the halves of their channels in the order of
    `prepare.held_by_threads`: rows are places, or channels if so asked. lse2 and delta are `body.row_statistics`.
    """
    rows, heads, length, width = q.shape
    key_heads, value_width = v.shape[1], v.shape[3]
    dk, dv = into
    meta = launch("separable.joint", q, qk=width, v=value_width, length=length)
    half, tiles = width // 2, ceil_div(length, 64)
    sums = torch.empty(rows, heads, tiles, 2, 64 * half, dtype=torch.float32, device=q.device)
    turns = torch.zeros(1 + rows * heads * tiles, dtype=torch.int32, device=q.device)
    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    held = sums.view(-1, HELD.value)
    joint_kernel[(ceil_div(length, 128) * rows * key_heads,)](
        *(laid_out(describe(x, 64, half)) for x in (q, k)),
        *(laid_out(describe(x, 64, value_width)) for x in (v, dout)),
        *(tiled(x.view(-1, x.shape[2]), (1, 64)) for x in (lse2, delta)),
        TensorDescriptor(held, list(held.shape), list(held.stride()), [half // 4, HELD.value], plain),
        dk, dk.stride(), dv, dv.stride(), turns, key_heads, length, max(1, SIDE_BY_SIDE // length),
        scale=scale, scale_log2=scale * math.log2(math.e), GROUP=heads // key_heads, BY_CHANNELS=by_channels,
        num_warps=4, **meta,
    )  # fmt: skip
    return sums
