"""RoPE's and PoPE's queries and keys prepared for an attention that is begun beside it (optional package).

A kernel of few programs, each with a multiprocessor to itself. It lets the next kernel begin at once, goes through
heads in their order, and counts what it has done. No program of the next kernel begins before all of this one's have,
so those that wait for counts cannot keep this one from running.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from flash_attn.cute import utils
from flash_attn.cute.barrier import red_release

from phasewise.kernels.ahead import MOST_PHASES, VECTOR
from phasewise.kernels.tiles import LOG2E

WARPS = 16  # of a program: as many as have 128 registers a thread
CHUNKS = 2  # of a unit: a count waits for all that was stored, which takes as long as a chunk
HEADS = 8  # at most, that a warp prepares at a place, with one reading of its angles
# ln(1 + x) / x for x in [0, 1], as `prepare.log1p` has it for half precision
LOG1P = (-0.0238691252, 0.101222217, -0.210048631, 0.325206667, -0.499361366, 0.999991596)


@cute.jit
def softplus(x: Float32) -> Float32:
    """ln(1 + e^x), as `prepare.magnitude` has it for half precision."""
    small = cute.math.exp2(utils.fmax(x, -x) * -LOG2E.value, fastmath=True)
    series = Float32(LOG1P[0])
    for coefficient in LOG1P[1:]:
        series = series * small + coefficient
    return series * small + utils.fmax(x, Float32(0.0))


class Preparing:
    """The kernel. A unit is what a warp does before it counts: CHUNKS times 32 vectors of each of a group's heads.

    n angles a place; preparation: "rope", or how PoPE makes magnitudes. A group's k_heads key heads have one count.
    """

    def __init__(self, dtype: Any, n: int, preparation: str, q_heads: int, k_heads: int):
        self.dtype, self.columns, self.preparation = dtype, n // VECTOR, preparation
        self.q_heads, self.k_heads = q_heads, k_heads

    @cute.jit
    def __call__(
        self, q, k, q_out, k_out, q_angle, k_angle, phase, done, factor: Float32, q_programs: Int32, k_programs: Int32,
        stream: cuda.CUstream = None,
    ):  # fmt: skip
        """Tensors have places before heads; phase is `[H, n]` or None; done has a count for each group of heads."""
        self.kernel(q, k, q_out, k_out, q_angle, k_angle, phase, done, factor, q_programs, k_programs).launch(
            grid=[q_programs + k_programs, 1, 1], block=[WARPS * cute.arch.WARP_SIZE, 1, 1], stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: cute.Tensor, k: cute.Tensor, q_out: cute.Tensor, k_out: cute.Tensor, q_angle: cute.Tensor,
        k_angle: cute.Tensor, phase: cute.Tensor | None, done: cute.Tensor, factor: Float32, q_programs: Int32,
        k_programs: Int32,
    ):  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        turns = None
        if const_expr(phase is not None):
            layout = cute.make_layout((MOST_PHASES, 2), stride=(1, MOST_PHASES))
            turns = cutlass.utils.SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
        if block < q_programs:
            if const_expr(phase is not None):
                self.turn_phases(phase, turns)
            self.go_through(q, q_out, q_angle, turns, done, factor, block, q_programs, self.q_heads)
        else:
            self.go_through(
                k, k_out, k_angle, None, done, factor, block - q_programs, k_programs, self.k_heads
            )

    @cute.jit
    def turn_phases(self, phase, turns):
        """Cosines and sines of all heads' phases, once for a program: a head's are those of all its places."""
        n = self.columns * VECTOR
        for i in cutlass.range(cute.arch.thread_idx()[0], phase.shape[0] * n, WARPS * cute.arch.WARP_SIZE):
            at = phase[i // n, i % n]
            turns[i, 0], turns[i, 1] = cute.math.cos(at, fastmath=True), cute.math.sin(at, fastmath=True)
        cute.arch.sync_threads()

    @cute.jit
    def go_through(self, x, out, angle, turns, done, factor, block, blocks, heads: cutlass.Constexpr[int]):
        """All units of queries, or of keys, in the order of their groups, for warps of `blocks` programs."""
        units, groups = self.units(x.shape[1]), x.shape[2] // heads
        first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * blocks + block
        for unit in cutlass.range(first, x.shape[0] * groups * units, blocks * WARPS, unroll=1):
            group = unit // units
            at = (unit - group * units) * CHUNKS
            batch = group // groups
            part = (group - batch * groups) * heads
            for chunk in cutlass.range(CHUNKS, unroll=1):
                for some in cutlass.range_constexpr(0, heads, HEADS):
                    together = min(HEADS, heads - some)
                    self.prepare(x, out, angle, turns, factor, at + chunk, batch, part + some, together)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                red_release(done.iterator + group, 1)

    def units(self, places: Any) -> Any:
        """Of the queries, or of the keys, of a group."""
        vectors = CHUNKS * cute.arch.WARP_SIZE
        return (places * self.columns + vectors - 1) // vectors

    @cute.jit
    def prepare(self, x, out, angle, turns, factor, at, batch, first, heads: cutlass.Constexpr[int]):
        """32 vectors, row by row, of some heads, all of which are on their way before the first is turned."""
        last = x.shape[1] * self.columns - 1  # which several lanes may prepare
        item = cutlass.min(at * cute.arch.WARP_SIZE + cute.arch.lane_idx(), last)
        row = item // self.columns
        column = item - row * self.columns
        taken = []
        for head in cutlass.range_constexpr(heads):
            line = x[batch, row, first + head, None]
            other = None
            if const_expr(self.preparation == "rope"):
                other = self.taken(line, column + self.columns)
            taken.append((self.taken(line, column), other))
        turn = self.turn(self.taken(angle[batch, row, None], column), factor)
        for head in cutlass.range_constexpr(heads):
            own = turn
            if const_expr(turns is not None):
                at = (first + head) * self.columns + column
                own = self.turned_back(*turn, self.taken(turns[None, 0], at), self.taken(turns[None, 1], at))
            one, other = self.turned(*taken[head], *own)
            line = out[batch, row, first + head, None]
            self.put(line, column, one)
            self.put(line, column + self.columns, other)

    @cute.jit
    def turn(self, angle, factor):
        """Cosines and sines of angles, times RoPE's factor."""
        cos, sin = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        for c in cutlass.range_constexpr(VECTOR):
            cos[c], sin[c] = cute.math.cos(angle[c], fastmath=True), cute.math.sin(angle[c], fastmath=True)
            if const_expr(self.preparation == "rope"):
                cos[c], sin[c] = cos[c] * factor, sin[c] * factor
        return cos, sin

    @cute.jit
    def turned_back(self, cos, sin, by_cos, by_sin):
        """Cosines and sines of differences of angles."""
        one, other = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        for c in cutlass.range_constexpr(VECTOR):
            one[c] = cos[c] * by_cos[c] + sin[c] * by_sin[c]
            other[c] = sin[c] * by_cos[c] - cos[c] * by_sin[c]
        return one, other

    @cute.jit
    def turned(self, x, y, cos, sin):
        """A pair of vectors rotated, or one expanded (y None)."""
        one, other = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        x = self.wide(x)
        if const_expr(y is not None):
            y = self.wide(y)
        for c in cutlass.range_constexpr(VECTOR):
            if const_expr(y is None):
                magnitude = self.magnitude(x[c])
                one[c], other[c] = magnitude * cos[c], magnitude * sin[c]
            else:
                one[c] = x[c] * cos[c] - y[c] * sin[c]
                other[c] = y[c] * cos[c] + x[c] * sin[c]
        return one, other

    @cute.jit
    def wide(self, x):
        """float32 of half precision; bfloat16 are the upper halves of theirs."""
        values = cute.make_rmem_tensor(VECTOR, Float32)
        if const_expr(self.dtype is cutlass.BFloat16):
            pairs, bits = cute.recast_tensor(x, Int32), cute.recast_tensor(values, Int32)
            for c in cutlass.range_constexpr(VECTOR // 2):
                bits[2 * c], bits[2 * c + 1] = pairs[c] << 16, pairs[c] & Int32(-(1 << 16))
        else:
            for c in cutlass.range_constexpr(VECTOR):
                values[c] = Float32(x[c])
        return values

    @cute.jit
    def magnitude(self, x):
        if const_expr(self.preparation == "softplus"):
            x = softplus(x)
        elif const_expr(self.preparation == "relu"):
            x = utils.fmax(x, Float32(0.0))
        return x

    @cute.jit
    def taken(self, line, column):
        values = cute.make_rmem_tensor(VECTOR, line.element_type)
        cute.autovec_copy(cute.local_tile(line, (VECTOR,), (column,)), values)
        return values

    @cute.jit
    def put(self, line, column, values):
        rounded = cute.make_rmem_tensor(VECTOR, self.dtype)
        utils.cvt_f16(values, rounded)
        cute.autovec_copy(rounded, cute.local_tile(line, (VECTOR,), (column,)))
