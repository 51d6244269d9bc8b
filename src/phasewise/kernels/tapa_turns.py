"""The gradient of the queries in TAPA's one-pass backward: added tile by tile, in an order that never varies.

Of the programs that add to one tile of queries those of later keys come first, and each waits for its turn. Programs
take their keys by ticket, later keys first, so whoever is waited for has begun. The first of a tile stores, so that
nothing needs to be zero before.
"""

# pyright: reportOptionalMemberAccess=false, reportIndexIssue=false
# Kernels annotate compile-time values as gl.constexpr and use them as what they hold.

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def work_of(ticket, heads, together, key_tiles, ways):
    """Key head and tile of keys of a program, and which way its head goes: 0 the last tile first, 1 the first first.

    `together` heads that go the first way come at once, then as many of the second: of two ways, odd heads go that.
    Neighbouring tiles of one head begin apart, so that the one that is waited for has come further.
    """
    first = ticket // (ways * together * key_tiles) * together
    rest = ticket - ways * first * key_tiles
    members = gl.minimum(together, heads // ways - first)
    way = rest // (members * key_tiles)
    rest -= way * members * key_tiles
    slot = rest // members
    tile = slot + (1 - way) * (key_tiles - 1 - 2 * slot)
    return (first + rest % members) * ways + way, tile, way


@gluon.jit
def queries_of(tile, T, S, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Which of T queries, the last of S keys, see a tile of keys: the first, in how many tiles not all, in all."""
    first_m = tile * BLOCK_N - (S - T)
    low = gl.maximum(first_m, 0) // BLOCK_M * BLOCK_M
    count = gl.cdiv(T - low, BLOCK_M)
    near = gl.cdiv(gl.maximum(first_m + BLOCK_N - 1 - low, 0), BLOCK_M)
    return low, gl.minimum(near, count), count


@gluon.jit
def turn_of(tile, m, T, S, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many tiles of keys, the later ones, add to the tile of queries at m before this one."""
    return (gl.minimum(m + BLOCK_M, T) - 1 + S - T) // BLOCK_N - tile


@gluon.jit
def await_turn(ptr, turn):
    """Waits until the count at ptr has come to `turn`; what was added before is then there."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred reached;
        .reg .s32 count;
        ld.acquire.gpu.global.s32 count, [$1];
        setp.ge.s32 reached, count, $2;
        @reached bra done;
        again:
        ld.relaxed.gpu.global.s32 count, [$1];
        setp.ge.s32 reached, count, $2;
        @!reached bra again;
        fence.acq_rel.gpu;
        done:
        mov.s32 $0, count;
        }""",
        "=r,l,r", [ptr, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_turn(ptr, turn):
    """Sets the count at ptr once all that this warp has added is there."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first st.release.gpu.global.s32 [$1], $2;
        mov.u32 $0, lane;
        }""",
        "=r,l,r", [ptr, turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@builtin
def begin_adding(descriptor, coordinates, source, _semantic=None):
    """Begins to add a tile in shared memory to one in memory; Gluon has no name for it of its own."""
    handles = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, handles, source.handle)


@gluon.jit
def add_query_grads(
    sums, turn_ptr, grads, ready, free, first_tile, tiles, tile, low, count, T, S,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGE: gl.constexpr,
):  # fmt: skip
    """Adds the program's part of the gradients by q_A and q_P, of the tiles of one stage, each in its turn.

    Each stage has a warp for that: until a turn has ended takes longer than making the next tile's part.
    """
    STAGES: gl.constexpr = grads[0].shape[0]
    for step in range(STAGE, GROUP * count, STAGES):
        member = step // count
        m = low + (step - member * count) * BLOCK_M
        at = first_tile + member * tiles + m // BLOCK_M
        turn = turn_of(tile, m, T, S, BLOCK_M, BLOCK_N)
        mbarrier.wait(ready.index(STAGE), step // STAGES & 1)
        await_turn(turn_ptr + at, turn)
        for part in gl.static_range(2):
            place = [at * sums[part].block_type.shape[0], 0]
            if turn == 0:
                tma.async_copy_shared_to_global(sums[part], place, grads[part].index(STAGE))
            else:
                begin_adding(sums[part], place, grads[part].index(STAGE))
        tma.store_wait(0)
        mbarrier.arrive(free.index(STAGE))
        end_turn(turn_ptr + at, turn + 1)
