"""TAPA attention, backward in one pass: each score is made once and gives all three gradients.

A program owns a tile of keys and walks over the queries that see it. Its warps have three roles: one loads the keys
and, ahead, tiles of queries, two add to the gradient of the queries (tapa_turns.py), the others compute. For keys and
queries at consecutive places the distance power is a function of their difference alone, so it comes from a table, of
which a thread's part of a tile reads one pair of entries for every diagonal of 8 x 8 blocks.

For queries that are the last of the keys, causal, without window or positions, in half precision, with the quadratic
phase, on compute capability 9. Letters and conventions of tapa_score.py, level and twist as in tapa_backward.py; tiles
of scores are [keys, queries].
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# Kernels annotate compile-time values as gl.constexpr and use them as what they hold.

import torch
import triton
import triton.language as tl
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

from phasewise.kernels.stored_hopper import await_group, laid_out, tile_in
from phasewise.kernels.tapa_score import BEFORE, Score, cosine, power_table, sine, store_tile
from phasewise.kernels.tapa_turns import add_query_grads, queries_of, work_of
from phasewise.kernels.tiles import LOG2E, UNSEEN, describe

HELD = gl.constexpr([8, 256])  # shape in which `as_held` leaves 64 x 32 values: a copy's rows hold 256
SPACING = 1024  # tiles of queries walked over side by side, so that whoever is waited for is some steps ahead


@gluon.jit
def load_keys_and_queries(
    keys, key_buffers, loaded, sources, buffers, full, ready, batch, group, first_n, heads, low, count,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A tile of k_A, k_P and v, then stage by stage tiles of q_A, q_P, the gradient above, log-sum-exps and deltas."""
    mbarrier.expect(loaded, keys[0].block_type.nbytes + keys[1].block_type.nbytes + keys[2].block_type.nbytes)
    for tensor in gl.static_range(3):
        tma.async_copy_global_to_shared(
            keys[tensor], [batch, group, first_n, 0], loaded, key_buffers[tensor].index(0)
        )
    head = group * GROUP
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


@gluon.constexpr_function
def power_loads(elements):
    """PTX that loads a thread's powers: of rows 8 apart and pairs of columns 8 apart, a pair for each diagonal."""
    diagonals = elements // 4 + 1
    lines = [f"{{ .reg .f32 power<{2 * diagonals}>;"]
    for x in range(diagonals):
        pair = f"{{power{2 * x + 1}, power{2 * x}}}"
        lines.append(f"ld.global.nc.v2.f32 {pair}, [${elements} + {8 * 8 * (x - 1)}];")
    for element in range(elements):
        column, row, block = element % 2, element // 2 % 2, element // 4
        lines.append(f"mov.f32 ${element}, power{2 * (block - row + 1) + column};")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def power_operands(elements):
    """Constraints of `power_loads`: the powers and as many addresses, of which it reads the first."""
    return ",".join(["=f"] * elements + ["l"] * elements)


@gluon.jit
def strengths(table_ptr, j, i):
    """unit |i - j|^alpha of a tile of consecutive places, from the table, where there is a distance i - j.

    Not pure, so that the loads begin where this stands, ahead of their use.
    """
    ELEMENTS: gl.constexpr = j.shape[0] * i.shape[0] // (32 * gl.num_warps())
    pairs = table_ptr + (i[None, :] - j[:, None] + 1)
    return gl.inline_asm_elementwise(
        power_loads(ELEMENTS),
        power_operands(ELEMENTS),
        [pairs],
        dtype=gl.float32,
        is_pure=False,
        pack=ELEMENTS,
    )


@gluon.jit
def turned(amplitude, phase, strength, lse, j, i, scale_log2, FAR: gl.constexpr):
    """Softmax weights of a tile, cosines, and amplitudes times sines and powers; FAR: every key is seen."""
    if not FAR:
        amplitude = gl.where(j[:, None] <= i[None, :], amplitude, UNSEEN)
    angle = phase * strength
    wave = cosine(angle, True)
    weights = gl.exp2(amplitude * wave * scale_log2 - lse[None, :])
    return weights, wave, amplitude * (sine(angle, True) * strength)


@gluon.jit
def as_held(x):
    """A matrix of 64 x 32 in the order in which threads hold it, four values of one after four of another.

    Stored so, no two threads of a warp meet in a bank of shared memory; row by row every second one does.
    """
    return x.reshape([4, 2, 8, 4, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape(HELD)


@gluon.jit
def unknown_zero(step):
    """0 that the compiler does not know: what is addressed from it is computed anew instead of spilled."""
    return gl.inline_asm_elementwise("mov.s32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tile_gradients(
    step, held, strength, by_k_a, by_k_p, by_v, key_buffers, buffers, scores, grads, barriers, j, i, scale_log2,
    table_ptr, FAR: gl.constexpr, Q_A_LAYOUT: gl.constexpr, Q_P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Adds the queries i to the gradients by k_A, k_P and v of the keys j; hands on theirs by q_A and q_P.

    held: k_A and k_P in registers, where they fit. strength: the powers of this tile; returns the next one's, loaded
    while the tensor cores work.
    """
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
    if BLOCK_M < 64:
        amplitude = warpgroup_mma(k_a, q_a.permute([1, 0]), zeros, use_acc=False, is_async=True)
        phase = warpgroup_mma(k_p, q_p.permute([1, 0]), zeros, use_acc=False, is_async=True)
    else:
        amplitude = warpgroup_mma(held[0], q_a.permute([1, 0]), zeros, use_acc=False, is_async=True)
        phase = warpgroup_mma(held[1], q_p.permute([1, 0]), zeros, use_acc=False, is_async=True)
    upstream = warpgroup_mma(values, above.permute([1, 0]), zeros, use_acc=False, is_async=True)
    RUNNING: gl.constexpr = 1 if BLOCK_M < 64 else 0  # with 64 queries the third product beside is no gain
    amplitude, phase = warpgroup_mma_wait(RUNNING, [amplitude, phase])
    lse = buffers[3].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, LAYOUT))
    delta = buffers[4].index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, LAYOUT))
    weights, wave, turn = turned(amplitude, phase, strength, lse, j, i, scale_log2, FAR)
    upstream = warpgroup_mma_wait(0, [upstream])
    slope = weights * (upstream - delta[None, :])
    weights = weights.to(dtype)
    level = (slope * wave).to(dtype)
    twist = (slope * turn).to(dtype)
    level_tile.store(level)
    twist_tile.store(twist)
    strength = strengths(table_ptr, j, i + BLOCK_M)
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
    grads[0].index(stage).store(as_held(by_q_a))
    grads[1].index(stage).store(as_held(by_q_p))
    fence_async_shared()
    await_group()
    mbarrier.arrive(ready.index(stage))
    return strength, by_k_a, by_k_p, by_v


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
    grad_k_ptr, k_strides, grad_v_ptr, v_strides, key_buffers, loaded, buffers, scores, grads, barriers, batch, group,
    first_n, first_i, near, count, S, scale, table_ptr, GROUP: gl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values, summed over the query heads of a group.

    first_i: place of the first query that is met; near: so many tiles of queries do not see all keys of this one.
    """
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_M: gl.constexpr = buffers[0].shape[3]
    BLOCK_N: gl.constexpr = key_buffers[0].shape[3]
    A: gl.constexpr = key_buffers[0].shape[4]
    P: gl.constexpr = key_buffers[1].shape[4]
    V: gl.constexpr = key_buffers[2].shape[4]
    BY_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, A, 16])
    BY_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, P, 16])
    BY_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, V, 16])
    SPLIT: gl.constexpr = WARPS // 4
    Q_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SPLIT], [16, min(BLOCK_M, A) // SPLIT, 16])
    Q_P: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, SPLIT], [16, min(BLOCK_M, P) // SPLIT, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    j = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
    i = first_i + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES))
    by_k_a = gl.zeros([BLOCK_N, A], gl.float32, layout=BY_A)
    by_k_p = gl.zeros([BLOCK_N, P], gl.float32, layout=BY_P)
    by_v = gl.zeros([BLOCK_N, V], gl.float32, layout=BY_V)
    scale_log2 = scale * LOG2E
    mbarrier.wait(loaded, 0)
    held = ()
    if BLOCK_M >= 64:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
        held = (tile_in(key_buffers[0], 0).load(OPERAND), tile_in(key_buffers[1], 0).load(OPERAND))
    for member in range(GROUP):
        strength = strengths(table_ptr, j, i)
        for t in range(0, near):
            strength, by_k_a, by_k_p, by_v = tile_gradients(
                member * count + t, held, strength, by_k_a, by_k_p, by_v, key_buffers, buffers, scores, grads, barriers,
                j, i + t * BLOCK_M, scale_log2, table_ptr, False, Q_A, Q_P,
            )  # fmt: skip
        for t in range(near, count):
            strength, by_k_a, by_k_p, by_v = tile_gradients(
                member * count + t, held, strength, by_k_a, by_k_p, by_v, key_buffers, buffers, scores, grads, barriers,
                j, i + t * BLOCK_M, scale_log2, table_ptr, True, Q_A, Q_P,
            )  # fmt: skip
    store_rows(grad_k_ptr, k_strides, batch, group, first_n, 0, S, by_k_a, scale)
    store_rows(grad_k_ptr, k_strides, batch, group, first_n, A, S, by_k_p, -scale)
    store_rows(grad_v_ptr, v_strides, batch, group, first_n, 0, S, by_v, 1.0)


@gluon.jit
def joint_kernel(
    grad_k_ptr, k_strides, grad_v_ptr, v_strides, sum_a, sum_p, turn_ptr, q_a, q_p, k_a, k_p, v, above, lse, delta,
    table_ptr, G, T, S, tiles, together, scale,
    GROUP: gl.constexpr, STAGES: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Gradients of k and v, and the unscaled ones by q_A and q_P in the order of tiles; turn_ptr: all zeros."""
    dtype: gl.constexpr = k_a.dtype
    BLOCK_M: gl.constexpr = q_a.block_type.shape[2]
    BLOCK_N: gl.constexpr = k_a.block_type.shape[2]
    A: gl.constexpr = k_a.block_type.shape[3]
    P: gl.constexpr = k_p.block_type.shape[3]
    V: gl.constexpr = v.block_type.shape[3]
    key_tiles = gl.cdiv(S, BLOCK_N)
    ticket = gl.atomic_add(turn_ptr, 1, sem="relaxed")
    key_head, tile, _ = work_of(ticket, gl.num_programs(0) // key_tiles, together, key_tiles, 1)
    batch = key_head // G
    group = key_head % G
    first_n = tile * BLOCK_N
    low, near, count = queries_of(tile, T, S, BLOCK_M, BLOCK_N)

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

    first_tile = (batch * G * GROUP + group * GROUP) * tiles
    turns = turn_ptr + 1
    gl.warp_specialize(
        [
            (key_gradients, (
                grad_k_ptr, k_strides, grad_v_ptr, v_strides, key_buffers, loaded, buffers, scores, grads,
                (full, ready, free), batch, group, first_n, low + S - T, near, count, S, scale, table_ptr, GROUP,
            )),
            (load_keys_and_queries, (
                (k_a, k_p, v), key_buffers, loaded, (q_a, q_p, above, lse, delta), buffers, full, ready, batch, group,
                first_n, G * GROUP, low, count, GROUP,
            )),
            (add_query_grads, (
                (sum_a, sum_p), turns, grads, ready, free, first_tile, tiles, tile, low, count, T, S,
                BLOCK_M, BLOCK_N, GROUP, 0,
            )),
            (add_query_grads, (
                (sum_a, sum_p), turns, grads, ready, free, first_tile, tiles, tile, low, count, T, S,
                BLOCK_M, BLOCK_N, GROUP, 1,
            )),
        ],
        [1, 1, 1],
        [HELPER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
    )  # fmt: skip


@triton.jit
def held_at(row, column):
    """Where `as_held` puts an element."""
    place = column // 8 * 512 + row // 16 * 128 + row % 8 * 16
    return place + column % 8 // 2 * 4 + row // 8 % 2 * 2 + column % 2


@triton.jit
def finish_kernel(
    grad_q_ptr, sum_a_ptr, sum_p_ptr, stride_b, stride_h, stride_t, stride_d, H, T, tiles, scale,
    A: tl.constexpr, P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries [B, H, T, A + P] from its two sums, tiles as `as_held` leaves them."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    m = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows = tl.arange(0, BLOCK_M)[:, None]
    a = tl.arange(0, A)[None, :]
    p = tl.arange(0, P)[None, :]
    by_a = tl.load(sum_a_ptr + tile * A + (held_at(a, rows) if BLOCK_M < 64 else held_at(rows, a)))
    by_p = tl.load(sum_p_ptr + tile * P + (held_at(p, rows) if BLOCK_M < 64 else held_at(rows, p)))
    grad_q_ptr += row // H * stride_b + row % H * stride_h
    store_tile(grad_q_ptr, 0, m, T, stride_t, stride_d, by_a * scale, A, A)
    store_tile(grad_q_ptr, A, m, T, stride_t, stride_d, by_p * -scale, P, P)


def backward(
    grads: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, lse2: Tensor,
    delta: Tensor, alpha: Tensor, score: Score, meta: dict[str, int],
) -> None:  # fmt: skip
    """Writes the gradients of q, k and v; lse2 and delta: `body.row_statistics`."""
    grad_q, grad_k, grad_v = grads
    batch, heads, queries, width = q.shape
    groups, keys, padded = *k.shape[1:3], lse2.shape[2]
    widths = (score.amplitude_dim, width - score.amplitude_dim)
    block_m, block_n = meta["BLOCK_M"], meta["BLOCK_N"]
    assert meta["STAGES"] == 2, "one of the two warps that add serves each stage"
    tiles = padded // block_m
    turns = torch.zeros(1 + batch * heads * tiles, dtype=torch.int32, device=q.device)
    sums = [torch.empty(batch * heads * padded * w, dtype=torch.float32, device=q.device) for w in widths]
    rows, columns = HELD.value
    assert all(block_m * w == rows * columns for w in widths), "each part's gradient is a matrix of 64 x 32"
    key_tiles = triton.cdiv(keys, block_n)
    table = power_table(alpha, score.phase_unit(q), keys)
    joint_kernel[(key_tiles * batch * groups,)](
        grad_k, grad_k.stride(), grad_v, grad_v.stride(),
        *(tiled(x.view(-1, columns), (rows, columns)) for x in sums), turns,
        *(by_head(x, block_m) for x in q.split(widths, 3)), *(by_head(x, block_n) for x in k.split(widths, 3)),
        by_head(v, block_n), by_head(grad_out, block_m),
        *(tiled(x.view(-1, padded), (1, block_m)) for x in (lse2, delta)), table[BEFORE:],
        groups, queries, keys, tiles, triton.cdiv(SPACING, tiles), score.scale,
        GROUP=heads // groups,
        **{name: value for name, value in meta.items() if not name.startswith("BLOCK")},
    )  # fmt: skip
    finish_kernel[(tiles * batch * heads,)](
        grad_q,
        *sums,
        *grad_q.stride(),
        heads,
        queries,
        tiles,
        score.scale,
        A=widths[0],
        P=widths[1],
        BLOCK_M=block_m,
    )


def by_head(x: Tensor, rows: int) -> TensorDescriptor:
    """As `tiles.describe`, for Gluon."""
    return laid_out(describe(x, rows, x.shape[3]))


def tiled(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A descriptor of float32 tiles of a matrix, rows one after another."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)
