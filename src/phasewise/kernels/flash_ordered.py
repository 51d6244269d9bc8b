"""flash-attn-4's deterministic backward for Hopper, with two of its steps made anew (optional package).

Parts of the queries' gradient are added in order without holding up the next tile, and RoPE's rotation is taken out of
the keys' gradient before it leaves the registers.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, pipeline
from flash_attn.cute import barrier, utils
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.named_barrier import NamedBarrierBwd
from quack import copy_utils, layout_utils

STORING_WARP = 4  # the one that hands gradients of keys and values to the copy engine


class OrderedBackward(FlashAttentionBackwardSm90):
    """The deterministic backward for calls without a window in which every query sees a key.

    The first part of a gradient of queries is stored, not added to zeros: the parts wait for each other anyway, and
    zeros would have to be written first. turned: the gradient of keys is turned back by the angles `[B, S, E / 2]` that
    are the auxiliary tensor; for one query head a key head, of whose channels a thread holds both of a pair.
    """

    def __init__(self, *arguments: Any, turned: bool, **settings: Any):
        super().__init__(*arguments, **settings)
        self.turned = turned

    @cute.jit
    def dQaccum_store(
        self, mdQaccum, sdQaccum, block_info, TileSchedulerCls, SeqlenInfoCls, blocksparse_tensors, mdQ_semaphore
    ):  # fmt: skip
        """What the warp does that hands dq on: tiles of queries in order, each when its turn has come.

        Shared memory is free as soon as it was read. That a part has arrived, which takes as long as the next one takes
        to be made, is told once that is on its way.
        """
        lane = cute.arch.thread_idx()[0] % cute.arch.WARP_SIZE
        groups = self.num_wg_dQ
        together = self.num_threads_per_warp_group + cute.arch.WARP_SIZE
        part = cute.make_layout((self.tile_m * self.tile_hdim // groups, groups))
        scheduler = TileSchedulerCls()
        work = scheduler.initial_work_tile_info()
        while work.is_valid_tile:
            n, head, batch, _ = work.tile_idx
            lengths = SeqlenInfoCls(batch)
            sums = cute.local_tile(mdQaccum[None, head, batch], (part,), (None,))
            turns = mdQ_semaphore[None, None, head, batch]
            low, high = block_info.get_m_block_min_max(lengths, n)
            for m in cutlass.range(low, high, unroll=1):
                for group in cutlass.range_constexpr(groups):
                    cute.arch.cp_async_bulk_wait_group(groups - 1 - group, read=True)
                    cute.arch.barrier_arrive(
                        barrier_id=int(NamedBarrierBwd.dQEmptyWG0) + group, number_of_threads=together
                    )
                turn = n
                if const_expr(self.spt):
                    _, last = block_info.get_n_block_min_max(lengths, m)
                    turn = last - 1 - n
                barrier.wait_eq(turns[(m, None)].iterator, lane, 0, turn)
                for group in cutlass.range_constexpr(groups):
                    cute.arch.barrier(
                        barrier_id=int(NamedBarrierBwd.dQFullWG0) + group, number_of_threads=together
                    )
                    source, target = sdQaccum[None, group].iterator, sums[(None, group), m].iterator
                    if turn == 0:
                        with cute.arch.elect_one():
                            copy_utils.cpasync_bulk_s2g(source, target, self.tma_copy_bytes["dQ"])
                    else:
                        with cute.arch.elect_one():
                            copy_utils.cpasync_reduce_bulk_add_f32(source, target, self.tma_copy_bytes["dQ"])
                    cute.arch.cp_async_bulk_commit_group()
                if m > low:
                    cute.arch.cp_async_bulk_wait_group(groups, read=False)
                    barrier.arrive_inc(turns[(m - 1, None)].iterator, lane, 0, 1)
            if high > low:
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                barrier.arrive_inc(turns[(high - 1, None)].iterator, lane, 0, 1)
            scheduler.advance_to_next_work()
            work = scheduler.get_current_work()

    def mma(self, *arguments: Any, **settings: Any) -> None:
        """flash-attn-4's, with the angles at hand for the epilogue."""
        if self.turned:
            (self.angles,) = next(x.tensors for x in arguments if isinstance(x, utils.AuxData))
        super().mma(*arguments, **settings)

    @cute.jit
    def epilogue_dKV(
        self, acc_dV, mdV, sV, acc_dK, mdK, sK, seqlen, tma_atom_dK, tma_atom_dV, tiled_mma_dK, tiled_mma_dV, tidx,
        n_block, head_idx, batch_idx, qhead_per_kvhead_divmod=None, mdK_semaphore=None, mdV_semaphore=None,
    ):  # fmt: skip
        if const_expr(not self.turned):
            FlashAttentionBackwardSm90.epilogue_dKV(
                self, acc_dV, mdV, sV, acc_dK, mdK, sK, seqlen, tma_atom_dK, tma_atom_dV, tiled_mma_dK, tiled_mma_dV,
                tidx, n_block, head_idx, batch_idx, qhead_per_kvhead_divmod, mdK_semaphore, mdV_semaphore,
            )  # fmt: skip
        else:
            at = head_idx, batch_idx, n_block
            # No warp reads keys or values of this tile any more.
            self.warps_meet()
            self.store(acc_dV, mdV, sV, self.tile_hdimv, tma_atom_dV, tiled_mma_dV, tidx, at)
            self.turn_back(acc_dK, tiled_mma_dK, tidx, at, seqlen.seqlen_k)
            self.store(acc_dK, mdK, sK, self.tile_hdim, tma_atom_dK, tiled_mma_dK, tidx, at)

    @cute.jit
    def warps_meet(self):
        """The warps that multiply wait for each other, and what they stored is seen by the copy engine."""
        cute.arch.fence_view_async_shared()
        pipeline.NamedBarrier(
            barrier_id=int(NamedBarrierBwd.Epilogue), num_threads=self.num_mma_threads
        ).arrive_and_wait()

    @cute.jit
    def store(self, sums, gradient, shared, width, atom, multiply, thread, at):
        """A tile's gradient by way of shared memory."""
        head, batch, n = at
        tile = cute.local_tile(gradient[None, None, head, batch], (self.tile_n, width), (n, 0))
        send, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), shared, tile, single_stage=True)
        stage, _, _ = copy_utils.get_smem_store_C(multiply, shared, thread, position_independent=True)
        stage(sums, dst_idx=None)
        self.warps_meet()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == STORING_WARP:
            send()
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def turn_back(self, sums, multiply, thread, at, keys):
        """The pairs (c, c + E / 2) of a tile's gradient, turned back by their angles, in place."""
        _, batch, n = at
        coordinates = multiply.get_slice(thread).partition_C(
            cute.make_identity_tensor((self.tile_n, self.tile_hdim))
        )
        grad, place = (layout_utils.reshape_acc_to_mn(x) for x in (sums, coordinates))
        half = cute.size(grad, mode=[1]) // 2
        for r in cutlass.range_constexpr(cute.size(grad, mode=[0])):
            row = cutlass.min(n * self.tile_n + place[r, 0][0], keys - 1)
            angles = cute.local_tile(self.angles[batch, row, None], (2,), (None,))
            for c in cutlass.range_constexpr(0, half, 2):
                angle = cute.make_rmem_tensor(2, Float32)
                cute.autovec_copy(angles[None, place[r, c][1] // 2], angle)
                for i in cutlass.range_constexpr(2):
                    # By the special functions, as `prepare.turn`.
                    cos, sin = (f(angle[i], fastmath=True) for f in (cute.math.cos, cute.math.sin))
                    first, second = grad[r, c + i], grad[r, c + i + half]
                    grad[r, c + i] = first * cos + second * sin
                    grad[r, c + i + half] = second * cos - first * sin
