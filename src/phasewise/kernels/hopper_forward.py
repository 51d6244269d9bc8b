"""`body.forward` for compute capability 9.0: programs that stay, a warp that loads, groups of warps that multiply.

Letters as in `body`. A program has PARTS groups of four warps, 64 queries each. They begin their products in turns, so
that one makes weights of scores while the tensor cores work for another, and each begins the scores of its next keys
before it weighs its values. Tiles of queries are drawn from a counter, those with the most keys first, some heads at a
time, so that their keys stay in the second-level cache. A tile's first keys are copied while the tile before ends, and
a group's queries as soon as it is done with its last ones.

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
from phasewise.kernels.hopper_draw import board, place, tell, told_tile
from phasewise.kernels.hopper_pairs import finish, operand, packed
from phasewise.kernels.hopper_places import (
    await_empty,
    barriers,
    copy_in,
    lends,
    places_of_last,
    ready,
    release,
)
from phasewise.kernels.prepare import expanded_like
from phasewise.kernels.stored_hopper import buffers, exp2, laid_out, tile_in
from phasewise.kernels.tapa_joint import unknown_zero
from phasewise.kernels.tiles import LN2, UNSEEN, block_width, ceil_div, describe, launch

ROWS = gl.constexpr(64)  # queries of a group of warps: the rows of one tensor core instruction
CACHE = 32 << 20  # bytes of keys and values that are meant to stay in the second-level cache


@gluon.jit
def blocks_of(m, rows, T, S, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys any of `rows` queries from m on sees."""
    high = S
    if CAUSAL:
        high = gl.minimum(S, m + rows + S - T)
    return (high + BLOCK_N - 1) // BLOCK_N


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
    last_smem, last_full, last_empty = places_of_last(smem, signals)
    LENT: gl.constexpr = lends(v_smem.shape[0])
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    total = tiles * heads
    at = gl.program_id(0)
    turn = 0
    step = 0
    tile, head = place(at, tiles, heads, together)
    tell(drawn, tile * (PARTS * ROWS), head, turn)
    while at < total:
        if units is not None:
            await_prepared(draw_ptr + 1 + head // shared, units)
        b = head // H
        h = head % H
        count = blocks_of(tile * (PARTS * ROWS), PARTS * ROWS, T, S, BLOCK_N, CAUSAL)
        n = (count - 1) * BLOCK_N
        copy_in(k_desc, [b, h // GROUP, n, 0], k_smem, k_full, k_empty, step)
        for part in gl.static_range(PARTS):
            m = (tile * PARTS + part) * ROWS
            slot = part
            if not LENT:
                slot = await_empty(q_empty, part, turn, PARTS)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [b, h, m, 0], q_full.index(slot), q_smem.index(slot))
        at = gl.num_programs(0) + gl.atomic_add(draw_ptr, 1, sem="relaxed")
        for _ in range(1, count):
            copy_in(k_desc, [b, h // GROUP, n - BLOCK_N, 0], k_smem, k_full, k_empty, step + 1)
            copy_in(v_desc, [b, h // GROUP, n, 0], v_smem, v_full, v_empty, step)
            n -= BLOCK_N
            step += 1
        if LENT:
            step += 1
        copy_in(v_desc, [b, h // GROUP, n, 0], last_smem, last_full, last_empty, step)
        step += 1
        turn += 1
        tile, head = place(at, tiles, heads, together)
        tell(drawn, gl.where(at < total, tile * (PARTS * ROWS), -1), head, turn)
    if units is not None:
        await_end()


@gluon.jit
def summed(p):
    """Sums of rows [M, 4]: those of four threads, each of its own columns."""
    parts = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


@gluon.jit
def columns_of(parts):
    """Columns of [M, N / 8, 4, 2] as numbers that the compiler knows, but for twice the third index.

    The first of each eight columns and both of a pair; four threads have the pairs of a row's eight.
    """
    layout: gl.constexpr = parts.type.layout
    eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    pair: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    eights = 8 * gl.arange(0, parts.shape[1], layout=eight)
    return eights[None, :, None, None], gl.arange(0, 2, layout=pair)[None, None, None, :]


@gluon.jit
def masked(scores, last):
    """Scores [M, N] of columns up to `last` of each row."""
    parts = scores.reshape([scores.shape[0], scores.shape[1] // 8, 4, 2])
    eights, pairs = columns_of(parts)
    threads: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    # Made here: what is compared before the scores are there has to be kept for as many elements.
    last = gl.convert_layout(last + unknown_zero(0), gl.SliceLayout(1, threads))[:, None]
    last = last - 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, threads))[None, :]
    parts = gl.where(eights + pairs <= last[:, None, :, None], parts, UNSEEN)
    return gl.convert_layout(parts.reshape(scores.shape), scores.type.layout)


@gluon.jit
def weigh(scores, top, i, n, S, scale_log2, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """Weights of scores of keys from n on, what earlier ones are to be multiplied by, and the rows' greatest score."""
    if MASKED:
        last = (gl.minimum(i, S - 1) if CAUSAL else S - 1 + i * 0) - n
        scores = masked(scores, last)
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    return exp2(scores * scale_log2 - new_top[:, None]), exp2(top - new_top), new_top


@gluon.jit
def await_turn(turns, part, number, counted):
    """Groups begin their products of a step one after another, and the first when the last has begun its own.

    But for a tile's first steps, which not all groups have: they are not counted.
    """
    first = 1 if part == 0 else 0
    mbarrier.wait(turns.index(part), (number + first) & 1, pred=counted)


@gluon.jit
def pass_turn(turns, part, counted):
    """The next group may begin."""
    mbarrier.arrive(turns.index((part + 1) % turns.shape[0]), pred=counted)


@gluon.jit
def advance(
    part, q_at, acc, pairs, top, total, i, n, S, scale_log2, step, number, counted, smem, signals,
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
    await_turn(turns, part, number, counted)
    q = tile_in(q_smem, q_at)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    v = ready(v_smem, v_full, step - 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    pass_turn(turns, part, counted)
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
def share_of(top, total, m, head, lse_ptr, T, out_row: gl.constexpr):
    """Stores the log-sum-exp of queries from m on; what their outputs are to be multiplied by."""
    row: gl.constexpr = top.type.layout
    t = m + gl.arange(0, ROWS, layout=row)
    total = gl.convert_layout(gl.sum(total, 1), row)
    gl.store(lse_ptr + head.to(gl.int64) * T + t, (top + gl.log2(total)) * LN2, t < T)
    return gl.convert_layout(1.0 / total, out_row)


@gluon.jit
def attend(part, given, D: gl.constexpr, PARTS: gl.constexpr, CAUSAL: gl.constexpr):
    """Output and log-sum-exp of 64 queries of every tile that is drawn."""
    smem, signals, drawn, out_ptr, out_strides, lse_ptr, H, T, S, scale_log2 = given
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = signals[:6]
    last_smem, last_full, last_empty = places_of_last(smem, signals)
    LENT: gl.constexpr = lends(v_smem.shape[0])
    Q_STAGES: gl.constexpr = q_full.shape[0] // PARTS
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = v_smem.shape[4]
    ALONE: gl.constexpr = ((PARTS - 1) * ROWS + BLOCK_N - 1) // BLOCK_N + 1
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    rows = gl.arange(0, ROWS, layout=row)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    step = 0
    turn = 0
    uncounted = 0
    m, head = told_tile(drawn, turn)
    while m >= 0:
        m += part * ROWS
        i = m + rows + (S - T)
        count = blocks_of(m, ROWS, T, S, BLOCK_N, CAUSAL)
        steps = blocks_of(m - part * ROWS, PARTS * ROWS, T, S, BLOCK_N, CAUSAL)
        unseen = steps - count
        counted_from = step + ALONE
        uncounted += gl.minimum(ALONE, steps)
        for _ in range(0, unseen):
            ready(k_smem, k_full, step)
            release(k_empty, step)
            step += 1
        seen_by_all = S // BLOCK_N
        if CAUSAL:
            seen_by_all = gl.minimum(S, m + 1 + S - T) // BLOCK_N
        n = (count - 1) * BLOCK_N
        k = ready(k_smem, k_full, step)
        q_at = turn % Q_STAGES * PARTS + part
        mbarrier.wait(q_full.index(q_at), turn // Q_STAGES & 1)
        q = tile_in(q_smem, q_at)
        scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        release(k_empty, step)
        top = gl.full([ROWS], -1e20, gl.float32, row)
        weights, _, top = weigh(scores, top, i, n, S, scale_log2, True, CAUSAL)
        total = summed(weights)
        pairs = packed(weights, dtype)
        for past in range(step - unseen, step):
            ready(v_smem, v_full, past)
            release(v_empty, past)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, out_layout)
        whole = gl.minimum(seen_by_all, count - 1)
        for last in gl.static_range(2):
            # As if it were another place: ptxas takes what addresses it from a loop before, which may not have run.
            q_at += unknown_zero(n)
            for _ in range(0, whole if last else count - 1 - whole):
                n -= BLOCK_N
                step += 1
                acc, pairs, top, total = advance(
                    part, q_at, acc, pairs, top, total, i, n, S, scale_log2, step, step - uncounted,
                    step >= counted_from, smem, signals, last == 0, CAUSAL,
                )  # fmt: skip
        if not LENT:
            release(q_empty, q_at)
        p = operand(pairs, dtype, out_layout)
        if LENT:
            step += 1
            uncounted += 1
        v = ready(last_smem, last_full, step)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        turn += 1
        next_m, next_head = told_tile(drawn, turn)
        share = share_of(top, total, m, head, lse_ptr, T, out_row)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(last_empty, step)
        finish(acc, share, m, head, out_ptr, out_strides, H, T, D, dtype)
        step += 1
        m = next_m
        head = next_head


@gluon.jit(do_not_specialize=("shared", "units", "H", "GROUP", "heads", "tiles", "together", "T", "S"))
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, out_strides, lse_ptr, draw_ptr, shared, units, H, GROUP, heads, tiles, together,
    T, S, D: gl.constexpr, scale_log2,
    PARTS: gl.constexpr, Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Output [B, H, T, D] and natural log-sum-exp [B, H, T]; draw_ptr: zero.

    With units, counts of what is prepared follow it, one for `shared` heads, which may be read at so many.
    """
    smem = (buffers(Q_STAGES * PARTS, q_desc), buffers(K_STAGES, k_desc), buffers(V_STAGES, v_desc))
    turns = barriers(PARTS, 1)
    LENT: gl.constexpr = lends(V_STAGES)
    gl.static_assert(not LENT or (Q_STAGES == 1 and K_STAGES == 2))
    signals = (
        barriers(Q_STAGES * PARTS, 1), () if LENT else barriers(Q_STAGES * PARTS, 1), barriers(K_STAGES, 1),
        barriers(K_STAGES, PARTS), barriers(V_STAGES, 1), barriers(V_STAGES, PARTS), turns,
    )  # fmt: skip
    drawn = board(Q_STAGES + 1)
    fence_async_shared()
    descriptors = (q_desc, k_desc, v_desc)
    given = (smem, signals, drawn, out_ptr, out_strides, lse_ptr, H, T, S, scale_log2)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (attend, (0, given, D, PARTS, CAUSAL)),
                (attend, (1, given, D, PARTS, CAUSAL)),
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
                (attend, (0, given, D, PARTS, CAUSAL)),
                (attend, (1, given, D, PARTS, CAUSAL)),
                (attend, (2, given, D, PARTS, CAUSAL)),
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
        describe(v, block_n, max(32, block_width(value_width))),  # what `finish` takes
    )
    forward_kernel[(min(multiprocessors(q.device), tiles * rows * heads),)](
        *map(laid_out, descriptors), out, out.stride(), lse, awaited.counts, awaited.heads, awaited.units,
        heads, group, rows * heads, tiles, awaited.together, queries, keys, value_width, scale * math.log2(math.e),
        CAUSAL=causal, num_warps=4, launch_pdl=awaited.units is not None, **meta,
    )  # fmt: skip
    return out, lse
