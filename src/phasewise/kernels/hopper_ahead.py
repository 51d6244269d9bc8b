"""`hopper_forward`, begun while its queries and keys are being prepared by a kernel of few programs.

Letters as in `prepare`. Each of these programs has a multiprocessor to itself, as many warps as one holds, and either
queries or keys. A unit is BLOCK_T places of HEADS heads, which share the sines; heads come in their order, HELD of them
on their way while as many are turned, and each warp counts what it has done for a group of heads. The first heads,
which attention cannot begin without, are prepared by more programs, one on every multiprocessor. Attention's programs
begin where there is room, which is when all of these have begun: those that wait for counts keep none of them from
running.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from phasewise.kernels import hopper_forward
from phasewise.kernels.ahead import Awaited, Plan
from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.prepare import expanded_like, fast, magnitude, row_step, turn
from phasewise.kernels.tiles import ceil_div, describe, power_of_two

WARPS = 16
COUNTED: tl.constexpr = tl.constexpr(WARPS)
ELEMENTS = 4096  # of a head, or RoPE's pairs, that a program has at a time: 8 a thread
HEADS = 16  # of a unit, at most
HELD = {"rope": 2}  # heads on their way while as many are turned, at most; 4 of PoPE's


@triton.jit
def unit(
    at, total, x_ptr, x_strides, angle_ptr, angle_row, H, T, n, HEADS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Where a unit's x and angles begin, how many places are left there, its group, row, first head and first place."""
    tiles = tl.cdiv(T, BLOCK_T)
    group = at // tiles
    b = group // (H // HEADS)
    first = (group - b * (H // HEADS)) * HEADS
    t = (at - group * tiles) * BLOCK_T
    left = tl.where(at < total, T - t, 0)
    b = b.to(tl.int64)
    t = t.to(tl.int64)
    x_at = x_ptr + (b * x_strides[0] + first.to(tl.int64) * x_strides[1] + t * x_strides[2])
    return x_at, angle_ptr + (b * angle_row + t * n), left, group, b, first, t


@triton.jit
def taken(x_at, x_offset, x_head, second, inside, KIND: tl.constexpr, HELD: tl.constexpr):
    """Some heads' channels, each with RoPE's partners of them."""
    heads = ()
    for _ in tl.static_range(HELD):
        x = tl.load(x_at + x_offset, inside, other=0.0)
        y = tl.load(x_at + x_offset + second, inside, other=0.0) if KIND == "rope" else x
        heads = heads + ((x, y),)  # noqa: RUF005 (the compiler knows no unpacking)
        x_at += x_head
    return heads


@triton.jit
def put(x, y, cos, sin, out_at, n, inside, KIND: tl.constexpr, FAST: tl.constexpr):
    """What `prepare.turn_pairs` or `prepare.expand` makes of them."""
    kind = out_at.dtype.element_ty
    if KIND == "rope":
        x = x.to(tl.float32)
        y = y.to(tl.float32)
        tl.store(out_at, (x * cos - y * sin).to(kind), inside)
        tl.store(out_at + n, (y * cos + x * sin).to(kind), inside)
    else:
        mu, _ = magnitude(x.to(tl.float32), KIND, FAST)
        tl.store(out_at, (mu * cos).to(kind), inside)
        tl.store(out_at + n, (mu * sin).to(kind), inside)


@triton.jit
def count(done_ptr, FAST: tl.constexpr):
    """Each warp adds 1 when all that it has stored is there, and waits for no other."""
    if FAST:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b32 lane;
            bar.warp.sync -1;
            mov.u32 lane, %laneid;
            setp.eq.u32 p, lane, 0;
            @p red.release.gpu.global.add.s32 [$1], 1;
            mov.b32 $0, 0;
            }""",
            "=r,l", [done_ptr], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_add(done_ptr, COUNTED)


@triton.jit
def after(at, p, early, everyone, programs, total):
    """The unit after `at` of program p: of the first `early` each of `everyone` has some, of the others `programs`."""
    late = tl.where(p < programs, early + p, total)
    return tl.where(at < early, tl.where(at + everyone < early, at + everyone, late), at + programs)


@triton.jit
def go_through(
    p, early, everyone, programs, x_ptr, x_strides, out_ptr, out_strides, angle_ptr, angle_row, H, T, total,
    phase_ptr, done_ptr, factor, n, KIND: tl.constexpr, PHASE: tl.constexpr, FAST: tl.constexpr,
    SHARED: tl.constexpr, HEADS: tl.constexpr, HELD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Units of x [B, H, T, D] that program p has, counted for SHARED heads together."""
    rows = tl.arange(0, BLOCK_T)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    x_offset = rows.to(tl.int64) * x_strides[2] + c.to(tl.int64) * x_strides[3]
    out_offset = rows.to(tl.int64) * out_strides[2] + c
    second = tl.cast(n, tl.int64) * x_strides[3]
    angle_offset = rows * n + c
    at = after(p - everyone, p, early, everyone, programs, total)
    x_at, angle_at, left, group, b, first, t = unit(
        at, total, x_ptr, x_strides, angle_ptr, angle_row, H, T, n, HEADS, BLOCK_T
    )  # fmt: skip
    inside = (rows < left) & (c < n)
    angle = tl.load(angle_at + angle_offset, inside, other=0.0)
    heads = taken(x_at, x_offset, x_strides[1], second, inside, KIND, HELD)
    while at < total:
        out_at = out_ptr + (b * out_strides[0] + first.to(tl.int64) * out_strides[1] + t * out_strides[2])
        at = after(at, p, early, everyone, programs, total)
        next_x_at, angle_at, next_left, next_group, b, next_first, t = unit(
            at, total, x_ptr, x_strides, angle_ptr, angle_row, H, T, n, HEADS, BLOCK_T
        )  # fmt: skip
        next_angle = tl.load(angle_at + angle_offset, (rows < next_left) & (c < n), other=0.0)
        cos, sin = turn(angle, FAST)
        if KIND == "rope":
            cos *= factor
            sin *= factor
        if PHASE:
            less = tl.load(phase_ptr + first * n + c, c < n, other=0.0)
        for some in range(0, HEADS, HELD):
            last = some + HELD >= HEADS
            x_at = tl.where(last, next_x_at, x_at + HELD * x_strides[1])
            inside = (rows < tl.where(last, next_left, left)) & (c < n)
            following = taken(x_at, x_offset, x_strides[1], second, inside, KIND, HELD)
            for i in tl.static_range(HELD):
                if PHASE:
                    cos, sin = turn(angle - less, FAST)
                    next_head = tl.minimum(first + some + i + 1, H - 1)
                    less = tl.load(phase_ptr + next_head * n + c, c < n, other=0.0)
                x, y = heads[i]
                put(x, y, cos, sin, out_at + out_offset, n, (rows < left) & (c < n), KIND, FAST)
                out_at += out_strides[1]
            heads = following
        count(done_ptr + group // (SHARED // HEADS), FAST)
        angle = next_angle
        left = next_left
        group = next_group
        first = next_first


SIZES = (
    "H",
    "T",
    "q_total",
    "q_early",
    "q_all",
    "q_programs",
    "KEY_H",
    "S",
    "k_total",
    "k_early",
    "k_all",
    "k_programs",
)


@triton.jit(do_not_specialize=SIZES)
def prepare_kernel(
    q_ptr, q_strides, q_out_ptr, q_out_strides, q_angle_ptr, q_angle_row, H, T, q_total, q_early, q_all, q_programs,
    k_ptr, k_strides, k_out_ptr, k_out_strides, k_angle_ptr, k_angle_row, KEY_H, S, k_total, k_early, k_all, k_programs,
    phase_ptr, done_ptr, factor, n, KIND: tl.constexpr, PHASE: tl.constexpr, FAST: tl.constexpr,
    QUERY_SHARED: tl.constexpr, QUERY_HEADS: tl.constexpr, QUERY_HELD: tl.constexpr,
    KEY_HEADS: tl.constexpr, KEY_HELD: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Keys, by the first `k_all` programs, and queries, by the others; KEY_HEADS of keys have a count."""
    if FAST:
        gdc_launch_dependents()
    at = tl.program_id(0)
    if at < k_all:
        go_through(
            at, k_early, k_all, k_programs, k_ptr, k_strides, k_out_ptr, k_out_strides, k_angle_ptr, k_angle_row,
            KEY_H, S, k_total, phase_ptr, done_ptr, factor, n, KIND, False, FAST,
            KEY_HEADS, KEY_HEADS, KEY_HELD, BLOCK_T, BLOCK_C,
        )  # fmt: skip
    else:
        go_through(
            at - k_all, q_early, q_all, q_programs, q_ptr, q_strides, q_out_ptr, q_out_strides, q_angle_ptr,
            q_angle_row, H, T, q_total, phase_ptr, done_ptr, factor, n, KIND, PHASE, FAST,
            QUERY_SHARED, QUERY_HEADS, QUERY_HELD, BLOCK_T, BLOCK_C,
        )  # fmt: skip


def divisor(number: int, most: int) -> int:
    """The greatest one."""
    return next(count for count in range(most, 0, -1) if number % count == 0)


def prepare(
    q: Tensor, k: Tensor, q_angle: Tensor, k_angle: Tensor, phase: Tensor | None, plan: Plan,
    *, preparation: str, factor: float,
) -> tuple[Tensor, Tensor, Awaited]:  # fmt: skip
    """`prepare.polar` or `prepare.rotate`, of which it takes whole pairs, in the making; and what to wait for.

    Without programs for them queries stay as they are.
    """
    heads, key_heads, n = q.shape[1], k.shape[1], q_angle.shape[2]
    of_key = divisor(key_heads, HEADS)
    shared = of_key * (heads // key_heads)
    of_query = divisor(shared, HEADS)
    groups = k.shape[0] * (key_heads // of_key)
    block_c, held = power_of_two(n), HELD.get(preparation, 4)
    block_t = max(1, min(power_of_two(max(q.shape[2], k.shape[2])), ELEMENTS // block_c))
    q_made, k_made = expanded_like(q, 2 * n) if plan.q_programs else q, expanded_like(k, 2 * n)
    q_units, k_units = shared // of_query * ceil_div(q.shape[2], block_t), ceil_div(k.shape[2], block_t)
    q_units = q_units if plan.q_programs else 0
    counts = torch.zeros(1 + groups, dtype=torch.int32, device=q.device)
    first, programs = min(groups, ceil_div(plan.together, shared)), plan.q_programs + plan.k_programs
    everyone = max(programs, multiprocessors(q.device))
    q_all = max(plan.q_programs, everyone * plan.q_programs // programs)
    query, key = (
        (x, x.stride(), out, out.stride(), angle, row_step(angle), *x.shape[1:3], groups * units, first * units, *some)
        for x, out, angle, units, some in (
            (q, q_made, q_angle, q_units, (q_all, plan.q_programs)),
            (k, k_made, k_angle, k_units, (everyone - q_all, plan.k_programs)),
        )
    )  # fmt: skip
    prepare_kernel[(everyone,)](
        *query, *key, phase, counts[1:], factor, n, KIND=preparation, PHASE=phase is not None, FAST=fast(q),
        QUERY_SHARED=shared, QUERY_HEADS=of_query, QUERY_HELD=divisor(of_query, held),
        KEY_HEADS=of_key, KEY_HELD=divisor(of_key, held), BLOCK_T=block_t, BLOCK_C=block_c, num_warps=WARPS,
    )  # fmt: skip
    return q_made, k_made, Awaited(counts, shared, WARPS * (q_units + k_units), plan.together)


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor, k_angle: Tensor, phase: Tensor | None, plan: Plan,
    *, preparation: str, factor: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]`, log-sum-exp `[B, H, T]`, and prepared q and k, of what `ahead.plan` names."""
    v = describe(v, 1, 1).base  # copied, if it has to be, before the kernel that attention is to follow
    options = {"preparation": preparation, "factor": factor}
    q_made, k_made, awaited = prepare(q, k, q_angle, k_angle, phase, plan, **options)
    out, lse = hopper_forward.forward(q_made, k_made, v, scale=scale, causal=True, awaited=awaited)
    return out, lse, q_made, k_made
