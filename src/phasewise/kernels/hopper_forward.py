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
from phasewise.kernels.hopper_queries import bring
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
from phasewise.kernels.prepare import expanded_like, row_step
from phasewise.kernels.stored_hopper import buffers, exp2, laid_out
from phasewise.kernels.tiles import LN2, UNSEEN, block_width, ceil_div, describe, launch

CACHE = 32 << 20  # bytes of keys and values that are meant to stay in the second-level cache


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
    part, number, step, smem, signals, heads, tiles, together, T, S, PARTS: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Begins the scores of the `number`th tile's first block of keys that any of the group's queries sees.

    Its number as drawn (-1 after the last, with a product of what lies there), tile, head, and the block's step.
    """
    q_smem, k_smem, v_smem, drawn = smem
    known, turns, q_full, _, k_full, k_empty, v_full, v_empty = signals
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    K_STAGES: gl.constexpr = k_full.shape[0]
    Q_STAGES: gl.constexpr = q_full.shape[0]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    at = tile_of_number(drawn, known, number)
    tile, head = place(gl.maximum(at, 0), tiles, heads, together)
    first = tile * (PARTS * ROWS)
    count = blocks_of(first + part * ROWS, ROWS, T, S, BLOCK_N, CAUSAL)
    whole = blocks_of(first, PARTS * ROWS, T, S, BLOCK_N, CAUSAL)
    for _hidden in range(count, gl.where(at >= 0, whole, count)):
        await_turn(turns, part, step, True)
        pass_turn(turns, part, True)
        ready(k_smem, k_full, step)
        release(k_empty, step)
        ready(v_smem, v_full, step)
        release(v_empty, step)
        step += 1
    item = number * PARTS + part
    mbarrier.wait(q_full.index(item % Q_STAGES), item // Q_STAGES & 1, at >= 0)
    mbarrier.wait(k_full.index(step % K_STAGES), step // K_STAGES & 1, at >= 0)
    q = tile_in(q_smem, item % Q_STAGES)
    k = tile_in(k_smem, step % K_STAGES)
    await_turn(turns, part, step, at >= 0)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    pass_turn(turns, part, at >= 0)
    return at, tile, head, step, scores


@gluon.jit
def advance(
    part, q, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Adds the values of the keys after n by the pairs of their weights, and makes the weights of those from n on."""
    k_smem, v_smem = smem[1], smem[2]
    turns, k_full, k_empty, v_full, v_empty = signals[1], signals[4], signals[5], signals[6], signals[7]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    dtype: gl.constexpr = k_smem.dtype
    out_layout: gl.constexpr = acc.type.layout
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, score_layout)
    p = operand(pairs, dtype, out_layout)
    k = ready(k_smem, k_full, step)
    await_turn(turns, part, step, True)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
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
def write(acc, top, total, t, out_ptr, out_strides, lse_ptr, head, H, T, D, dtype: gl.constexpr):
    """Output and log-sum-exp of the queries t."""
    out_layout: gl.constexpr = acc.type.layout
    row: gl.constexpr = gl.SliceLayout(1, out_layout)
    total = gl.convert_layout(gl.sum(total, 1), t.type.layout)
    gl.store(lse_ptr + head.to(gl.int64) * T + t, top * LN2 + gl.log(total), t < T)
    share = gl.convert_layout(1.0 / total, row)
    t = gl.convert_layout(t, row)
    d = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, out_layout))
    out_ptr += (head // H).to(gl.int64) * out_strides[0] + (head % H).to(gl.int64) * out_strides[1]
    out_at = out_ptr + t.to(gl.int64)[:, None] * out_strides[2] + d[None, :]
    gl.store(out_at, (acc * share[:, None]).to(dtype), (t < T)[:, None] & (d < D)[None, :])


@gluon.jit
def attend(
    part, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D, scale_log2,
    PARTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of 64 queries of every tile that is drawn."""
    q_smem, k_smem, v_smem = smem[0], smem[1], smem[2]
    q_empty, k_empty, v_full, v_empty = signals[3], signals[5], signals[6], signals[7]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = v_smem.shape[4]
    Q_STAGES: gl.constexpr = q_empty.shape[0]
    dtype: gl.constexpr = q_smem.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    row: gl.constexpr = gl.SliceLayout(1, score_layout)
    number = gl.to_tensor(0)
    at, tile, head, step, scores = begin(
        part, number, gl.to_tensor(0), smem, signals, heads, tiles, together, T, S, PARTS, CAUSAL
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    while at >= 0:
        item = number * PARTS + part
        q = tile_in(q_smem, item % Q_STAGES)
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
        for _block in range(gl.minimum(seen_by_all, count - 1), count - 1):
            n -= BLOCK_N
            step += 1
            acc, pairs, top, total = advance(
                part, q, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals, True, CAUSAL
            )  # fmt: skip
        for _block in range(0, gl.minimum(seen_by_all, count - 1)):
            n -= BLOCK_N
            step += 1
            acc, pairs, top, total = advance(
                part, q, acc, pairs, top, total, i, n, S, scale_log2, step, smem, signals, False, CAUSAL
            )  # fmt: skip
        release(q_empty, item)
        p = operand(pairs, dtype, out_layout)
        v = ready(v_smem, v_full, step)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        last = step
        of = head
        number += 1
        if Q_STAGES > PARTS:
            at, tile, head, step, scores = begin(
                part, number, step + 1, smem, signals, heads, tiles, together, T, S, PARTS, CAUSAL
            )
            acc = warpgroup_mma_wait(1, deps=[acc])
            release(v_empty, last)
            write(acc, top, total, t, out_ptr, out_strides, lse_ptr, of, H, T, D, dtype)
        else:
            # The next queries are on their way to where these lie.
            acc = warpgroup_mma_wait(0, deps=[acc])
            release(v_empty, last)
            write(acc, top, total, t, out_ptr, out_strides, lse_ptr, of, H, T, D, dtype)
            at, tile, head, step, scores = begin(
                part, number, step + 1, smem, signals, heads, tiles, together, T, S, PARTS, CAUSAL
            )
        scores = warpgroup_mma_wait(0, deps=[scores])


@gluon.jit(do_not_specialize=("H", "GROUP", "heads", "tiles", "together", "T", "S"))
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, out_strides, lse_ptr, draw_ptr,
    q_ptr, q_strides, angle_ptr, angle_row, phase_ptr, C, own_ptr,
    H, GROUP, heads, tiles, together, T, S, D, scale_log2,
    KIND: gl.constexpr, C_BLOCK: gl.constexpr, CAUSAL: gl.constexpr,
    PARTS: gl.constexpr, Q_STAGES: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Output [B, H, T, D] and natural log-sum-exp [B, H, T]; draw_ptr: zero.

    q_desc: the queries, or with PoPE's magnitude as KIND memory for a tile of each program, that of own_ptr, where
    those of q_ptr [B, H, T, C] are expanded.
    """
    PHASE: gl.constexpr = phase_ptr is not None
    smem = (
        buffers(Q_STAGES, q_desc),
        buffers(K_STAGES, k_desc),
        buffers(V_STAGES, v_desc),
        gl.allocate_shared_memory(gl.int32, [RING, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    signals = (
        barriers(RING, 1), barriers(PARTS, 1), barriers(Q_STAGES, 1), barriers(Q_STAGES, 1),
        barriers(K_STAGES, 1), barriers(K_STAGES, PARTS), barriers(V_STAGES, 1), barriers(V_STAGES, PARTS),
    )  # fmt: skip
    fence_async_shared()
    queries = (q_ptr, q_strides, angle_ptr, angle_row, phase_ptr, C, own_ptr)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (attend, (
                    0, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D, scale_log2,
                    PARTS, CAUSAL,
                )),
                (attend, (
                    1, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D, scale_log2,
                    PARTS, CAUSAL,
                )),
                (load, (
                    k_desc, v_desc, smem, signals, draw_ptr, H, GROUP, heads, tiles, together, T, S, PARTS, CAUSAL,
                )),
                (bring, (
                    q_desc, queries, smem, signals, H, heads, tiles, together, T, PARTS, C_BLOCK, KIND, PHASE,
                )),
            ],
            [4, 1, 2],
            [REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (attend, (
                    0, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D, scale_log2,
                    PARTS, CAUSAL,
                )),
                (attend, (
                    1, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D, scale_log2,
                    PARTS, CAUSAL,
                )),
                (attend, (
                    2, smem, signals, out_ptr, out_strides, lse_ptr, H, heads, tiles, together, T, S, D, scale_log2,
                    PARTS, CAUSAL,
                )),
                (load, (
                    k_desc, v_desc, smem, signals, draw_ptr, H, GROUP, heads, tiles, together, T, S, PARTS, CAUSAL,
                )),
                (bring, (
                    q_desc, queries, smem, signals, H, heads, tiles, together, T, PARTS, C_BLOCK, KIND, PHASE,
                )),
            ],
            [4, 4, 1, 2],
            [REGISTERS, REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
        )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool,
    kind: str = "none", angle: Tensor | None = None, phase: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]`, stored place by place, and float32 log-sum-exp `[B, H, T]`.

    q is `[B, H, T, E]`, k `[B, H / group, S, E]`, v `[B, H / group, S, D]`, T up to S, any strides. With a kind, PoPE's
    magnitude, queries are not expanded yet, `[B, H, T, E / 2]`, and come with their angles and perhaps phases.
    """
    rows, heads, queries, _ = q.shape
    keys, width, value_width = k.shape[2], k.shape[3], v.shape[3]
    meta = launch("separable.hopper.forward", q, qk=width, v=value_width, length=keys)
    block_e, block_n, tile = block_width(width), meta.pop("BLOCK_N"), 64 * meta["PARTS"]
    tiles, group = ceil_div(queries, tile), heads // k.shape[1]
    programs = min(multiprocessors(q.device), tiles * rows * heads)
    out = expanded_like(q, value_width)
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    raw = (None, None, None, 0, None, 0, None)
    if angle is not None:
        q = q if q.stride(3) == 1 else q.contiguous()
        own = q.new_empty(1, programs, tile, width)
        raw = (q, q.stride(), angle, row_step(angle), phase, width // 2, own)
        q = own
    descriptors = (
        describe(q, 64, block_e),
        describe(k, block_n, block_e),
        describe(v, block_n, block_width(value_width)),
    )
    forward_kernel[(programs,)](
        *map(laid_out, descriptors), out, out.stride(), lse, torch.zeros(1, dtype=torch.int32, device=q.device), *raw,
        heads, group, rows * heads, tiles, max(1, CACHE // (keys * (width + value_width) * q.element_size())) * group,
        queries, keys, value_width, scale * math.log2(math.e),
        KIND=kind, C_BLOCK=block_e // 2, CAUSAL=causal, num_warps=4, **meta,
    )  # fmt: skip
    return out, lse
