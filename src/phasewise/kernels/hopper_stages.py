"""What `hopper_forward` loads, and who may go on: tiles drawn from a counter, keys and values in stages, turns.

Letters as in `body`. All numbers count from a program's start: tiles of queries by number, blocks of keys by step.
"""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportIndexIssue=false
# Kernels annotate compile-time values as gl.constexpr and use them as what they hold.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from phasewise.kernels.stored_hopper import await_group

ROWS = gl.constexpr(64)  # queries of a group of warps: the rows of one tensor core instruction
RING = gl.constexpr(4)  # tiles that are known at a time: one more than keys have stages, at most


@gluon.jit
def place(at, tiles, heads, together):
    """Tile of queries, longest first, and head of a number that was drawn."""
    first = at // (tiles * together) * together
    within = at - first * tiles
    here = gl.minimum(together, heads - first)
    return tiles - 1 - within // here, first + within % here


@gluon.jit
def blocks_of(m, rows, T, S, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """How many blocks of keys any of `rows` queries from m on sees; one where there are no queries."""
    high = S
    if CAUSAL:
        high = gl.minimum(S, m + rows + S - T)
    return gl.where(m < T, (high + BLOCK_N - 1) // BLOCK_N, 1)


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
def announce(drawn, known, number, at):
    """Tells the groups the `number`th tile.

    Its place is free: the first keys of the tile before could not be copied before all groups had begun that of as
    many tiles ago as keys have stages.
    """
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    drawn.index(number % RING).store(gl.full([1], at, gl.int32, one))
    mbarrier.arrive(known.index(number % RING))


@gluon.jit
def load(
    k_desc, v_desc, smem, signals, draw_ptr, H, GROUP, heads, tiles, together, T, S,
    PARTS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Draws tiles, and copies their keys and values, the last ones first, as soon as there is room."""
    k_smem, v_smem, drawn = smem[1], smem[2], smem[3]
    known, k_full, k_empty, v_full, v_empty = signals[0], signals[4], signals[5], signals[6], signals[7]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    total = tiles * heads
    at = gl.program_id(0)
    announce(drawn, known, 0, at)
    number = 0
    step = 0
    while at < total:
        tile, head = place(at, tiles, heads, together)
        b = head // H
        h = head % H // GROUP
        count = blocks_of(tile * (PARTS * ROWS), PARTS * ROWS, T, S, BLOCK_N, CAUSAL)
        n = (count - 1) * BLOCK_N
        copy_in(k_desc, [b, h, n, 0], k_smem, k_full, k_empty, step)
        at = gl.num_programs(0) + gl.atomic_add(draw_ptr, 1, sem="relaxed")
        number += 1
        announce(drawn, known, number, gl.where(at < total, at, -1))
        for _ in range(1, count):
            copy_in(k_desc, [b, h, n - BLOCK_N, 0], k_smem, k_full, k_empty, step + 1)
            copy_in(v_desc, [b, h, n, 0], v_smem, v_full, v_empty, step)
            n -= BLOCK_N
            step += 1
        copy_in(v_desc, [b, h, n, 0], v_smem, v_full, v_empty, step)
        step += 1


@gluon.jit
def tile_of_number(drawn, known, number):
    """The `number`th tile; -1 after the last."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(known.index(number % RING), number // RING & 1)
    return gl.max(drawn.index(number % RING).load(one), 0)


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
def await_turn(turns, part, step, live):
    """Groups begin their products of a step one after another, and the first when the last has begun its own."""
    before = 1 if part == 0 else 0
    mbarrier.wait(turns.index(part), (step + before) & 1, live)


@gluon.jit
def pass_turn(turns, part, live):
    """The next group may begin."""
    mbarrier.arrive(turns.index((part + 1) % turns.shape[0]), pred=live)
