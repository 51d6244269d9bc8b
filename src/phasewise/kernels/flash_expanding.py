"""flash-attn-4's causal forward that expands PoPE's queries itself (optional package).

Expanded queries are twice as wide as raw ones, and nobody else reads them. A raw tile is loaded into the first half of
the place of an expanded one, the copy engine writing zeros beyond the tensor's edge. A thread of those who multiply
reads eight channels, writes their cosine part over them and their sine part into the other half, so that none waits
for another before its warp group multiplies. The bits are those that `prepare.polar` gives.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from phasewise.kernels.ahead import VECTOR
from phasewise.kernels.flash_awaiting import AwaitingForward
from phasewise.kernels.flash_persistent import MULTIPLYING
from phasewise.kernels.flash_vectors import Vectors

ROWS = 64  # of a tile that a warp group multiplies
THREADS = 128  # of a warp group
FIRST_BARRIER = 8  # of the warp groups that multiply; flash-attn-4 has some below


class ExpandingForward(AwaitingForward):
    """The forward of raw queries and expanded keys; preparation: how PoPE makes magnitudes.

    Behind its auxiliary tensors come the queries' angles `[B, T, D]` and, where they have them, phases `[H, D]`. Of
    grouped heads a tile has a place's queries one after another.
    """

    def __init__(self, *arguments: Any, preparation: str, **settings: Any):
        super().__init__(*arguments, **settings)
        self.vectors = Vectors(self.dtype, preparation)

    def mma(self, *arguments):
        given = MULTIPLYING.bind(self, *arguments).arguments
        self.angle, *self.phase = given["aux_data"].tensors
        self.room = self.queries(given["sQ"])
        super().mma(*arguments)

    def await_queries(self, full, turn):
        """Later: where they are expanded, once their angles are on their way."""
        self.awaited = full, turn

    def first_half_block_overlap(self, *arguments, mask_fn, **settings):
        """flash-attn-4's, with which a tile begins."""
        tile = mask_fn.keywords
        self.expand(tile["m_block"], tile["head_idx"], tile["batch_idx"])
        return super().first_half_block_overlap(*arguments, mask_fn=mask_fn, **settings)

    @cute.jit
    def expand(self, m, head, batch):
        """A warp group's rows of a tile."""
        columns, group = self.tile_hdim // 2 // VECTOR, self.qhead_per_kvhead
        vectors, items = self.vectors, ROWS * columns // THREADS
        one_phase = THREADS % columns == 0 and THREADS // columns % group == 0  # of all of a thread's vectors
        thread = cute.arch.thread_idx()[0] - THREADS
        warp_group = cute.arch.make_warp_uniform(thread // THREADS)
        room = self.room[None, None, self.place]
        lines, angles, phases = [], [], []
        for item in cutlass.range_constexpr(items):
            vector = thread % THREADS + item * THREADS
            row, column = warp_group * ROWS + vector // columns, vector % columns
            query = m * self.tile_m + row
            place = cutlass.min(query // group, self.angle.shape[1] - 1)
            lines.append((room[row, None], column))
            angles.append(vectors.taken(self.angle[batch, place, None], column))
            if const_expr(len(self.phase) > 0 and (item == 0 or not one_phase)):
                phases.append(vectors.taken(self.phase[0][head * group + query % group, None], column))
        cute.arch.mbarrier_wait(*self.awaited)
        for item in cutlass.range_constexpr(items):
            line, column = lines[item]
            phase = phases[min(item, len(phases) - 1)] if const_expr(len(phases) > 0) else None
            turn = vectors.turn(angles[item], less=phase)
            cosine, sine = vectors.expanded(vectors.taken(line, column), *turn)
            vectors.put(line, column, cosine)
            vectors.put(line, column + columns, sine)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=FIRST_BARRIER + warp_group, number_of_threads=THREADS)
