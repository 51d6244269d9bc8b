"""Which tiles a program of `hopper_forward` takes: its loader draws numbers, and tells its groups tile and head.

A group is told its next tile while it works on one, so that it need not wait, nor divide, between them. Of tiles that
are told and not yet begun there may be as many as queries have places, and one more.
"""

# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from phasewise.kernels.hopper_places import barriers


@gluon.jit
def place(at, tiles, heads, together):
    """Tile of queries, longest first, and head of a number that was drawn; the last one's of greater numbers."""
    at = gl.minimum(at, tiles * heads - 1)
    first = at // (tiles * together) * together
    within = at - first * tiles
    here = gl.minimum(together, heads - first)
    return tiles - 1 - within // here, first + within % here


@gluon.jit
def board(COUNT: gl.constexpr):
    """Where so many tiles can be told, with a barrier for each."""
    numbers = gl.allocate_shared_memory(gl.int32, [2 * COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return numbers, barriers(COUNT, 1)


@gluon.jit
def tell(drawn, first, head, turn):
    """Tells first query, -1 after the last tile, and head of the `turn`th tile."""
    numbers, told = drawn
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = turn % told.shape[0]
    numbers.index(2 * at).store(gl.full([1], first, gl.int32, one))
    numbers.index(2 * at + 1).store(gl.full([1], head, gl.int32, one))
    mbarrier.arrive(told.index(at))


@gluon.jit
def told_tile(drawn, turn):
    """First query and head of the `turn`th tile, once it is told."""
    numbers, told = drawn
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    COUNT: gl.constexpr = told.shape[0]
    at = turn % COUNT
    mbarrier.wait(told.index(at), turn // COUNT & 1)
    return gl.max(numbers.index(2 * at).load(one), 0), gl.max(numbers.index(2 * at + 1).load(one), 0)
