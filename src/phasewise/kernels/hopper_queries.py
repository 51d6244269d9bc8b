"""What brings `hopper_forward` its queries: copies as soon as there is room, of PoPE's once they are expanded.

Two warps expand the next tile while the others multiply, into memory of the program's own that the second-level cache
holds, from where the copy engine takes it: shared memory has no room for it yet. Letters as in `body`, C for the
channels that are not expanded yet.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# Kernels annotate compile-time values as gl.constexpr and use them as what they hold.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from phasewise.kernels.hopper_stages import ROWS, place, tile_of_number
from phasewise.kernels.prepare import magnitude, turn
from phasewise.kernels.stored_hopper import await_group

ELEMENTS = gl.constexpr(512)  # expanded at a time: 8 a thread


@gluon.constexpr_function
def by_vectors(columns):
    """A layout of rows in which each thread of two warps has 8 channels side by side."""
    return gl.BlockedLayout([1, 8], [32 * 8 // columns, columns // 8], [2, 1], [1, 0])


@gluon.jit
def for_copies(step):
    """What was written to memory before is seen by copies begun later."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.s32 $0, 0;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def raw(q_ptr, q_stride, angle_ptr, t, c, last, C):
    """Queries t as they are and their angles."""
    inside = (t < last)[:, None] & (c < C)[None, :]
    q = gl.load(q_ptr + t.to(gl.int64)[:, None] * q_stride + c[None, :], inside, other=0.0)
    return q, gl.load(angle_ptr + t.to(gl.int64)[:, None] * C + c[None, :], inside, other=0.0)


@gluon.jit
def expand(
    queries, b, h, m, T, H,
    C_BLOCK: gl.constexpr, ROWS_OF_TILE: gl.constexpr, KIND: gl.constexpr, PHASE: gl.constexpr,
):  # fmt: skip
    """Queries of a tile, from m on, in Cartesian form into the program's own memory; as `prepare.expand` has it."""
    q_ptr, q_strides, angle_ptr, angle_row, phase_ptr, C, own_ptr = queries
    STEP: gl.constexpr = ELEMENTS // C_BLOCK
    LAYOUT: gl.constexpr = by_vectors(C_BLOCK)
    rows = gl.arange(0, STEP, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, C_BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    q_ptr += b.to(gl.int64) * q_strides[0] + h.to(gl.int64) * q_strides[1]
    angle_ptr += b.to(gl.int64) * angle_row
    own_at = own_ptr + (gl.program_id(0) * ROWS_OF_TILE + rows)[:, None].to(gl.int64) * (2 * C) + c[None, :]
    phase = 0.0
    if PHASE:
        phase = gl.load(phase_ptr + h * C + c, c < C, other=0.0)[None, :]
    last = gl.minimum(T, m + ROWS_OF_TILE)
    q, angle = raw(q_ptr, q_strides[2], angle_ptr, m + rows, c, last, C)
    for first in range(m, last, STEP):
        # The next ones are on their way before these are written.
        next_q, next_angle = raw(q_ptr, q_strides[2], angle_ptr, first + STEP + rows, c, last, C)
        cos, sin = turn(angle - phase, True)
        mu = q.to(gl.float32)
        if KIND != "identity":
            mu, _ = magnitude(mu, KIND, True)
        inside = (first + rows < last)[:, None] & (c < C)[None, :]
        gl.store(own_at, (mu * cos).to(q.dtype), inside)
        gl.store(own_at + C, (mu * sin).to(q.dtype), inside)
        own_at += STEP * 2 * C
        q = next_q
        angle = next_angle


@gluon.jit
def bring(
    q_desc, queries, smem, signals, H, heads, tiles, together, T,
    PARTS: gl.constexpr, C_BLOCK: gl.constexpr, KIND: gl.constexpr, PHASE: gl.constexpr,
):  # fmt: skip
    """Copies the queries of every tile that is drawn, each group's into the next place of a ring."""
    q_smem, drawn = smem[0], smem[3]
    known, q_full, q_empty = signals[0], signals[2], signals[3]
    SLOTS: gl.constexpr = q_full.shape[0]
    number = 0
    at = tile_of_number(drawn, known, number)
    while at >= 0:
        tile, head = place(at, tiles, heads, together)
        b = head // H
        h = head % H
        m = tile * (PARTS * ROWS)
        if KIND != "none":
            expand(queries, b, h, m, T, H, C_BLOCK, PARTS * ROWS, KIND, PHASE)
            for_copies(number)
            await_group()
            b = gl.program_id(0) * 0
            h = gl.program_id(0)
            m = m * 0
        for part in gl.static_range(PARTS):
            item = number * PARTS + part
            full = q_full.index(item % SLOTS)
            mbarrier.wait(q_empty.index(item % SLOTS), (item // SLOTS & 1) ^ 1)
            mbarrier.expect(full, q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [b, h, m + part * ROWS, 0], full, q_smem.index(item % SLOTS)
            )
        if KIND != "none":
            # The next tile takes the same memory.
            for part in gl.static_range(PARTS):
                item = number * PARTS + part
                mbarrier.wait(q_full.index(item % SLOTS), item // SLOTS & 1)
        number += 1
        at = tile_of_number(drawn, known, number)
