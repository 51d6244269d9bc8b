"""Where `hopper_forward` has its tiles in shared memory, and the barriers by which loader and groups hand them over.

A tile is the `step`th of its kind and takes the places of its kind in turn. With one place for values alone a tile's
last ones would wait for those before them, and what comes next for them. So they take a place of keys, one step later,
which is free by then. The next keys then come in the place of the tile's last ones: when they may, its queries are
done with too, and need no barrier for that.
"""

# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from phasewise.kernels.stored_hopper import await_group, tile_in


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers, each of so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(COUNT):
        mbarrier.init(made.index(number), count=ARRIVALS)
    return made


@gluon.jit
def at_stage(buffer, full, step):
    """Where the `step`th tile lies in a buffer that may have some places for each stage: `lent` ones."""
    STAGES: gl.constexpr = full.shape[0]
    return step % STAGES * (buffer.shape[0] // STAGES)


@gluon.jit
def copy_in(descriptor, at, buffer, full, empty, step):
    """Begins the copy of the `step`th tile into its stage, once that is free."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(step % STAGES), descriptor.block_type.nbytes)
    to = buffer.index(at_stage(buffer, full, step))
    tma.async_copy_global_to_shared(descriptor, at, full.index(step % STAGES), to)


@gluon.jit
def ready(buffer, full, step):
    """The `step`th tile, once it is there."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    return tile_in(buffer, at_stage(buffer, full, step))


@gluon.jit
def release(empty, step):
    """The group is done with the `step`th tile."""
    STAGES: gl.constexpr = empty.shape[0]
    await_group()
    mbarrier.arrive(empty.index(step % STAGES))


@gluon.jit
def await_empty(empty, part, turn, PARTS: gl.constexpr):
    """Place of a group's queries of the `turn`th tile, once it is free."""
    STAGES: gl.constexpr = empty.shape[0] // PARTS
    slot = turn % STAGES * PARTS + part
    mbarrier.wait(empty.index(slot), (turn // STAGES & 1) ^ 1)
    return slot


@gluon.jit
def lent(k_smem, v_smem):
    """The memory of keys as places for values, some to each place of keys."""
    MORE: gl.constexpr = k_smem.shape[4] // v_smem.shape[4]
    shape: gl.constexpr = [k_smem.shape[0] * MORE, 1, 1, v_smem.shape[3], v_smem.shape[4]]
    return k_smem._reinterpret(v_smem.dtype, shape, v_smem.layout)


@gluon.constexpr_function
def lends(places):
    """Whether a place of keys is lent to a tile's last values: where values have one alone."""
    return places == 1


@gluon.jit
def places_of_last(smem, signals):
    """Places and barriers of a tile's last values: their own, or those of keys."""
    _, k_smem, v_smem = smem
    _, _, k_full, k_empty, v_full, v_empty = signals[:6]
    if lends(v_smem.shape[0]):
        return lent(k_smem, v_smem), k_full, k_empty
    else:
        return v_smem, v_full, v_empty
