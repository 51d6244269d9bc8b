"""`body.forward` for compute capability 9.0: programs that stay, a warp that loads, groups of warps that multiply.

Letters as in `body`. A program has PARTS groups of four warps, 64 queries each. They begin their products in turns, so
that one makes weights of scores while the tensor cores work for another, and each begins the scores of its next keys
before it weighs its values. Tiles of queries are drawn from a counter, those with the most keys first, some heads at a
time, so that their keys stay in the second-level cache.

For queries that are the last of the keys, without positions, window or slopes, in half precision.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportIndexIssue=false
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

from phasewise.kernels.ahead import Awaited
from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.prepare import expanded_like
from phasewise.kernels.stored_hopper import await_group, exp2, laid_out
from phasewise.kernels.tiles import LN2, UNSEEN, block_width, ceil_div, describe, launch

ROWS = gl.constexpr(64)  # queries of a group of warps: the rows of one tensor core instruction
CACHE = 32 << 20  # bytes of keys and values that are meant to stay in the second-level cache


@gluon.jit
def place(at, tiles, heads, together):
    """Tile of queries, longest first, and head of a number that was drawn."""
    first = at // (tiles * together) * together
    within = at - first * tiles
    here = gl.minimum(together, heads - first)
    return tiles - 1 - within // here, first + within % here


@gluon.jit
def blocks_of(m, rows, T, S, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys any of `rows` queries from m on sees."""
    high = S
    if CAUSAL:
        high = gl.minimum(S, m + rows + S - T)
    return (high + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def buffers(COUNT: gl.constexpr, descriptor):
    """Shared memory for as many tiles."""
    shape: gl.constexpr = [COUNT] + descriptor.block_shape  # noqa: RUF005 (the compiler knows no unpacking)
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def tile_in(buffer, stage):
    """One stage of a buffer [stages, 1, 1, rows, columns] as a matrix."""
    one = buffer.index(stage)
    shape: gl.constexpr = one.shape
    return one.reshape([shape[2], shape[3]])


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each of so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(COUNT):
        mbarrier.init(made.index(number), count=ARRIVALS)
    return made


@gluon.jit
def copy_in(descriptor, at, buffer, full, empty, step):
    """Begins the copy of the `step`th tile into its stage, once that is free."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(step % STAGES), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, at, full.index(step % STAGES), buffer.index(step % STAGES))


@gluon.jit
def await_prepared(done_ptr, units):
    """Until as many are counted, for the copy engine too."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 count;
        again: ld.acquire.gpu.global.b32 count, [$1];
        setp.lt.s32 p, count, $2;
        @p bra again;
        fence.proxy.async.global;
        mov.b32 $0, count;
        }""",
        "=r,l,r", [done_ptr, units], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_end():
    """Until the kernel before has ended, which those after this one count on."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load(
    descriptors, smem, signals, drawn, draw_ptr, shared, units, H, GROUP, heads, tiles, together, T, S,
    PARTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Draws tiles, and copies their queries, keys and values as soon as there is room."""
    q_desc, k_desc, v_desc = descriptors
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = signals[:6]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    Q_STAGES: gl.constexpr = q_full.shape[0]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    total = tiles * heads
    at = gl.program_id(0)
    turn = 0
    step = 0
    while at < total:
        tile, head = place(at, tiles, heads, together)
        if units is not None:
            await_prepared(draw_ptr + 1 + head // shared, units)
        m = tile * (PARTS * ROWS)
        b = head // H
        h = head % H
        stage = turn % Q_STAGES
        here = q_full.index(stage)
        mbarrier.wait(q_empty.index(stage), (turn // Q_STAGES & 1) ^ 1)
        drawn.index(stage).store(gl.full([1], at, gl.int32, one))
        mbarrier.expect(here, PARTS * q_desc.block_type.nbytes)
        for part in gl.static_range(PARTS):
            to = q_smem.index(stage * PARTS + part)
            tma.async_copy_global_to_shared(q_desc, [b, h, m + part * ROWS, 0], here, to)
        count = blocks_of(m, PARTS * ROWS, T, S, BLOCK_N, CAUSAL)
        n = (count - 1) * BLOCK_N
        copy_in(k_desc, [b, h // GROUP, n, 0], k_smem, k_full, k_empty, step)
        at = gl.num_programs(0) + gl.atomic_add(draw_ptr, 1, sem="relaxed")
        for _ in range(1, count):
            copy_in(k_desc, [b, h // GROUP, n - BLOCK_N, 0], k_smem, k_full, k_empty, step + 1)
            copy_in(v_desc, [b, h // GROUP, n, 0], v_smem, v_full, v_empty, step)
            n -= BLOCK_N
            step += 1
        copy_in(v_desc, [b, h // GROUP, n, 0], v_smem, v_full, v_empty, step)
        step += 1
        turn += 1
    stage = turn % Q_STAGES
    mbarrier.wait(q_empty.index(stage), (turn // Q_STAGES & 1) ^ 1)
    drawn.index(stage).store(gl.full([1], -1, gl.int32, one))
    mbarrier.arrive(q_full.index(stage))
    if units is not None:
        await_end()


@gluon.jit
def ready(buffer, full, step):
    """The `step`th tile, once it is there."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    return tile_in(buffer, step % STAGES)


@gluon.jit
def release(empty, step):
    """The group is done with the `step`th tile."""
    STAGES: gl.constexpr = empty.shape[0]
    await_group()
    mbarrier.arrive(empty.index(step % STAGES))


@gluon.jit
def unknown_zero(step):
    """0 that the compiler does not know, made where this stands."""
    return gl.inline_asm_elementwise("mov.s32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def summed(p):
    """Sums of rows [M, 4]: those of four threads, each of its own columns."""
    parts = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def weigh(scores, top, i, n, S, scale_log2, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Weights of scores of keys from n on, what earlier ones are to be multiplied by, and the rows' greatest score."""
    if MASKED:
        columns = gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        # Compared here: what is compared before the scores are there has to be kept for as many elements.
        last = (gl.minimum(i, S - 1) if CAUSAL else S - 1 + i * 0) - n + unknown_zero(n)
        scores = gl.where(columns[None, :] <= last[:, None], scores, UNSEEN)
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    return exp2(scores * scale_log2 - new_top[:, None]), exp2(top - new_top), new_top


@gluon.jit
def packed(weights, dtype: gl.constexpr):
    """Pairs of weights rounded to half precision, as int32: a loop that hands on halves takes pairs apart."""
    pairs = weights.reshape([weights.shape[0], weights.shape[1] // 2, 2])
    first, second = pairs.split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], gl.int32, True, 1
        )


@gluon.jit
def operand(pairs, dtype: gl.constexpr, out_layout: gl.constexpr):
    """What `packed` made, as the operand of a product."""
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (gl.int16, gl.int16), True, 1
    )
    p = gl.join(first, second).reshape([pairs.shape[0], 2 * pairs.shape[1]]).to(dtype, bitcast=True)
    return gl.convert_layout(p, gl.DotOperandLayout(0, out_layout, 2))


@gluon.jit
def await_turn(turns, part, step):
    """Groups begin their products of a step one after another, and the first when the last has begun its own."""
    first = 1 if part == 0 else 0
    mbarrier.wait(turns.index(part), (step + first) & 1)


@gluon.jit
def pass_turn(turns, part):
    """The next group may begin."""
    mbarrier.arrive(turns.index((part + 1) % turns.shape[0]))


@gluon.jit
def advance(
    part, q_at, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Adds the values of the keys after n by the pairs of their weights, and makes the weights of those from n on."""
    q_smem, k_smem, v_smem = smem
    _, _, k_full, k_empty, v_full, v_empty, turns = signals
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    dtype: gl.constexpr = k_smem.dtype
    out_layout: gl.constexpr = acc.type.layout
    p = operand(pairs, dtype, out_layout)
    k = ready(k_smem, k_full, step)
    await_turn(turns, part, step)
    q = tile_in(q_smem, q_at)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    v = ready(v_smem, v_full, step - 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    pass_turn(turns, part)
    scores = warpgroup_mma_wait(1, deps=[scores])
    release(k_empty, step)
    weights, shrink, top = weigh(scores, top, i, n, S, scale_log2, MASKED, CAUSAL)
    total_row: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    total = total * gl.convert_layout(shrink, total_row)[:, None] + summed(weights)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(v_empty, step - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, packed(weights, dtype), top, total


@gluon.jit
def next_tile(drawn, full, turn):
    """The number that was drawn for the `turn`th tile, once its queries are there; -1 after the last."""
    STAGES: gl.constexpr = full.shape[0]
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1)
    return gl.max(drawn.index(turn % STAGES).load(one), 0)


@gluon.jit
def attend(
    part, smem, signals, drawn, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D, scale_log2,
    PARTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of 64 queries of every tile that is drawn."""
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = signals
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = v_smem.shape[4]
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    rows = gl.arange(0, ROWS, layout=row)
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, out_layout))
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    step = 0
    turn = 0
    at = next_tile(drawn, q_full, turn)
    while at >= 0:
        q_at = turn % q_full.shape[0] * PARTS + part
        tile, head = place(at, tiles, heads, together)
        m = tile * (PARTS * ROWS) + part * ROWS
        i = m + rows + (S - T)
        count = blocks_of(m, ROWS, T, S, BLOCK_N, CAUSAL)
        for _ in range(count, blocks_of(tile * (PARTS * ROWS), PARTS * ROWS, T, S, BLOCK_N, CAUSAL)):
            await_turn(turns, part, step)
            pass_turn(turns, part)
            ready(k_smem, k_full, step)
            release(k_empty, step)
            ready(v_smem, v_full, step)
            release(v_empty, step)
            step += 1
        seen_by_all = S // BLOCK_N
        if CAUSAL:
            seen_by_all = gl.minimum(S, m + 1 + S - T) // BLOCK_N
        n = (count - 1) * BLOCK_N
        k = ready(k_smem, k_full, step)
        await_turn(turns, part, step)
        q = tile_in(q_smem, q_at)
        scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        pass_turn(turns, part)
        scores = warpgroup_mma_wait(0, deps=[scores])
        release(k_empty, step)
        top = gl.full([ROWS], -1e20, gl.float32, row)
        weights, _, top = weigh(scores, top, i, n, S, scale_log2, True, CAUSAL)
        total = summed(weights)
        pairs = packed(weights, dtype)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, out_layout)
        for _ in range(gl.minimum(seen_by_all, count - 1), count - 1):
            n -= BLOCK_N
            step += 1
            acc, pairs, top, total = advance(
                part, q_at, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals, True, CAUSAL
            )  # fmt: skip
        # As if it were another place: ptxas takes what addresses it from the loop before, which may not have run.
        q_at += unknown_zero(n)
        for _ in range(0, gl.minimum(seen_by_all, count - 1)):
            n -= BLOCK_N
            step += 1
            acc, pairs, top, total = advance(
                part, q_at, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals, False, CAUSAL
            )  # fmt: skip
        release(q_empty, turn)
        p = operand(pairs, dtype, out_layout)
        v = ready(v_smem, v_full, step)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(v_empty, step)
        step += 1
        turn += 1
        t = m + rows
        total = gl.convert_layout(gl.sum(total, 1), row)
        gl.store(lse_ptr + head.to(gl.int64) * T + t, top * LN2 + gl.log(total), t < T)
        share = gl.convert_layout(1.0 / total, out_row)
        t = gl.convert_layout(t, out_row)
        out_at = (
            out_ptr + (head // H).to(gl.int64) * out_strides[0] + (head % H).to(gl.int64) * out_strides[1]
        )
        out_at += t.to(gl.int64)[:, None] * out_strides[2] + d[None, :]
        gl.store(out_at, (acc * share[:, None]).to(dtype), (t < T)[:, None] & (d < D)[None, :])
        at = next_tile(drawn, q_full, turn)


@gluon.jit(do_not_specialize=("shared", "units", "H", "GROUP", "heads", "tiles", "together", "T", "S"))
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, out_strides, lse_ptr, draw_ptr, shared, units, H, GROUP, heads, tiles, together,
    T, S, D, scale_log2, PARTS: gl.constexpr, Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """Output [B, H, T, D] and natural log-sum-exp [B, H, T]; draw_ptr: zero.

    With units, counts of what is prepared follow it, one for `shared` heads, which may be read at so many.
    """
    smem = (buffers(Q_STAGES * PARTS, q_desc), buffers(K_STAGES, k_desc), buffers(V_STAGES, v_desc))
    turns = barriers(PARTS, 1)
    signals = (
        barriers(Q_STAGES, 1), barriers(Q_STAGES, PARTS), barriers(K_STAGES, 1), barriers(K_STAGES, PARTS),
        barriers(V_STAGES, 1), barriers(V_STAGES, PARTS), turns,
    )  # fmt: skip
    drawn = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    descriptors = (q_desc, k_desc, v_desc)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (attend, (
                    0, smem, signals, drawn, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D,
                    scale_log2, PARTS, CAUSAL,
                )),
                (attend, (
                    1, smem, signals, drawn, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D,
                    scale_log2, PARTS, CAUSAL,
                )),
                (load, (
                    descriptors, smem, signals, drawn, draw_ptr, shared, units, H, GROUP, heads, tiles, together,
                    T, S, PARTS, CAUSAL,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (
                    0, smem, signals, drawn, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D,
                    scale_log2, PARTS, CAUSAL,
                )),
                (attend, (
                    1, smem, signals, drawn, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D,
                    scale_log2, PARTS, CAUSAL,
                )),
                (attend, (
                    2, smem, signals, drawn, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D,
                    scale_log2, PARTS, CAUSAL,
                )),
                (load, (
                    descriptors, smem, signals, drawn, draw_ptr, shared, units, H, GROUP, heads, tiles, together,
                    T, S, PARTS, CAUSAL,
                )),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


def evenly(count: int, most: int) -> int:
    """How many of `count` to take at a time, `most` or a few less, so that the last time has about as many.

    The longest tiles of what is taken last begin when all others end: a few heads there cost as much as many.

    >>> evenly(256, 42)
    32
    """
    times = ceil_div(count, most)
    shares = (ceil_div(count, times + more) for more in range(4))
    return min(shares, key=lambda share: -count % share)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, awaited: Awaited | None = None
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, D]`, stored place by place, and float32 log-sum-exp `[B, H, T]`.

    q is `[B, H, T, E]`, k `[B, H / group, S, E]`, v `[B, H / group, S, D]`, any strides; T up to S where causal.
    awaited: q and k are still being prepared, by the kernel before.
    """
    rows, heads, queries, width = q.shape
    keys, value_width = k.shape[2], v.shape[3]
    meta = launch("separable.hopper.forward", q, qk=width, v=value_width, length=keys)
    block_e, block_n, tile = block_width(width), meta.pop("BLOCK_N"), 64 * meta["PARTS"]
    tiles, group = ceil_div(queries, tile), heads // k.shape[1]
    held = max(1, CACHE // (keys * (width + value_width) * q.element_size()))
    together = group * evenly(rows * k.shape[1], held)
    out = expanded_like(q, value_width)
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    if awaited is None:
        awaited = Awaited(torch.zeros(1, dtype=torch.int32, device=q.device), None, None, together)
    descriptors = (
        describe(q, 64, block_e),
        describe(k, block_n, block_e),
        describe(v, block_n, block_width(value_width)),
    )
    forward_kernel[(min(multiprocessors(q.device), tiles * rows * heads),)](
        *map(laid_out, descriptors), out, out.stride(), lse, awaited.counts, awaited.heads, awaited.units,
        heads, group, rows * heads, tiles, awaited.together, queries, keys, value_width, scale * math.log2(math.e),
        CAUSAL=causal, num_warps=4, launch_pdl=awaited.units is not None, **meta,
    )  # fmt: skip
    return out, lse
