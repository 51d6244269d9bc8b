"""TAPA attention, backward in one pass: each score is made once and gives all three gradients.

A program owns a tile of keys and walks over the queries that see it. Its warps have three roles: one loads tiles of
queries ahead, one adds to the gradient of the queries, the others compute. That gradient is summed in float32 in an
order that never varies: of the programs that add to one tile of queries those of later keys come first, and each
waits for its turn. Programs take their keys by ticket, later keys first, so whoever is waited for has begun.

For as many queries as keys, causal, without window or positions, in half precision, with the quadratic phase, on
compute capability 9. Letters and conventions of tapa_score.py, level and twist as in tapa_backward.py; tiles of
scores are [keys, queries].
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# Kernels annotate compile-time values as gl.constexpr and use them as what they hold.

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from phasewise.kernels.tapa_score import (
    Score,
    cosine,
    distance,
    far_above,
    power,
    power_series,
    series_reach,
    sine,
    store_tile,
)
from phasewise.kernels.tiles import LOG2E, UNSEEN, describe

SPACING = 1024  # tiles of queries walked over side by side, so that whoever is waited for is some steps ahead
await_group = getattr(gl, "barrier", None) or gl.thread_barrier  # Triton 3.7 renamed it


@gluon.jit
def tile_in(buffer, stage):
    """One stage of a buffer [stages, 1, 1, rows, columns] as a matrix."""
    one = buffer.index(stage)
    shape: gl.constexpr = one.shape
    return one.reshape([shape[2], shape[3]])


@gluon.jit
def load_queries(sources, buffers, full, ready, batch, head, heads, low, count, GROUP: gl.constexpr):
    """Fills the stages with tiles of q_A, q_P, the gradient above, the log-sum-exps and the deltas."""
    BLOCK_M: gl.constexpr = sources[0].block_type.shape[2]
    STAGES: gl.constexpr = buffers[0].shape[0]
    BYTES: gl.constexpr = (
        sources[0].block_type.nbytes + sources[1].block_type.nbytes + sources[2].block_type.nbytes
        + sources[3].block_type.nbytes + sources[4].block_type.nbytes
    )  # fmt: skip
    for step in range(GROUP * count):
        member = step // count
        m = low + (step - member * count) * BLOCK_M
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), (step // STAGES & 1) ^ 1)
        arrived = full.index(stage)
        mbarrier.expect(arrived, BYTES)
        for part in gl.static_range(3):
            at = [batch, head + member, m, 0]
            tma.async_copy_global_to_shared(sources[part], at, arrived, buffers[part].index(stage))
        for part in gl.static_range(3, 5):
            at = [batch * heads + head + member, m]
            tma.async_copy_global_to_shared(sources[part], at, arrived, buffers[part].index(stage))


@gluon.jit
def work_of(ticket, heads, together, key_tiles):
    """Key head and tile of keys of a program: `together` heads at once, in each of them the last tile first.

    Neighbouring tiles of one head begin apart, so that the one that is waited for has come further.
    """
    first = ticket // (together * key_tiles) * together
    rest = ticket - first * key_tiles
    members = gl.minimum(together, heads - first)
    return first + rest % members, key_tiles - 1 - rest // members


@gluon.jit
def turn_of(tile, m, BLOCK_N: gl.constexpr):
    """How many tiles of keys, the later ones, add to the tile of queries at m before this one."""
    return m // BLOCK_N - tile


@gluon.jit
def await_turn(ptr, turn):
    """Waits until the count at ptr has come to `turn`; what was added before is then there."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred reached;
        .reg .s32 count;
        ld.acquire.gpu.global.s32 count, [$1];
        setp.ge.s32 reached, count, $2;
        @reached bra done;
        again:
        ld.relaxed.gpu.global.s32 count, [$1];
        setp.ge.s32 reached, count, $2;
        @!reached bra again;
        fence.acq_rel.gpu;
        done:
        mov.s32 $0, count;
        }""",
        "=r,l,r", [ptr, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_turn(ptr, turn):
    """Sets the count at ptr once all that this warp has added is there."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first st.release.gpu.global.s32 [$1], $2;
        mov.u32 $0, lane;
        }""",
        "=r,l,r", [ptr, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@builtin
def begin_adding(descriptor, coordinates, source, _semantic=None):
    """Begins to add a tile in shared memory to one in memory; Gluon has no name for it of its own."""
    handles = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, handles, source.handle)


@gluon.jit
def add_query_grads(
    sums, turn_ptr, grads, ready, free, first_tile, tiles, tile, low, count,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Adds the program's part of the gradients by q_A and q_P, tile by tile, each in its turn."""
    STAGES: gl.constexpr = grads[0].shape[0]
    for step in range(GROUP * count):
        member = step // count
        m = low + (step - member * count) * BLOCK_M
        at = first_tile + member * tiles + m // BLOCK_M
        turn = turn_of(tile, m, BLOCK_N)
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        await_turn(turn_ptr + at, turn)
        begin_adding(sums[0], [at * sums[0].block_type.shape[0], 0], grads[0].index(stage))
        begin_adding(sums[1], [at * sums[1].block_type.shape[0], 0], grads[1].index(stage))
        tma.store_wait(0)
        mbarrier.arrive(free.index(stage))
        end_turn(turn_ptr + at, turn + 1)


@gluon.jit
def score_gradients(
    amplitude, phase, upstream, lse, delta, rows, scale_log2, alpha, unit, dtype: gl.constexpr, FAR: gl.constexpr
):  # fmt: skip
    """Softmax weights, level and twist of a tile whose first query is at place 0 and whose keys are at `rows`."""
    COLUMNS: gl.constexpr = amplitude.shape[1]
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, amplitude.type.layout))
    if FAR:
        strength = power_series(rows, columns, COLUMNS // 2, COLUMNS / 2, alpha, unit, True)
    else:
        seen = rows[:, None] <= columns[None, :]
        strength = gl.where(seen, power(distance(rows, columns), alpha, unit, True), 0.0)
        amplitude = gl.where(seen, amplitude, UNSEEN)
    angle = phase * strength
    wave = cosine(angle, True)
    weights = tl.exp2(amplitude * wave * scale_log2 - lse)
    slope = weights * (upstream - delta)
    twist = (slope * amplitude) * (sine(angle, True) * strength)
    return weights.to(dtype), (slope * wave).to(dtype), twist.to(dtype)


@gluon.jit
def unknown_zero(step):
    """0 that the compiler does not know: what is addressed from it is computed anew instead of spilled."""
    return gl.inline_asm_elementwise("mov.s32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tile_gradients(
    step, m, by_k_a, by_k_p, by_v, key_buffers, buffers, scores, grads, barriers, j, scale_log2, alpha, unit,
    FAR: gl.constexpr, Q_A_LAYOUT: gl.constexpr, Q_P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds a tile of queries to the gradients by k_A, k_P and v; hands on what it has of those by q_A and q_P."""
    zero = unknown_zero(step)
    k_a = tile_in(key_buffers[0], zero)
    k_p = tile_in(key_buffers[1], zero)
    values = tile_in(key_buffers[2], zero)
    level_tile, twist_tile = scores
    full, ready, free = barriers
    dtype: gl.constexpr = buffers[0].dtype
    STAGES: gl.constexpr = buffers[0].shape[0]
    BLOCK_M: gl.constexpr = buffers[0].shape[3]
    BLOCK_N: gl.constexpr = k_a.shape[0]
    A: gl.constexpr = k_a.shape[1]
    P: gl.constexpr = k_p.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=LAYOUT)
    stage = step % STAGES
    q_a = tile_in(buffers[0], stage)
    q_p = tile_in(buffers[1], stage)
    above = tile_in(buffers[2], stage)
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    amplitude = warpgroup_mma(k_a, q_a.permute([1, 0]), zeros, use_acc=False, is_async=True)
    phase = warpgroup_mma(k_p, q_p.permute([1, 0]), zeros, use_acc=False, is_async=True)
    upstream = warpgroup_mma(values, above.permute([1, 0]), zeros, use_acc=False, is_async=True)
    amplitude, phase, upstream = warpgroup_mma_wait(0, [amplitude, phase, upstream])
    lse = buffers[3].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, LAYOUT))
    delta = buffers[4].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, LAYOUT))
    weights, level, twist = score_gradients(
        amplitude, phase, upstream, lse[None, :], delta[None, :], j - m, scale_log2, alpha, unit, dtype, FAR
    )
    level_tile.store(level)
    twist_tile.store(twist)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, by_v.type.layout, 2))
    level = gl.convert_layout(level, gl.DotOperandLayout(0, by_k_a.type.layout, 2))
    twist = gl.convert_layout(twist, gl.DotOperandLayout(0, by_k_p.type.layout, 2))
    by_v = warpgroup_mma(weights, above, by_v, is_async=True)
    by_k_a = warpgroup_mma(level, q_a, by_k_a, is_async=True)
    by_k_p = warpgroup_mma(twist, q_p, by_k_p, is_async=True)
    fence_async_shared()
    if BLOCK_M < 64:  # as columns: the tensor cores take 64 rows
        zeros_a = gl.zeros([A, BLOCK_M], gl.float32, layout=Q_A_LAYOUT)
        zeros_p = gl.zeros([P, BLOCK_M], gl.float32, layout=Q_P_LAYOUT)
        by_q_a = warpgroup_mma(k_a.permute([1, 0]), level_tile, zeros_a, use_acc=False, is_async=True)
        by_q_p = warpgroup_mma(k_p.permute([1, 0]), twist_tile, zeros_p, use_acc=False, is_async=True)
    else:
        zeros_a = gl.zeros([BLOCK_M, A], gl.float32, layout=Q_A_LAYOUT)
        zeros_p = gl.zeros([BLOCK_M, P], gl.float32, layout=Q_P_LAYOUT)
        by_q_a = warpgroup_mma(level_tile.permute([1, 0]), k_a, zeros_a, use_acc=False, is_async=True)
        by_q_p = warpgroup_mma(twist_tile.permute([1, 0]), k_p, zeros_p, use_acc=False, is_async=True)
    by_v, by_k_a, by_k_p, by_q_a, by_q_p = warpgroup_mma_wait(0, [by_v, by_k_a, by_k_p, by_q_a, by_q_p])
    mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
    grads[0].index(stage).store(by_q_a)
    grads[1].index(stage).store(by_q_p)
    fence_async_shared()
    await_group()
    mbarrier.arrive(ready.index(stage))
    return by_k_a, by_k_p, by_v


@gluon.jit
def store_rows(ptr, strides, b, h, first_row, first_column, length, values, factor):
    """Rows of one head of a tensor [B, H, T, D], from a column on."""
    LAYOUT: gl.constexpr = values.type.layout
    rows = first_row + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    columns = first_column + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    ptr += b.to(gl.int64) * strides[0] + h.to(gl.int64) * strides[1]
    at = rows.to(gl.int64)[:, None] * strides[2] + columns[None, :] * strides[3]
    gl.store(ptr + at, (values * factor).to(ptr.dtype.element_ty), (rows < length)[:, None])


@gluon.jit
def key_gradients(
    grad_k_ptr, k_strides, grad_v_ptr, v_strides, sources, key_buffers, loaded, buffers, scores, grads, barriers,
    batch, group, first_n, low, near, count, T, scale, alpha, unit, GROUP: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, summed over the query heads of a group; near query tiles first."""
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_M: gl.constexpr = buffers[0].shape[3]
    BLOCK_N: gl.constexpr = sources[0].block_type.shape[2]
    A: gl.constexpr = sources[0].block_type.shape[3]
    P: gl.constexpr = sources[1].block_type.shape[3]
    V: gl.constexpr = sources[2].block_type.shape[3]
    BY_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, A, 16])
    BY_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, P, 16])
    BY_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V, 16])
    SPLIT: gl.constexpr = WARPS // 4
    Q_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SPLIT], [16, min(BLOCK_M, A) // SPLIT, 16])
    Q_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SPLIT], [16, min(BLOCK_M, P) // SPLIT, 16])
    mbarrier.expect(
        loaded, sources[0].block_type.nbytes + sources[1].block_type.nbytes + sources[2].block_type.nbytes
    )
    for part in gl.static_range(3):
        at = [batch, group, first_n, 0]
        tma.async_copy_global_to_shared(sources[part], at, loaded, key_buffers[part].index(0))
    j = first_n + gl.arange(
        0, BLOCK_N, layout=gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16]))
    )
    by_k_a = gl.zeros([BLOCK_N, A], gl.float32, layout=BY_A)
    by_k_p = gl.zeros([BLOCK_N, P], gl.float32, layout=BY_P)
    by_v = gl.zeros([BLOCK_N, V], gl.float32, layout=BY_V)
    scale_log2 = scale * LOG2E
    mbarrier.wait(loaded, 0)
    for member in range(GROUP):
        for t in range(0, near):
            by_k_a, by_k_p, by_v = tile_gradients(
                member * count + t, low + t * BLOCK_M, by_k_a, by_k_p, by_v, key_buffers, buffers, scores, grads,
                barriers, j, scale_log2, alpha, unit, False, Q_A, Q_P,
            )  # fmt: skip
        for t in range(near, count):
            by_k_a, by_k_p, by_v = tile_gradients(
                member * count + t, low + t * BLOCK_M, by_k_a, by_k_p, by_v, key_buffers, buffers, scores, grads,
                barriers, j, scale_log2, alpha, unit, True, Q_A, Q_P,
            )  # fmt: skip
    store_rows(grad_k_ptr, k_strides, batch, group, first_n, 0, T, by_k_a, scale)
    store_rows(grad_k_ptr, k_strides, batch, group, first_n, A, T, by_k_p, -scale)
    store_rows(grad_v_ptr, v_strides, batch, group, first_n, 0, T, by_v, 1.0)


@gluon.jit
def joint_kernel(
    grad_k_ptr, k_strides, grad_v_ptr, v_strides, sum_a, sum_p, turn_ptr, q_a, q_p, k_a, k_p, v, above, lse, delta,
    alpha_ptr, G, T, tiles, together, scale, unit,
    GROUP: gl.constexpr, STAGES: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Gradients of k and v, and the unscaled ones by q_A and q_P in the order of tiles. turn_ptr: all zeros."""
    dtype: gl.constexpr = k_a.dtype
    BLOCK_M: gl.constexpr = q_a.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_a.block_type.shape[2]
    A: gl.constexpr = k_a.block_type.shape[3]
    P: gl.constexpr = k_p.block_type.shape[3]
    V: gl.constexpr = v.block_type.shape[3]
    key_tiles = gl.cdiv(T, BLOCK_N)
    ticket = gl.atomic_add(turn_ptr, 1, sem="relaxed")
    key_head, tile = work_of(ticket, gl.num_programs(0) // key_tiles, together, key_tiles)
    batch = key_head // G
    group = key_head % G
    first_n = tile * BLOCK_N
    count = gl.cdiv(T - first_n, BLOCK_M)
    alpha = gl.load(alpha_ptr)
    far = far_above(first_n + BLOCK_N - 1, series_reach(alpha), 0, BLOCK_M)
    near = gl.minimum(gl.cdiv(gl.maximum(far - first_n, 0), BLOCK_M), count)

    key_buffers = (
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, A], k_a.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, P], k_p.layout),
        gl.allocate_shared_memory(dtype, [1, 1, 1, BLOCK_N, V], v.layout),
    )
    buffers = (
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, A], q_a.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, P], q_p.layout),
        gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_M, V], above.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta.layout),
    )
    SCORES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * BLOCK_M, element_bitwidth=16, rank=2)
    scores = (
        gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], SCORES),
        gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], SCORES),
    )
    ROWS_A: gl.constexpr = sum_a.block_type.shape[0]
    COLUMNS_A: gl.constexpr = sum_a.block_type.shape[1]
    ROWS_P: gl.constexpr = sum_p.block_type.shape[0]
    COLUMNS_P: gl.constexpr = sum_p.block_type.shape[1]
    grads = (
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS_A, COLUMNS_A], sum_a.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS_P, COLUMNS_P], sum_p.layout),
    )
    ONE: gl.constexpr = mbarrier.MBarrierLayout()
    # full: a tile of queries has come; ready: it has been used, and what it gives is there; free: that has been taken
    loaded = gl.allocate_shared_memory(gl.int64, [1], ONE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], ONE)
    mbarrier.init(loaded, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()

    head = group * GROUP
    first_tile = (batch * G * GROUP + head) * tiles
    gl.warp_specialize(
        [
            (key_gradients, (
                grad_k_ptr, k_strides, grad_v_ptr, v_strides, (k_a, k_p, v), key_buffers, loaded, buffers, scores,
                grads, (full, ready, free), batch, group, first_n, first_n, near, count, T, scale, alpha, unit,
                GROUP,
            )),
            (load_queries, (
                (q_a, q_p, above, lse, delta), buffers, full, ready, batch, head, G * GROUP, first_n, count, GROUP,
            )),
            (add_query_grads, (
                (sum_a, sum_p), turn_ptr + 1, grads, ready, free, first_tile, tiles, tile, first_n, count,
                BLOCK_M, BLOCK_N, GROUP,
            )),
        ],
        [1, 1],
        [HELPER_REGISTERS, HELPER_REGISTERS],
    )  # fmt: skip


@triton.jit
def finish_kernel(
    grad_q_ptr, sum_a_ptr, sum_p_ptr, stride_b, stride_h, stride_t, stride_d, H, T, tiles, scale,
    A: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries [B, H, T, A + P] from its two sums."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    m = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)[:, None]
    a = tl.arange(0, A)[None, :]
    p = tl.arange(0, P)[None, :]
    by_a = tl.load(sum_a_ptr + tile * A + (rows + a * BLOCK_M if BLOCK_M < 64 else rows * A + a))
    by_p = tl.load(sum_p_ptr + tile * P + (rows + p * BLOCK_M if BLOCK_M < 64 else rows * P + p))
    grad_q_ptr += row // H * stride_b + row % H * stride_h
    store_tile(grad_q_ptr, 0, m, T, stride_t, stride_d, by_a * scale, A, A)
    store_tile(grad_q_ptr, A, m, T, stride_t, stride_d, by_p * -scale, P, P)


def backward(
    grads: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse2: Tensor,
    delta: Tensor, alpha: Tensor, score: Score, meta: dict[str, int],
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v; lse2 and delta as `statistics_kernel` leaves them."""
    grad_q, grad_k, grad_v = grads
    batch, heads, length, width = q.shape
    groups, padded = k.shape[1], lse2.shape[2]
    widths = (score.amplitude_dim, width - score.amplitude_dim)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    assert block_n % block_m == 0, "the first query that sees a tile of keys starts a tile"
    tiles = padded // block_m
    turns = torch.zeros(1 + batch * heads * tiles, dtype=torch.int32, device=q.device)
    sums = [torch.zeros(batch * heads * padded * w, dtype=torch.float32, device=q.device) for w in widths]
    blocks = [(block_m, w) if block_m >= 64 else (w, block_m) for w in widths]
    key_tiles = triton.cdiv(length, block_n)
    joint_kernel[(key_tiles * batch * groups,)](
        grad_k, grad_k.stride(), grad_v, grad_v.stride(),
        *(tiled(x.view(-1, block[1]), block) for x, block in zip(sums, blocks, strict=True)), turns,
        *(by_head(x, block_m) for x in q.split(widths, 3)), *(by_head(x, block_n) for x in k.split(widths, 3)),
        by_head(v, block_n), by_head(grad_out, block_m),
        *(tiled(x.view(-1, padded), (1, block_m)) for x in (lse2, delta)), alpha,
        groups, length, tiles, triton.cdiv(SPACING, tiles), score.scale, score.phase_unit(q),
        GROUP=heads // groups,
        **{name: value for name, value in meta.items() if not name.startswith("BLOCK")},
    )  # fmt: skip
    finish_kernel[(tiles * batch * heads,)](
        grad_q,
        *sums,
        *grad_q.stride(),
        heads,
        length,
        tiles,
        score.scale,
        A=widths[0],
        P=widths[1],
        BLOCK_M=block_m,
    )


def by_head(x: Tensor, rows: int) -> TensorDescriptor:
    """As `tiles.describe`, for Gluon."""
    described = describe(x, rows, x.shape[3])
    kind = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(described.block_shape, kind)
    return TensorDescriptor(described.base, described.shape, described.strides, described.block_shape, layout)


def tiled(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A descriptor of float32 tiles of a matrix, rows in the order of the tensor cores unless there is but one."""
    if block[0] == 1:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.float32)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)
