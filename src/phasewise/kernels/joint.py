"""The backward in one pass for compute capability 9.0: each score is made once and gives all three gradients.

Letters as in `body`. A program owns 128 keys, 64 of them for each of two groups of warps, and walks over the queries
that see them. Score gradients of a step go to shared memory; in the next step each group makes half of the channels
of the queries' gradient from both groups' ds, so that the groups may be a step apart and one makes p and ds while the
tensor cores work for the other. One warp loads queries ahead, two add up their gradient in an order that never varies
(tapa_turns.py).

For as many queries as keys, causal, without window, positions or slopes, in half precision, queries of 128 channels.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
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

from phasewise.kernels.stored_hopper import await_group, exp2, laid_out
from phasewise.kernels.tapa_joint import tiled, unknown_zero
from phasewise.kernels.tapa_turns import add_query_grads, queries_of, work_of
from phasewise.kernels.tiles import UNSEEN, ceil_div, describe, launch

GROUPS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # keys of a group: the rows of one tensor core instruction
HALVES = gl.constexpr(
    2
)  # of the channels of queries and keys: tiles of 64, which the tensor cores read whole


@gluon.jit
def tile_in(buffer, stage):
    """One of the tiles of a buffer [count, 1, 1, rows, columns] as a matrix."""
    one = buffer.index(stage)
    shape: gl.constexpr = one.shape
    return one.reshape([shape[2], shape[3]])


@gluon.jit
def load(
    q_desc, k_desc, v_desc, dout_desc, row_descs, k_smem, v_smem, q_smem, dout_smem, row_smem, keys_ready, full, empty,
    b, key, heads, n, low, count, GROUP,
):  # fmt: skip
    """Keys and values once; then tile by tile what belongs to queries, as soon as their stage is free."""
    HALF: gl.constexpr = q_desc.block_shape[3]
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    STAGES: gl.constexpr = dout_smem.shape[0]
    mbarrier.expect(keys_ready, GROUPS * (HALVES * k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for group in gl.static_range(GROUPS):
        first = n + ROWS * group
        for half in gl.static_range(HALVES):
            place = k_smem.index(HALVES * group + half)
            tma.async_copy_global_to_shared(k_desc, [b, key, first, HALF * half], keys_ready, place)
        tma.async_copy_global_to_shared(v_desc, [b, key, first, 0], keys_ready, v_smem.index(group))
    for step in range(GROUP * count):
        member = step // count
        h = key * GROUP + member
        m = low + (step - member * count) * BLOCK_M
        stage = step % STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
        mbarrier.expect(
            ready, HALVES * q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 2 * 4 * BLOCK_M
        )
        for half in gl.static_range(HALVES):
            place = q_smem.index(HALVES * stage + half)
            tma.async_copy_global_to_shared(q_desc, [b, h, m, HALF * half], ready, place)
        tma.async_copy_global_to_shared(dout_desc, [b, h, m, 0], ready, dout_smem.index(stage))
        at = [b * heads * GROUP + h, m]
        for part in gl.static_range(2):
            tma.async_copy_global_to_shared(row_descs[part], at, ready, row_smem[part].index(stage))


@gluon.jit
def query_part(group, last, k_smem, ds_smem):
    """Begins the group's half of dq of the step `last`, for all keys of the program; of a step -1, anything."""
    BLOCK_M: gl.constexpr = ds_smem.shape[2]
    HALF: gl.constexpr = k_smem.shape[4]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    nothing = gl.zeros([BLOCK_M, HALF], gl.float32, LAYOUT)
    zero = unknown_zero(last)
    at = (last & 1) * GROUPS
    first = ds_smem.index(at).permute((1, 0))
    dq = warpgroup_mma(first, tile_in(k_smem, zero + group), nothing, use_acc=False, is_async=True)
    second = ds_smem.index(at + 1).permute((1, 0))
    return warpgroup_mma(second, tile_in(k_smem, zero + HALVES + group), dq, is_async=True)


@gluon.jit
def gradients(
    group: gl.constexpr, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, grads, keys_ready, full, empty, stored,
    ready, free, dk_ptr, dk_strides, dv_ptr, dv_strides, b, key, n, low, count, T, scale, scale_log2, GROUP,
    LATE: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, and half of the channels of what all keys of the program add to dq."""
    STAGES: gl.constexpr = dout_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    HALF: gl.constexpr = q_smem.shape[4]
    BLOCK_D: gl.constexpr = dout_smem.shape[4]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dtype: gl.constexpr = q_smem.dtype
    first = n + ROWS * group
    j = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, score_layout))
    dk_cos = gl.zeros([ROWS, HALF], gl.float32, dk_layout)
    dk_sin = gl.zeros([ROWS, HALF], gl.float32, dk_layout)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, dv_layout)
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, score_layout)
    mbarrier.wait(keys_ready, 0)
    for step in range(GROUP * count):
        member = step // count
        m = low + (step - member * count) * BLOCK_M
        zero = unknown_zero(step)
        k_cos = tile_in(k_smem, zero + HALVES * group)
        k_sin = tile_in(k_smem, zero + HALVES * group + 1)
        v = tile_in(v_smem, zero + group)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        q_cos = tile_in(q_smem, HALVES * stage)
        q_sin = tile_in(q_smem, HALVES * stage + 1)
        dout = tile_in(dout_smem, stage)
        scores = warpgroup_mma(k_cos, q_cos.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma(k_sin, q_sin.permute((1, 0)), scores, is_async=True)
        dp = warpgroup_mma(v, dout.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        if m < first + ROWS - 1:
            scores = gl.where(j[:, None] <= (m + columns)[None, :], scores, UNSEEN)
        lse2 = row_smem[0].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, score_layout))
        p = exp2(scores * scale_log2 - lse2[None, :])
        p_half = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, dv_layout, 2))
        dv = warpgroup_mma(p_half, dout, dv, is_async=True)
        if LATE:
            dp = warpgroup_mma_wait(1, deps=[dp])
        else:
            # What the other group has left of the step before is on its way to dq while ds is made.
            mbarrier.wait(stored.index(step + 1 & 1), ((step + 1) // 2 + 1) & 1)
            dq = query_part(group, step - 1, k_smem, ds_smem)
            dp = warpgroup_mma_wait(3, deps=[dp])
        delta = row_smem[1].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, score_layout))
        ds = (p * (dp - delta[None, :])).to(dtype)
        if LATE:  # both groups have made dq of what lies there
            mbarrier.wait(ready.index(step & 1), (step // 2 + 1) & 1)
        ds_smem.index((step & 1) * GROUPS + group).store(ds)
        ds_half = gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout, 2))
        if LATE:
            fence_async_shared()
            await_group()
            mbarrier.arrive(stored.index(step & 1))
            dk_cos = warpgroup_mma(ds_half, q_cos, dk_cos, is_async=True)
            dk_sin = warpgroup_mma(ds_half, q_sin, dk_sin, is_async=True)
            mbarrier.wait(stored.index(step + 1 & 1), ((step + 1) // 2 + 1) & 1)
            dq = query_part(group, step - 1, k_smem, ds_smem)
            dv, dk_cos, dk_sin, dq = warpgroup_mma_wait(0, deps=[dv, dk_cos, dk_sin, dq])
            mbarrier.wait(free.index(step + 1 & 1), ((step + 1) // 2) & 1, pred=step > 0)
            grads[group].index(step + 1 & 1).store(dq)
            fence_async_shared()
            await_group()
            mbarrier.arrive(ready.index(step + 1 & 1), pred=step > 0)
            mbarrier.arrive(empty.index(stage))
        else:
            dv, dq = warpgroup_mma_wait(0, deps=[dv, dq])
            mbarrier.wait(free.index(step + 1 & 1), ((step + 1) // 2) & 1, pred=step > 0)
            grads[group].index(step + 1 & 1).store(dq)
            fence_async_shared()
            await_group()
            mbarrier.arrive(stored.index(step & 1))
            mbarrier.arrive(ready.index(step + 1 & 1), pred=step > 0)
            dk_cos = warpgroup_mma(ds_half, q_cos, dk_cos, is_async=True)
            dk_sin = warpgroup_mma(ds_half, q_sin, dk_sin, is_async=True)
            dk_cos, dk_sin = warpgroup_mma_wait(0, deps=[dk_cos, dk_sin])
            await_group()
            mbarrier.arrive(empty.index(stage))
    steps = GROUP * count
    mbarrier.wait(stored.index(steps + 1 & 1), ((steps + 1) // 2 + 1) & 1)
    dq = query_part(group, steps - 1, k_smem, ds_smem)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.wait(free.index(steps + 1 & 1), ((steps + 1) // 2) & 1)
    grads[group].index(steps + 1 & 1).store(dq)
    fence_async_shared()
    await_group()
    mbarrier.arrive(ready.index(steps + 1 & 1))
    store_rows(dk_ptr, dk_strides, b, key, first, 0, T, dk_cos * scale)
    store_rows(dk_ptr, dk_strides, b, key, first, HALF, T, dk_sin * scale)
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


@gluon.jit
def joint_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse2_desc, delta_desc, cos_sums, sin_sums,
    dk_ptr, dk_strides, dv_ptr, dv_strides, turn_ptr, KEY_HEADS, T, together, scale, scale_log2,
    GROUP: gl.constexpr, STAGES: gl.constexpr, HELPER_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    """dk, dv and, tile by tile, the unscaled dq in float32; turn_ptr: all zeros."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = GROUPS * ROWS
    HALF: gl.constexpr = q_desc.block_shape[3]
    key_tiles = gl.cdiv(T, BLOCK_N)
    tiles = gl.cdiv(T, BLOCK_M)
    ticket = gl.atomic_add(turn_ptr, 1, sem="relaxed")
    key_head, tile = work_of(ticket, gl.num_programs(0) // key_tiles, together, key_tiles)
    b = key_head // KEY_HEADS
    key = key_head % KEY_HEADS
    n = tile * BLOCK_N
    low, _, count = queries_of(tile, T, T, BLOCK_M, BLOCK_N)
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
    grads = (
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, HALF], cos_sums.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, HALF], sin_sums.layout),
    )
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], ONE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    # stored: both groups' ds of a step are there; ready: so are both halves of its dq; free: which have been taken
    stored = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], ONE)
    mbarrier.init(keys_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    for parity in gl.static_range(2):
        mbarrier.init(stored.index(parity), count=GROUPS)
        mbarrier.init(ready.index(parity), count=GROUPS)
        mbarrier.init(free.index(parity), count=1)
    fence_async_shared()
    turns = turn_ptr + 1
    first_tile = key_head * GROUP * tiles
    gl.warp_specialize(
        [
            (gradients, (
                0, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, grads, keys_ready, full, empty, stored, ready,
                free, dk_ptr, dk_strides, dv_ptr, dv_strides, b, key, n, low, count, T, scale, scale_log2, GROUP, LATE,
            )),
            (gradients, (
                1, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, grads, keys_ready, full, empty, stored, ready,
                free, dk_ptr, dk_strides, dv_ptr, dv_strides, b, key, n, low, count, T, scale, scale_log2, GROUP, LATE,
            )),
            (load, (
                q_desc, k_desc, v_desc, dout_desc, (lse2_desc, delta_desc), k_smem, v_smem, q_smem, dout_smem, row_smem,
                keys_ready, full, empty, b, key, KEY_HEADS, n, low, count, GROUP,
            )),
            (add_query_grads, (
                (cos_sums, sin_sums), turns, grads, ready, free, first_tile, tiles, tile, low, count, T, T,
                BLOCK_M, BLOCK_N, GROUP, 0,
            )),
            (add_query_grads, (
                (cos_sums, sin_sums), turns, grads, ready, free, first_tile, tiles, tile, low, count, T, T,
                BLOCK_M, BLOCK_N, GROUP, 1,
            )),
        ],
        [4, 1, 1, 1],
        [REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
    )  # fmt: skip


def backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse2: Tensor, delta: Tensor, into: tuple[Tensor, Tensor],
    *, scale: float,
) -> Tensor:  # fmt: skip
    """Writes the gradients of k and v, of which k's may take k's place, and gives that of q but for its scale.

    That is float32 `[B, H, T, E]`. lse2 and delta are `body.row_statistics`.
    """
    rows, heads, length, width = q.shape
    key_heads, value_width = v.shape[1], v.shape[3]
    dk, dv = into
    meta = launch("separable.joint", q, qk=width, v=value_width, length=length)
    block_m, half = meta.pop("BLOCK_M"), width // 2
    tiles = ceil_div(length, block_m)
    sums = torch.empty(rows * heads * tiles * block_m, width, dtype=torch.float32, device=q.device)
    turns = torch.zeros(1 + rows * heads * tiles, dtype=torch.int32, device=q.device)
    joint_kernel[(ceil_div(length, 128) * rows * key_heads,)](
        *(laid_out(describe(x, 64, half)) for x in (q, k)),
        *(laid_out(describe(x, 64, value_width)) for x in (v, dout)),
        *(tiled(x.view(-1, x.shape[2]), (1, block_m)) for x in (lse2, delta)),
        *(tiled(sums[:, at : at + half], (block_m, half)) for at in (0, half)),
        dk, dk.stride(), dv, dv.stride(), turns, key_heads, length,
        scale=scale, scale_log2=scale * math.log2(math.e), GROUP=heads // key_heads, num_warps=4, **meta,
    )  # fmt: skip
    return sums.view(rows, heads, tiles * block_m, width)[:, :, :length]
