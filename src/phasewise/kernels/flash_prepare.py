"""RoPE's queries and keys, or PoPE's keys, prepared for an attention that is begun beside it (optional package).

A kernel of few programs, each with a multiprocessor to itself. It lets the next kernel begin at once, goes through
heads in their order, and counts what it has done. No program of the next kernel begins before all of this one's have,
so those that wait for counts cannot keep this one from running.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from flash_attn.cute.barrier import red_release

from phasewise.kernels.ahead import VECTOR
from phasewise.kernels.flash_vectors import Vectors

WARPS = 16  # of a program: as many as have 128 registers a thread
CHUNKS = 2  # of a unit: a count waits for all that was stored, which takes as long as a chunk
HEADS = 8  # at most, that a warp prepares at a place, with one reading of its angles


class Preparing(Vectors):
    """The kernel. A unit is what a warp does before it counts: CHUNKS times 32 vectors of each of a group's heads.

    n angles a place. A group's k_heads key heads have one count. Without queries their tensors are None.
    """

    def __init__(self, dtype: Any, n: int, preparation: str, q_heads: int, k_heads: int):
        super().__init__(dtype, preparation)
        self.columns, self.q_heads, self.k_heads = n // VECTOR, q_heads, k_heads

    @cute.jit
    def __call__(
        self, q, k, q_out, k_out, q_angle, k_angle, done, factor: Float32, q_programs: Int32, k_programs: Int32,
        stream: cuda.CUstream = None,
    ):  # fmt: skip
        """Tensors have places before heads; done has a count for each group of heads."""
        self.kernel(q, k, q_out, k_out, q_angle, k_angle, done, factor, q_programs, k_programs).launch(
            grid=[q_programs + k_programs, 1, 1], block=[WARPS * cute.arch.WARP_SIZE, 1, 1], stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, q: cute.Tensor | None, k: cute.Tensor, q_out: cute.Tensor | None, k_out: cute.Tensor,
        q_angle: cute.Tensor | None, k_angle: cute.Tensor, done: cute.Tensor, factor: Float32, q_programs: Int32,
        k_programs: Int32,
    ):  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        block, _, _ = cute.arch.block_idx()
        if const_expr(q is None):
            self.go_through(k, k_out, k_angle, done, factor, block, k_programs, self.k_heads)
        elif block < q_programs:
            self.go_through(q, q_out, q_angle, done, factor, block, q_programs, self.q_heads)
        else:
            self.go_through(k, k_out, k_angle, done, factor, block - q_programs, k_programs, self.k_heads)

    @cute.jit
    def go_through(self, x, out, angle, done, factor, block, blocks, heads: cutlass.Constexpr[int]):
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
                    self.prepare(x, out, angle, factor, at + chunk, batch, part + some, together)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                red_release(done.iterator + group, 1)

    def units(self, places: Any) -> Any:
        """Of the queries, or of the keys, of a group."""
        vectors = CHUNKS * cute.arch.WARP_SIZE
        return (places * self.columns + vectors - 1) // vectors

    @cute.jit
    def prepare(self, x, out, angle, factor, at, batch, first, heads: cutlass.Constexpr[int]):
        """32 vectors, row by row, of some heads, all of which are on their way before the first is turned."""
        last = x.shape[1] * self.columns - 1  # which several lanes may prepare
        item = cutlass.min(at * cute.arch.WARP_SIZE + cute.arch.lane_idx(), last)
        row = item // self.columns
        column = item - row * self.columns
        pairs = const_expr(self.preparation == "rope")
        taken = []
        for head in cutlass.range_constexpr(heads):
            line = x[batch, row, first + head, None]
            other = None
            if const_expr(pairs):
                other = self.taken(line, column + self.columns)
            taken.append((self.taken(line, column), other))
        cos, sin = self.turn(self.taken(angle[batch, row, None], column), factor if pairs else None)
        for head in cutlass.range_constexpr(heads):
            x, y = taken[head]
            one, other = self.rotated(x, y, cos, sin) if const_expr(pairs) else self.expanded(x, cos, sin)
            line = out[batch, row, first + head, None]
            self.put(line, column, one)
            self.put(line, column + self.columns, other)
