"""flash-attn-4's causal forward for Hopper in programs that stay, one a multiprocessor (optional package).

As published each tile of queries is a program, whose start, first loads and last stores nothing hides. Here a program
goes on to the next tile of the same order, longest first: its loading warp draws the tile's number from a counter in
memory, tells it to the warps that multiply, and loads while these are still at the tile before. Outputs go from
registers to memory, so that no warp waits for another at a tile's end. Every tile is computed as before, to the bit.
"""

import dataclasses
import inspect
from functools import partial
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, pipeline
from cutlass.memory import get_smem_capacity_in_bytes
from cutlass.tensor_utils import LayoutEnum
from flash_attn.cute import utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.tile_scheduler import SingleTileLPTScheduler
from quack import copy_utils, layout_utils, sm90_utils

MULTIPLYING = inspect.signature(FlashAttentionForwardSm90.mma)


class Signals(NamedTuple):
    """Barriers in shared memory: of each place for queries, and of the place where the next tile's number stands."""

    full: cute.Pointer
    empty: cute.Pointer
    told: cute.Pointer
    heard: cute.Pointer
    number: cute.Pointer

    @classmethod
    def after(cls, barriers: cute.Pointer, places: int) -> "Signals":
        told = barriers + 2 * places
        return cls(barriers, barriers + places, told, told + 1, cute.recast_ptr(told + 2, dtype=Int32))

    @staticmethod
    def words(places: int) -> int:
        """How many of 8 bytes."""
        return 2 * places + 3


@cute.jit
def opened(signals: Signals, places: cutlass.Constexpr[int], warps: cutlass.Constexpr[int]):
    """Barriers made, for so many warps that multiply."""
    if cute.arch.thread_idx()[0] == 0:
        for place in cutlass.range_constexpr(places):
            cute.arch.mbarrier_init(signals.full + place, 1)
            cute.arch.mbarrier_init(signals.empty + place, warps)
        cute.arch.mbarrier_init(signals.told, 1)
        cute.arch.mbarrier_init(signals.heard, warps)
    cute.arch.mbarrier_init_fence()


@cute.jit
def arrive_once(barrier: cute.Pointer):
    """A warp's arrival."""
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def drawn(counter: cute.Tensor, signals: Signals, turn: Int32):
    """The next tile, for the warp that loads, which tells it to the others."""
    tile = Int32(0)
    if cute.arch.lane_idx() == 0:
        tile = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
    tile = utils.shuffle_sync(tile, 0) + cute.arch.grid_dim()[0]
    cute.arch.mbarrier_wait(signals.heard, turn ^ 1)
    if cute.arch.lane_idx() == 0:
        cute.make_tensor(signals.number, cute.make_layout(1))[0] = tile
    arrive_once(signals.told)
    return tile


@cute.jit
def told(signals: Signals, turn: Int32):
    """The next tile, for a warp that multiplies."""
    cute.arch.mbarrier_wait(signals.told, turn)
    tile = cute.make_tensor(signals.number, cute.make_layout(1))[0]
    arrive_once(signals.heard)
    return cute.arch.make_warp_uniform(tile)


@dataclasses.dataclass
class Order(SingleTileLPTScheduler.Params):
    """flash-attn-4's order of tiles, and a counter of those that were drawn."""

    counter: cute.Tensor | None = None


class Draws(SingleTileLPTScheduler):
    """Tiles one after another. The base's number of a part of the keys, always 0 there, is the parity of the turn."""

    @staticmethod
    def create(params, ctx=None, *, loc=None, ip=None):
        return Draws(params, cute.arch.block_idx()[0], Int32(0), ctx)

    def advance_to_next_work(self, *, loc=None, ip=None):
        signals, loads = self._ctx
        turn = self._split_idx
        self._tile_idx = drawn(self.params.counter, signals, turn) if loads else told(signals, turn)
        self._split_idx = turn ^ 1

    def __new_from_mlir_values__(self, values):
        made = super().__new_from_mlir_values__(values)
        made._ctx = self._ctx
        return made


class Ring:
    """The places for queries, in the part of a pipeline that the base's loop over tiles calls."""

    def __init__(self, kernel, signals, count):
        self.kernel, self.signals, self.count = kernel, signals, count

    def consumer_wait_w_index_phase(self, _, phase):
        self.kernel.place = self.count % self.kernel.places
        turn = (self.count // self.kernel.places) & 1
        self.kernel.await_queries(self.signals.full + self.kernel.place, turn)

    def consumer_release_w_index(self, _):
        arrive_once(self.signals.empty + self.kernel.place)
        self.count = self.count + 1

    def __extract_mlir_values__(self):
        return cutlass.extract_mlir_values(self.count)

    def __new_from_mlir_values__(self, values):
        return Ring(self.kernel, self.signals, cutlass.new_from_mlir_values(self.count, values))


class Launch:
    """A kernel with no more programs than run at a time."""

    def __init__(self, kernel: Any, programs: int):
        self.kernel, self.programs = kernel, programs

    def launch(self, *, grid, **settings):
        self.kernel.launch(grid=(cutlass.min(grid[0], Int32(self.programs)), 1, 1), **settings)


class PersistentForward(FlashAttentionForwardSm90):
    """The causal forward without a window, for values of a multiple of 16 channels, and groups that divide a tile.

    programs: the device's multiprocessors. The auxiliary tensor is one int32 zero, the counter.
    """

    def __init__(self, *arguments: Any, programs: int, **settings: Any):
        super().__init__(*arguments, **settings)
        self.programs = programs
        keys = self.num_stages * self.tile_n * (self.tile_hdim + self.tile_hdimv)
        scores = 0 if self.mma_pv_is_rs else self.tile_m * self.tile_n
        two = 2 * self.tile_m * self.tile_hdim
        fits = 1024 + 2 * (two + keys + scores) <= get_smem_capacity_in_bytes("sm_90")
        self.places = 2 if fits else 1

    def _setup_attributes(self):
        self.use_tma_O = False
        super()._setup_attributes()

    def _get_shared_storage_cls(self):
        def words(count):
            return cute.struct.MemRange[Int64, count]

        def tiles(layout, count=1):
            size = 0 if layout is None else count * cute.cosize(layout)
            return cute.struct.Align[cute.struct.MemRange[self.dtype, size], self.buffer_align_bytes]

        parts = {
            "mbar_ptr_Q": words(2 + Signals.words(self.places)),
            "mbar_ptr_K": words(2 * self.num_stages),
            "mbar_ptr_V": words(2 * self.num_stages),
            "sV": tiles(self.sV_layout),
            "sQ": tiles(self.sQ_layout, self.places),
            "sK": tiles(self.sK_layout),
            "sP": tiles(self.sP_layout),
        }
        return cute.struct(type("Storage", (), {"__annotations__": parts}))

    def kernel(self, *arguments):
        """flash-attn-4's, with our order of tiles."""
        given = inspect.signature(FlashAttentionForwardSm90.kernel).bind(self, *arguments).arguments
        (counter,) = given["aux_data"].tensors
        order = given["tile_sched_params"]
        order = {field.name: getattr(order, field.name) for field in dataclasses.fields(order)}
        given["tile_sched_params"], given["TileScheduler"] = Order(**order, counter=counter), Draws
        given["aux_data"], given["fastdiv_mods"] = utils.AuxData(), None
        return Launch(FlashAttentionForwardSm90.kernel(*given.values()), self.programs)

    def signals(self, pipeline_q) -> Signals:
        return Signals.after(pipeline_q.sync_object_full.get_barrier(0) + 2, self.places)

    def queries(self, sQ):
        """Shared memory for queries as `[tile_m, E, places]`."""
        shape = self.tile_m, self.tile_hdim
        layout = sm90_utils.make_smem_layout(self.dtype, LayoutEnum.ROW_MAJOR, shape, self.places)
        return cute.make_tensor(sQ.iterator, layout.outer)

    @cute.jit
    def load(
        self, mQ, mK, mV, sQ, sK, sV, tma_atom_Q, tma_atom_K, tma_atom_V, pipeline_k, pipeline_v, pipeline_q,
        gmem_tiled_copy_Q, mPageTable, blocksparse_tensors, block_info, SeqlenInfoCls, TileSchedulerCls,
    ):  # fmt: skip
        """One warp loads: a tile's last keys, its queries, then keys, each before the values of the block before."""
        signals = self.signals(pipeline_q)
        opened(signals, self.places, self.num_mma_threads // cute.arch.WARP_SIZE)
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
            count = Int32(0)
            scheduler = TileSchedulerCls(ctx=(signals, True))
            work = scheduler.initial_work_tile_info()
            while work.is_valid_tile:
                m, head, batch, _ = work.tile_idx
                low, high = block_info.get_n_block_min_max(SeqlenInfoCls(batch), m)
                place = count % self.places
                full = signals.full + place
                tile = cute.local_tile(mQ[None, None, head, batch], (self.tile_m, self.tile_hdim), (m, 0))
                room = self.queries(sQ)[None, None, place]
                send_queries, _, _ = copy_utils.tma_get_copy_fn(
                    tma_atom_Q, 0, cute.make_layout(1), tile, room, single_stage=True
                )
                at = head if const_expr(self.pack_gqa) else head // self.qhead_per_kvhead, batch
                send_keys = self.sender(tma_atom_K, mK, at, sK, self.tile_hdim, pipeline_k)
                send_values = self.sender(tma_atom_V, mV, at, sV, self.tile_hdimv, pipeline_v)

                pipeline_k.producer_acquire(state)
                send_keys(src_idx=high - 1, producer_state=state)
                cute.arch.mbarrier_wait(signals.empty + place, ((count // self.places) & 1) ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.tma_copy_bytes["Q"])
                send_queries(tma_bar_ptr=full)
                count += 1
                for i in cutlass.range(high - 1 - low, unroll=1):
                    before = state.clone()
                    state.advance()
                    pipeline_k.producer_acquire(state)
                    send_keys(src_idx=high - 2 - i, producer_state=state)
                    pipeline_v.producer_acquire(before)
                    send_values(src_idx=high - 1 - i, producer_state=before)
                pipeline_v.producer_acquire(state)
                send_values(src_idx=low, producer_state=state)
                state.advance()
                scheduler.advance_to_next_work()
                work = scheduler.get_current_work()
            pipeline_v.producer_tail(state)

    def sender(self, atom, x, at, shared, width, pipe):
        """What copies a block of a head's keys or values into a stage."""
        tiles = cute.local_tile(x[None, None, *at], (self.tile_n, width), (None, 0))
        copy, _, _ = copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), tiles, shared)
        return copy_utils.tma_producer_copy_fn(copy, pipe)

    def mma(self, *arguments):
        """flash-attn-4's, with queries in our places."""
        given = MULTIPLYING.bind(self, *arguments).arguments
        signals = self.signals(given["pipeline_q"])
        cute.arch.sync_threads()
        given["sQ"], given["pipeline_q"] = self.queries(given["sQ"]), Ring(self, signals, Int32(0))
        given["TileSchedulerCls"] = partial(given["TileSchedulerCls"], ctx=(signals, False))
        FlashAttentionForwardSm90.mma(*given.values())

    def await_queries(self, full, turn):
        """Of a tile, where its first product is about to be made."""
        cute.arch.mbarrier_wait(full, turn)

    def first_half_block_overlap(self, *arguments, mma_qk_fn, **settings):
        multiply = partial(mma_qk_fn, A_idx=self.place)
        return super().first_half_block_overlap(*arguments, mma_qk_fn=multiply, **settings)

    def mma_one_n_block_intrawg_overlap(self, *arguments, mma_qk_fn, **settings):
        multiply = partial(mma_qk_fn, A_idx=self.place)
        return super().mma_one_n_block_intrawg_overlap(*arguments, mma_qk_fn=multiply, **settings)

    @cute.jit
    def epilogue(
        self, acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx, m_block, head_idx,
        batch_idx,
    ):  # fmt: skip
        """Four threads hold a row's channels two by two in turn, and exchange those of 32 for eight and eight."""
        coordinates = cute.make_identity_tensor((self.tile_m, self.tile_hdimv))
        coordinates = tiled_mma.get_slice(tidx).partition_C(coordinates)
        place, sums = (layout_utils.reshape_acc_to_mn(x) for x in (coordinates, acc_O))
        out, out_lse = mO[None, None, head_idx, batch_idx], mLSE[None, head_idx, batch_idx]
        member = tidx % 4
        blocks = self.tile_hdimv // 8
        whole = blocks - blocks % 4
        for r in cutlass.range_constexpr(cute.size(sums, mode=[0])):
            pairs = cute.make_rmem_tensor(blocks, Int32)
            for c in cutlass.range_constexpr(blocks):
                pairs[c] = utils.cvt_f16x2_f32(sums[r, 2 * c], sums[r, 2 * c + 1], self.dtype)
            for c in cutlass.range_constexpr(0, whole, 4):
                exchange(pairs, c, member)
            values = cute.recast_tensor(pairs, self.dtype)
            row = m_block * self.tile_m + place[r, 0][0]
            if row < cute.size(out, mode=[0]):
                line = out[row, None]
                for c in cutlass.range_constexpr(whole // 4):
                    eight = cute.local_tile(line, (8,), (4 * c + member,))
                    cute.autovec_copy(cute.local_tile(values, (8,), (c,)), eight)
                for c in cutlass.range_constexpr(whole, blocks):
                    two = cute.local_tile(line, (2,), (4 * c + member,))
                    cute.autovec_copy(cute.local_tile(values, (2,), (c,)), two)
                if member == 0:
                    out_lse[row] = lse[r]


@cute.jit
def exchange(x: cute.Tensor, first: cutlass.Constexpr[int], member: Int32):
    """Transpose four registers of four threads."""
    for step in cutlass.range_constexpr(1, 3):
        upper = (member & step) != 0
        for i in cutlass.range_constexpr(4):
            if const_expr(i & step == 0):
                low, high = x[first + i], x[first + i + step]
                other = cute.arch.shuffle_sync_bfly(low if upper else high, offset=step)
                x[first + i] = other if upper else low
                x[first + i + step] = high if upper else other
