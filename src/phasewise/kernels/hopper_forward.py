"""`body.forward` for compute capability 9.0: programs that stay, a warp that loads, groups of warps that multiply.

Letters as in `body`. A program has PARTS groups of four warps, 64 queries each. Groups begin their products in turns,
so that one makes weights of scores while the tensor cores work for another, and each begins the scores of its next
keys, those of its next tile too, before it weighs its values. Tiles of queries are drawn from a counter, those with
the most keys first, some heads at a time, so that their keys stay in the second-level cache. PoPE's queries are
expanded as they come; its keys are prepared before.

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
    warpgroup_mma,
    warpgroup_mma_wait,
)

from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.hopper_stages import (
    RING,
    ROWS,
    await_turn,
    barriers,
    blocks_of,
    load,
    pass_turn,
    place,
    ready,
    release,
    tile_in,
    tile_of_number,
)
from phasewise.kernels.prepare import expanded_like, magnitude, row_step, turn
from phasewise.kernels.stored_hopper import await_group, buffers, exp2, laid_out
from phasewise.kernels.tiles import LN2, UNSEEN, block_width, ceil_div, describe, launch

EXPANDED = (
    64,
    128,
)  # widths of queries that are expanded here: their halves lie side by side for tensor cores
CACHE = 32 << 20  # bytes of keys and values that are meant to stay in the second-level cache


@gluon.jit
def fetch(
    queries, at, tile, head, part, H, T, D,
    PARTS: gl.constexpr, KIND: gl.constexpr, PHASE: gl.constexpr, LAYOUT: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """A group's queries of a tile as they are, and for PoPE their angles and the head's phases, on their way."""
    q_ptr, q_strides, angle_ptr, angle_row, phase_ptr = queries
    t = (tile * PARTS + part) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    inside = ((t < T) & (at >= 0))[:, None] & (c < D)[None, :]
    b = (head // H).to(gl.int64)
    h = head % H
    q_at = q_ptr + b * q_strides[0] + h.to(gl.int64) * q_strides[1]
    q = gl.load(q_at + t.to(gl.int64)[:, None] * q_strides[2] + c[None, :], inside, other=0.0)
    angle = 0.0
    phase = 0.0
    if KIND != "none":
        angle = gl.load(
            angle_ptr + b * angle_row + t.to(gl.int64)[:, None] * D + c[None, :], inside, other=0.0
        )
        if PHASE:
            phase = gl.load(phase_ptr + h * D + c, c < D, other=0.0)
    return q, angle, phase


@gluon.jit
def put(tile, q, angle, phase, PHASE: gl.constexpr, KIND: gl.constexpr):
    """Leaves queries, expanded where they are PoPE's, to the tensor cores."""
    if KIND == "none":
        tile.store(q)
    else:
        if PHASE:
            angle = angle - phase[None, :]
        cos, sin = turn(angle, True)
        mu = q.to(gl.float32)
        if KIND != "identity":
            mu, _ = magnitude(mu, KIND, True)
        half: gl.constexpr = q.shape[1]
        tile.slice(0, half, 1).store((mu * cos).to(tile.dtype))
        tile.slice(half, half, 1).store((mu * sin).to(tile.dtype))
    fence_async_shared()
    await_group()


@gluon.jit
def unknown_zero(step):
    """0 that the compiler does not know, made where this stands."""
    return gl.inline_asm_elementwise("mov.s32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1)


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
def summed(p):
    """Sums of rows [M, 4]: those of four threads, each of its own columns."""
    parts = p.reshape([p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, 3), 1)


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
def begin(
    part, at, tile, step, smem, signals, T, S, PARTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Begins the scores of a tile's first block of keys that any of the group's queries sees; the block's step.

    After the last tile (at -1), a product of what lies there.
    """
    q_smem, k_smem, v_smem, _ = smem
    _, turns, k_full, k_empty, v_full, v_empty = signals
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    K_STAGES: gl.constexpr = k_full.shape[0]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    first = tile * (PARTS * ROWS)
    count = blocks_of(first + part * ROWS, ROWS, T, S, BLOCK_N, CAUSAL)
    whole = blocks_of(first, PARTS * ROWS, T, S, BLOCK_N, CAUSAL)
    for _block in range(count, gl.where(at >= 0, whole, count)):
        await_turn(turns, part, step, True)
        pass_turn(turns, part, True)
        ready(k_smem, k_full, step)
        release(k_empty, step)
        ready(v_smem, v_full, step)
        release(v_empty, step)
        step += 1
    mbarrier.wait(k_full.index(step % K_STAGES), step // K_STAGES & 1, at >= 0)
    k = tile_in(k_smem, step % K_STAGES)
    await_turn(turns, part, step, at >= 0)
    scores = warpgroup_mma(q_smem.index(part), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    pass_turn(turns, part, at >= 0)
    return step, scores


@gluon.jit
def advance(
    part, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals, MASKED: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Adds the values of the keys after n by the pairs of their weights, and makes the weights of those from n on."""
    q_smem, k_smem, v_smem, _ = smem
    _, turns, k_full, k_empty, v_full, v_empty = signals
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    dtype: gl.constexpr = k_smem.dtype
    out_layout: gl.constexpr = acc.type.layout
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    p = operand(pairs, dtype, out_layout)
    k = ready(k_smem, k_full, step)
    await_turn(turns, part, step, True)
    scores = warpgroup_mma(q_smem.index(part), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    v = ready(v_smem, v_full, step - 1)
    acc = warpgroup_mma(p, v, acc, is_async=True)
    pass_turn(turns, part, True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    release(k_empty, step)
    weights, shrink, top = weigh(scores, top, i, n, S, scale_log2, MASKED, CAUSAL)
    total_row: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    total = total * gl.convert_layout(shrink, total_row)[:, None] + summed(weights)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(v_empty, step - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
    return acc, packed(weights, dtype), top, total


@gluon.jit
def attend(
    part, queries, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, E, D, scale_log2,
    PARTS: gl.constexpr, CAUSAL: gl.constexpr, KIND: gl.constexpr, PHASE: gl.constexpr, RAW: gl.constexpr,
    BLOCK_E: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of 64 queries of every tile that is drawn."""
    q_smem, k_smem, v_smem, drawn = smem
    known, k_empty, v_full, v_empty = signals[0], signals[3], signals[4], signals[5]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = v_smem.shape[4]
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    out_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    d = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, out_layout))
    number = 0
    at = tile_of_number(drawn, known, number)
    tile, head = place(at, tiles, heads, together)
    q, angle, phase = fetch(queries, at, tile, head, part, H, T, E, PARTS, KIND, PHASE, RAW, BLOCK_E)
    put(q_smem.index(part), q, angle, phase, PHASE, KIND)
    step, scores = begin(part, at, tile, gl.to_tensor(0), smem, signals, T, S, PARTS, CAUSAL)
    scores = warpgroup_mma_wait(0, deps=[scores])
    while at >= 0:
        m = (tile * PARTS + part) * ROWS
        t = m + gl.arange(0, ROWS, layout=row)
        i = t + (S - T)
        count = blocks_of(m, ROWS, T, S, BLOCK_N, CAUSAL)
        seen_by_all = S // BLOCK_N
        if CAUSAL:
            seen_by_all = gl.minimum(S, m + 1 + S - T) // BLOCK_N
        n = (count - 1) * BLOCK_N
        release(k_empty, step)
        # Above every hidden score, scaled or not, so that hidden keys weigh 0 from the start.
        top = gl.full([ROWS], -1e20, gl.float32, row)
        weights, _, top = weigh(scores, top, i, n, S, scale_log2, True, CAUSAL)
        total = summed(weights)
        pairs = packed(weights, dtype)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, out_layout)
        for _ in range(gl.minimum(seen_by_all, count - 1), count - 1):
            n -= BLOCK_N
            step += 1
            acc, pairs, top, total = advance(
                part, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals, True, CAUSAL
            )  # fmt: skip
        for _ in range(0, gl.minimum(seen_by_all, count - 1)):
            n -= BLOCK_N
            step += 1
            acc, pairs, top, total = advance(
                part, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals, False, CAUSAL
            )  # fmt: skip
        number += 1
        lse_at = lse_ptr + head.to(gl.int64) * T
        out_at = (
            out_ptr + (head // H).to(gl.int64) * out_strides[0] + (head % H).to(gl.int64) * out_strides[1]
        )
        at = tile_of_number(drawn, known, number)
        tile, head = place(gl.maximum(at, 0), tiles, heads, together)
        q, angle, phase = fetch(queries, at, tile, head, part, H, T, E, PARTS, KIND, PHASE, RAW, BLOCK_E)
        p = operand(pairs, dtype, out_layout)
        v = ready(v_smem, v_full, step)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        put(q_smem.index(part), q, angle, phase, PHASE, KIND)
        last = step
        step, scores = begin(part, at, tile, step + 1, smem, signals, T, S, PARTS, CAUSAL)
        acc = warpgroup_mma_wait(1, deps=[acc])
        release(v_empty, last)
        total = gl.convert_layout(gl.sum(total, 1), row)
        gl.store(lse_at + t, top * LN2 + gl.log(total), t < T)
        share = gl.convert_layout(1.0 / total, out_row)
        t = gl.convert_layout(t, out_row)
        out_at += t.to(gl.int64)[:, None] * out_strides[2] + d[None, :]
        gl.store(out_at, (acc * share[:, None]).to(dtype), (t < T)[:, None] & (d < D)[None, :])
        scores = warpgroup_mma_wait(0, deps=[scores])


@gluon.constexpr_function
def by_vectors(width):
    """A layout of 64 rows in which a thread has 8 channels side by side."""
    return gl.BlockedLayout([1, 8], [32 * 8 // width, width // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def for_products(width):
    """The layout in shared memory of 64 rows that tensor cores read."""
    return gl.NVMMASharedLayout.get_default_for([64, width], gl.float16)


@gluon.jit(do_not_specialize=("H", "GROUP", "heads", "tiles", "together", "T", "S"))
def forward_kernel(
    q_ptr, q_strides, angle_ptr, angle_row, phase_ptr, k_desc, v_desc, out_ptr, out_strides, lse_ptr, draw_ptr,
    H, GROUP, heads, tiles, together, T, S, E, D, scale_log2,
    BLOCK_E: gl.constexpr, KIND: gl.constexpr, CAUSAL: gl.constexpr,
    PARTS: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    """Output [B, H, T, D] and natural log-sum-exp [B, H, T]; draw_ptr: zero.

    KIND: "none", or PoPE's magnitude of queries that are not expanded yet; E is their width, in memory BLOCK_E.
    """
    BLOCK_K: gl.constexpr = k_desc.block_shape[3]
    RAW: gl.constexpr = by_vectors(BLOCK_E)
    PHASE: gl.constexpr = phase_ptr is not None
    q_layout: gl.constexpr = for_products(BLOCK_K)
    smem = (
        gl.allocate_shared_memory(k_desc.dtype, [PARTS, ROWS, BLOCK_K], q_layout),
        buffers(K_STAGES, k_desc),
        buffers(V_STAGES, v_desc),
        gl.allocate_shared_memory(gl.int32, [RING, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    signals = (
        barriers(RING, 1), barriers(PARTS, 1), barriers(K_STAGES, 1), barriers(K_STAGES, PARTS), barriers(V_STAGES, 1),
        barriers(V_STAGES, PARTS),
    )  # fmt: skip
    fence_async_shared()
    queries = (q_ptr, q_strides, angle_ptr, angle_row, phase_ptr)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (attend, (
                    0, queries, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, E, D,
                    scale_log2, PARTS, CAUSAL, KIND, PHASE, RAW, BLOCK_E,
                )),
                (attend, (
                    1, queries, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, E, D,
                    scale_log2, PARTS, CAUSAL, KIND, PHASE, RAW, BLOCK_E,
                )),
                (load, (
                    k_desc, v_desc, smem, signals, draw_ptr, H, GROUP, heads, tiles, together, T, S, PARTS, CAUSAL,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (
                    0, queries, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, E, D,
                    scale_log2, PARTS, CAUSAL, KIND, PHASE, RAW, BLOCK_E,
                )),
                (attend, (
                    1, queries, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, E, D,
                    scale_log2, PARTS, CAUSAL, KIND, PHASE, RAW, BLOCK_E,
                )),
                (attend, (
                    2, queries, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, E, D,
                    scale_log2, PARTS, CAUSAL, KIND, PHASE, RAW, BLOCK_E,
                )),
                (load, (
                    k_desc, v_desc, smem, signals, draw_ptr, H, GROUP, heads, tiles, together, T, S, PARTS, CAUSAL,
                )),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool,
    kind: str = "none", angle: Tensor | None = None, phase: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]`, stored place by place, and float32 log-sum-exp `[B, H, T]`.

    q is `[B, H, T, E]`, k `[B, H / group, S, E]`, v `[B, H / group, S, D]`, T up to S, any strides. With a kind, PoPE's
    magnitude, queries are not expanded yet, `[B, H, T, E / 2]`, and come with their angles and perhaps phases.
    """
    q = q if q.stride(3) == 1 else q.contiguous()
    rows, heads, queries, width = q.shape
    keys, value_width = k.shape[2], v.shape[3]
    out = expanded_like(q, value_width)
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    meta = launch("separable.hopper.forward", q, qk=k.shape[3], v=value_width, length=keys)
    block_n, block_e, block_d = meta["BLOCK_N"], block_width(width), block_width(value_width)
    group = heads // k.shape[1]
    tiles = ceil_div(queries, 64 * meta["PARTS"])
    together = max(1, CACHE // (keys * (k.shape[3] + value_width) * q.element_size())) * group
    programs = min(multiprocessors(q.device), tiles * rows * heads)
    descriptors = describe(k, block_n, block_width(k.shape[3])), describe(v, block_n, block_d)
    forward_kernel[(programs,)](
        q, q.stride(), angle, 0 if angle is None else row_step(angle), phase, *map(laid_out, descriptors),
        out, out.stride(), lse, torch.zeros(1, dtype=torch.int32, device=q.device),
        heads, group, rows * heads, tiles, together, queries, keys, width, value_width, scale * math.log2(math.e),
        BLOCK_E=block_e, KIND=kind, CAUSAL=causal,
        **{name: value for name, value in meta.items() if name != "BLOCK_N"}, num_warps=4,
    )  # fmt: skip
    return out, lse
