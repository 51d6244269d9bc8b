"""`stored.score_grad_kernel` for compute capability 9.0: a warp that loads, two groups of warps that take turns.

Letters as in `stored`. Each group has 64 of the 128 keys of a program and begins its products after the other's, so
that one makes p and ds while the tensor cores work for the other; values of 128 channels and half of their keys'
channels stay in registers. Beginning the scores of the next tile early was tried and is slower: see docs/log.md.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false
# Kernels annotate compile-time values as gl.constexpr and use them as what they hold.

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
from triton.tools.tensor_descriptor import TensorDescriptor as TritonDescriptor

from phasewise.kernels.tiles import UNSEEN

GROUPS = gl.constexpr(2)
await_group = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 renamed it
ROWS = gl.constexpr(64)  # keys of a group: the rows of one tensor core instruction
# Channels of values at which registers hold what they can, so that the tensor cores wait for shared memory less. At 64
# ptxas 12.8 would write p over it, and all tiles but the first be wrong.
HELD_WIDTH = gl.constexpr(128)


@gluon.jit
def buffers(COUNT: gl.constexpr, descriptor):
    """Shared memory for as many tiles."""
    shape: gl.constexpr = [COUNT] + descriptor.block_shape  # noqa: RUF005 (the compiler knows no unpacking)
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def tile_in(buffer, stage):
    """One of the tiles of a buffer [count, 1, 1, rows, columns] as a matrix."""
    one = buffer.index(stage)
    shape: gl.constexpr = one.shape
    return one.reshape([shape[2], shape[3]])


@gluon.jit
def exp2(x):
    """2^x, without subnormal numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def place(at, tiles, heads, together):
    """As `stored.place`."""
    first = at // (tiles * together) * together
    within = at - first * tiles
    here = gl.minimum(together, heads - first)
    return within // here, first + within % here


@gluon.jit
def load(
    q_desc, k_desc, v_desc, dout_desc, row_descs, k_smem, v_smem, q_smem, dout_smem, row_smem, keys_ready, full, empty,
    b, key, heads, n, low, high, GROUP,
):  # fmt: skip
    """Keys and values once; then tile by tile what belongs to queries, as soon as their stage is free."""
    mbarrier.expect(keys_ready, GROUPS * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for group in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            k_desc, [b, key, n + ROWS * group, 0], keys_ready, k_smem.index(group)
        )
        tma.async_copy_global_to_shared(
            v_desc, [b, key, n + ROWS * group, 0], keys_ready, v_smem.index(group)
        )
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    STAGES: gl.constexpr = q_smem.shape[0]
    BYTES: gl.constexpr = (
        q_desc.block_type.nbytes + dout_desc.block_type.nbytes + 2 * row_descs[0].block_type.nbytes
    )
    step = 0
    for h in range(key * GROUP, key * GROUP + GROUP):
        for m in range(low, high, BLOCK_M):
            stage = step % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(q_desc, [b, h, m, 0], ready, q_smem.index(stage))
            tma.async_copy_global_to_shared(dout_desc, [b, h, m, 0], ready, dout_smem.index(stage))
            at = [b * heads * GROUP + h, m]
            for part in gl.static_range(2):
                tma.async_copy_global_to_shared(row_descs[part], at, ready, row_smem[part].index(stage))
            step += 1


@gluon.jit
def score(
    group, ds_desc, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, keys_ready, full, empty, turns,
    dv_ptr, dv_strides, sum_ptr, key_head, b, key, tile, low, high,
    first, last, blocks, sides, KEY_HEADS, GROUP, T, D, scale_log2,
    CAUSAL: gl.constexpr, SIDE: gl.constexpr,
):  # fmt: skip
    """dv of 64 keys, and their part of ds^T."""
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    BLOCK_D: gl.constexpr = dout_smem.shape[4]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dv_layout, 2)
    dtype: gl.constexpr = q_smem.dtype
    n = tile * SIDE + ROWS * group
    j = n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, score_layout))
    s = n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, dv_layout))
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, dv_layout))
    k = tile_in(k_smem, group)
    ds_tile = ds_smem.index(group)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, dv_layout)
    sum_at = (key_head.to(gl.int64) * sides * SIDE + s.to(gl.int64))[:, None] * BLOCK_D + d[None, :]
    if sum_ptr is not None:
        dv = gl.load(sum_ptr + sum_at, first > (tile if CAUSAL else 0), other=0.0)
    nothing = gl.zeros([ROWS, BLOCK_M], gl.float32, score_layout)
    masked_up_to = gl.where(n + ROWS > T, T, n + ROWS - 1 if CAUSAL else 0)
    mbarrier.wait(keys_ready, 0)
    HALF: gl.constexpr = k.shape[1] // 2
    first_k = k.slice(0, HALF, dim=1)
    second_k = k.slice(HALF, HALF, dim=1)
    v = tile_in(v_smem, group)
    if BLOCK_D == HELD_WIDTH:
        held: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
        first_k = first_k.load(held)
        v = v.load(held)
    columns = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, score_layout))
    step = 0
    for member in range(GROUP):
        head = (b * KEY_HEADS + key) * GROUP + member
        for m in range(low, high, BLOCK_M):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            q = tile_in(q_smem, stage)
            dout = tile_in(dout_smem, stage)
            mbarrier.wait(turns.index(group), (step & 1) ^ (1 - group))
            first_q = q.slice(0, HALF, dim=1).permute((1, 0))
            second_q = q.slice(HALF, HALF, dim=1).permute((1, 0))
            scores = warpgroup_mma(first_k, first_q, nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma(second_k, second_q, scores, is_async=True)
            dp = warpgroup_mma(v, dout.permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.arrive(turns.index(1 - group))
            scores = warpgroup_mma_wait(1, deps=[scores])
            if m < masked_up_to:
                i = m + columns
                seen = (j < T)[:, None] & (i >= 0)[None, :]
                if CAUSAL:
                    seen = seen & (j[:, None] <= i[None, :])
                scores = gl.where(seen, scores, UNSEEN)
            lse2 = row_smem[0].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, score_layout))
            p = exp2(scores * scale_log2 - lse2[None, :])
            # Begun before the wait for dp, so that p is made while the tensor cores are at work.
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), p_layout), dout, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            delta = row_smem[1].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, score_layout))
            ds = p * (dp - delta[None, :])
            queries = m // SIDE
            if CAUSAL:
                within = queries * (queries + 1) // 2 - first * (first + 1) // 2 + tile
            else:
                within = (queries - first) * sides + tile
            tma.store_wait(0)
            ds_tile.store(ds.to(dtype))
            fence_async_shared()
            at = [(head * blocks + within) * SIDE + ROWS * group, m % SIDE]
            tma.async_copy_shared_to_global(ds_desc, at, ds_tile)
            dv = warpgroup_mma_wait(0, deps=[dv])
            # All warps of the group are done with this stage.
            await_group()
            mbarrier.arrive(empty.index(stage))
            step += 1
    tma.store_wait(0)
    if sum_ptr is not None:
        gl.store(sum_ptr + sum_at, dv, last < sides)
    row = b.to(gl.int64) * dv_strides[0] + key.to(gl.int64) * dv_strides[1]
    dv_at = dv_ptr + row + s.to(gl.int64)[:, None] * dv_strides[2] + d[None, :] * dv_strides[3]
    gl.store(dv_at, dv.to(dtype), (s < T)[:, None] & (d < D)[None, :] & (last == sides))


@gluon.jit(do_not_specialize=("first", "last", "blocks", "sides", "heads", "together"))
def score_grad_kernel(
    q_desc, k_desc, v_desc, dout_desc, ds_desc, lse2_desc, delta_desc, dv_ptr, dv_strides, sum_ptr,
    first, last, blocks, sides, heads, together, KEY_HEADS, GROUP, T, D, scale_log2,
    CAUSAL: gl.constexpr, SIDE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `stored.score_grad_kernel`."""
    tile, key_head = place(gl.program_id(0), last if CAUSAL else sides, heads, together)
    b = key_head // KEY_HEADS
    key = key_head % KEY_HEADS
    low = first * SIDE
    if CAUSAL:
        low = gl.maximum(low, tile * SIDE)
    high = gl.minimum(last * SIDE, T)
    k_smem = buffers(GROUPS, k_desc)
    v_smem = buffers(GROUPS, v_desc)
    q_smem = buffers(STAGES, q_desc)
    dout_smem = buffers(STAGES, dout_desc)
    row_smem = (
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse2_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_desc.layout),
    )
    ds_smem = buffers(GROUPS, ds_desc)
    keys_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Of each group: the other one has begun its products of the step before, or of the same.
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_ready, count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    gl.warp_specialize(
        [
            (score, (
                0, ds_desc, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, keys_ready, full, empty, turns,
                dv_ptr, dv_strides, sum_ptr, key_head, b, key, tile, low, high,
                first, last, blocks, sides, KEY_HEADS, GROUP, T, D, scale_log2, CAUSAL, SIDE,
            )),
            (score, (
                1, ds_desc, k_smem, v_smem, q_smem, dout_smem, row_smem, ds_smem, keys_ready, full, empty, turns,
                dv_ptr, dv_strides, sum_ptr, key_head, b, key, tile, low, high,
                first, last, blocks, sides, KEY_HEADS, GROUP, T, D, scale_log2, CAUSAL, SIDE,
            )),
            (load, (
                q_desc, k_desc, v_desc, dout_desc, (lse2_desc, delta_desc), k_smem, v_smem, q_smem, dout_smem, row_smem,
                keys_ready, full, empty, b, key, KEY_HEADS, tile * SIDE, low, high, GROUP,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def laid_out(descriptor: TritonDescriptor) -> TensorDescriptor:
    """A descriptor of half-precision tiles, with the layout in shared memory that tensor cores read."""
    layout = gl.NVMMASharedLayout.get_default_for(descriptor.block_shape, gl.float16)
    return TensorDescriptor(
        descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape, layout
    )
