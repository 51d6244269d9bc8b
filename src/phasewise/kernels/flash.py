"""flash-attn-4's kernels for Hopper, without its interface (optional package).

That interface decides anew at every call what follows from dtypes and widths, which costs more of the CPU than a
small model's attention takes on the GPU. Here a kernel is compiled once for these, for any lengths, and then called.
Queries are `[B, H, T, E]`, keys `[B, H / group, S, E]`, values `[B, H / group, S, D]`; the kernels have places before
heads.
"""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from flash_attn.cute import barrier, interface, utils
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.named_barrier import NamedBarrierBwd
from quack import copy_utils
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from phasewise.kernels.prepare import Sums, expanded_like, finish_rotated, rotate
from phasewise.kernels.tiles import EMPTY_LSE, launch_table, power_of_two

HOPPER = 90
ELEMENTS = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}
NO_AUXILIARY = utils.AuxData(None, None)


class Kind(NamedTuple):
    """What kernels are compiled for."""

    dtype: torch.dtype
    width: int
    v_width: int
    group: int
    causal: bool
    windowed: bool

    @property
    def row_ends(self) -> bool:
        """Whether a query's last key is its own place, by the kernels' plain causal rule."""
        return self.causal and not self.windowed

    @property
    def tiles(self) -> dict[str, Any]:
        """Rows of the launch table for exactly these widths; without one flash-attn-4 chooses."""
        rows = launch_table()["flash_tiles"]
        return next((row for row in rows if (row["qk"], row["v"]) == (self.width, self.v_width)), {})


def _kind(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> Kind:
    return Kind(q.dtype, q.shape[3], v.shape[3], q.shape[1] // k.shape[1], causal, window is not None)


def _sides(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """How many keys a window shows before and after a query's own."""
    return (None, None) if window is None else (window - 1, 0 if causal else window - 1)


def _compiled(kernel: Any, *arguments: Any) -> Any:
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *arguments, stream, options="--enable-tvm-ffi")


@functools.cache
def compiled_forward(kind: Kind) -> Any:
    """The forward: (q, k, v, out, lse, scale, ...)."""
    element = ELEMENTS[kind.dtype]
    config = (
        interface.FwdConfig(*kind.tiles["forward"], mma_pv_is_rs=True, intra_wg_overlap=True)
        if kind.tiles
        else interface._tile_size_fwd_sm90(kind.width, kind.v_width, kind.row_ends, kind.windowed)
    )
    kernel = FlashAttentionForwardSm90(
        element, kind.width, kind.v_width, kind.group, is_causal=kind.row_ends, is_local=kind.windowed,
        pack_gqa=kind.group > 1, tile_m=config.m_block_size, tile_n=config.n_block_size, num_stages=2,
        num_threads=384, intra_wg_overlap=config.intra_wg_overlap, mma_pv_is_rs=config.mma_pv_is_rs,
    )  # fmt: skip
    q, k, v, out, *_ = interface.make_fake_bwd_tensors(element, kind.group > 1, False, False)
    lse = make_fake_tensor(Float32, (*(q.shape[i] for i in (0, 2, 1)),))
    sides = (1, 1) if kind.windowed else (None, None)
    return _compiled(
        kernel, q, k, v, out, lse, Float32(1.0), *(None,) * 5, *sides, None, None, NO_AUXILIARY, None, None
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, D]`, stored place by place, and log-sum-exp `[B, H, T]`; places are ours, bottom right."""
    rows, heads, queries, _ = q.shape
    out = expanded_like(q, v.shape[3])
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    compiled_forward(_kind(q, k, v, causal, window))(
        copyable(q), copyable(k), copyable(v), out.transpose(1, 2), lse, scale, *(None,) * 5,
        *_sides(causal, window), None, None, NO_AUXILIARY, None, None,
    )  # fmt: skip
    return out, lse.clamp_min(EMPTY_LSE) if causal and queries > k.shape[2] else lse


class OrderedBackward(FlashAttentionBackwardSm90):
    """The deterministic backward, whose first part of a gradient of queries is stored, not added to zeros.

    Its parts wait for each other anyway, and zeros would have to be written first: twice the bytes of q. For calls
    without a window in which every query sees a key.
    """

    @cute.jit
    def dQaccum_store(
        self, mdQaccum, sdQaccum, block_info, TileSchedulerCls, SeqlenInfoCls, blocksparse_tensors, mdQ_semaphore
    ):  # fmt: skip
        """What the warp does that hands dq on: tiles of queries in order, each when its turn has come."""
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
            for i in cutlass.range(high - low, unroll=1):
                m = low + i
                for group in cutlass.range_constexpr(groups):
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
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                barrier.arrive_inc(turns[(m, None)].iterator, lane, 0, 1)
            scheduler.advance_to_next_work()
            work = scheduler.get_current_work()


class Backward(NamedTuple):
    """The compiled steps of a backward pass, and what their memory is sized by."""

    prepare: Any
    main: Any
    finish_queries: Any
    finish_keys: Any
    finish_values: Any
    tile_m: int
    tile_n: int
    multiple: int  # of channels that sums are stored in
    by_rows: bool  # whether dq's sums are held by 64 rows and the halves of their channels
    by_channels: bool  # whether they are held as `prepare.Sums` has them


@functools.cache
def compiled_backward(kind: Kind, with_dlse: bool, all_see: bool) -> Backward:
    """The deterministic backward, which adds up dq in a fixed order; all_see: there is no window, and no query sees
    nothing.

    For widths (128, 64) flash-attn-4's own tiles are those of (128, 128), so the launch table has some of ours.
    """
    element, grouped = ELEMENTS[kind.dtype], kind.group > 1
    config = (
        interface.BwdConfig(*kind.tiles["backward"])
        if kind.tiles
        else interface._tile_size_bwd_sm90(kind.width, kind.v_width, kind.row_ends, kind.windowed)
    )
    warps = config.num_wg * 128
    multiple = 64 if config.dKV_swapAB else 32
    kernel = (OrderedBackward if all_see else FlashAttentionBackwardSm90)(
        element, kind.width, kind.v_width, kind.group, kind.row_ends, is_local=kind.windowed, deterministic=True,
        tile_m=config.m_block_size, tile_n=config.n_block_size, Q_stage=config.num_stages_Q,
        dO_stage=config.num_stages_dO, PdS_stage=config.num_stages_PdS, SdP_swapAB=config.SdP_swapAB,
        dKV_swapAB=config.dKV_swapAB, dQ_swapAB=config.dQ_swapAB, AtomLayoutMSdP=config.AtomLayoutMSdP,
        AtomLayoutNdKV=config.AtomLayoutNdKV, AtomLayoutMdQ=config.AtomLayoutMdQ, num_threads=warps + 128,
        q_subtile_factor=2, dQ_single_wg=config.dQ_single_wg,
    )  # fmt: skip
    q, k, v, _, dout, _, dk, dv, _, lse2, delta, dq_sum, dk_sum, dv_sum, _ = interface.make_fake_bwd_tensors(
        element, grouped, False, False
    )
    order = functools.partial(make_fake_tensor, Int32)
    turns = (order((q.shape[0], q.shape[2], cute.sym_int(), 1)), *(None, None))
    if grouped:
        dk, dv = dk_sum, dv_sum
        turns = (turns[0], *(order((k.shape[0], k.shape[2], cute.sym_int(), 2)) for _ in range(2)))
    sides = (1, 1) if kind.windowed else (None, None)
    main = _compiled(
        kernel, q, k, v, dout, lse2, delta, dq_sum, dk, dv, Float32(1.0), *(None,) * 4, *sides, *turns,
        NO_AUXILIARY, None, None,
    )  # fmt: skip
    finish = functools.partial(_compiled_finish, element, multiple=multiple)
    dq_warps = 128 if config.dQ_single_wg else warps
    keys = (config.n_block_size, warps, config.AtomLayoutNdKV, config.dKV_swapAB)
    return Backward(
        prepare=interface._compile_bwd_preprocess(
            element, kind.width, kind.v_width, config.m_block_size, False, False, with_dlse, not all_see, False, True,
            True, False, False, 1, 1, False, multiple,
        ),
        main=main,
        finish_queries=finish(
            kind.width, config.m_block_size, dq_warps, config.AtomLayoutMdQ, config.dQ_swapAB
        ),
        finish_keys=finish(kind.width, *keys) if grouped else None,
        finish_values=finish(kind.v_width, *keys) if grouped else None,
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        multiple=multiple,
        by_rows=not config.dQ_swapAB and config.m_block_size == 64 * config.AtomLayoutMdQ and kind.width % 64 == 0,
        by_channels=config.dQ_swapAB and warps == 256 and config.AtomLayoutMdQ == 1 and kind.width == 128
        and config.m_block_size % 16 == 0,
    )  # fmt: skip


def _compiled_finish(element: Any, width: int, *layout: Any, multiple: int) -> Any:
    """From float32 sums, in the order of the product's registers, to a gradient: (sums, gradient, scale, ...)."""
    return interface._compile_bwd_postprocess(
        element, width, *layout, False, False, False, 1, HOPPER, False, None, multiple
    )


class Held(NamedTuple):
    """The gradient of queries as the backward leaves it: sums in the order of the threads that hold them."""

    sums: Tensor
    scale: float
    step: Backward

    def write(self, dq: Tensor) -> None:
        self.step.finish_queries(self.sums, dq.transpose(1, 2), self.scale, None, None, None, None)

    def turn_back(self, dq: Tensor, dk: Tensor, q_angle: Tensor, k_angle: Tensor, factor: float) -> None:
        """Write dq, and turn it and dk back by RoPE's angles."""
        n = q_angle.shape[2]
        if self.step.by_rows and 2 * n == dq.shape[3] and n == power_of_two(n):
            finish_rotated(self.sums, self.scale, dq, dk, q_angle, k_angle, factor)
        else:
            self.write(dq)
            rotate(dq, dk, q_angle, k_angle, factor, back=True, into=(dq, dk))

    def expanded(self, q2: Tensor) -> Tensor | Sums:
        """The gradient of PoPE's expanded queries, as it is where the preparation's backward reads it so, else in their
        place."""
        if self.step.by_channels:
            return Sums(self.sums, self.scale, self.step.tile_m)
        self.write(q2)
        return q2


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    into: tuple[Tensor, Tensor], *, scale: float, causal: bool, window: int | None,
) -> Held:  # fmt: skip
    """Gradients of k and v, into given tensors, of which that of k may be k itself, and of q."""
    rows, heads, queries, width = q.shape
    key_heads, keys, v_width = v.shape[1:]
    grouped = heads > key_heads
    all_see = window is None and (queries <= keys or not causal)
    step = compiled_backward(_kind(q, k, v, causal, window), dlse is not None, all_see)
    tiles_m, tiles_n = -(-queries // step.tile_m), -(-keys // step.tile_n)
    padded = tiles_m * step.tile_m
    wide, v_wide = (-(-x // step.multiple) * step.multiple for x in (width, v_width))
    floats = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    zeros = functools.partial(torch.zeros, device=q.device)
    dq_sum = floats(rows, heads, padded * wide)
    delta, lse2 = floats(rows, heads, padded), floats(rows, heads, padded)
    turns = [zeros(rows, heads, tiles_m, 1, dtype=torch.int32), None, None]
    q, k, v, out, dout = (copyable(x) for x in (q, k, v, out, dout))
    dk, dv = (x.transpose(1, 2) for x in into)
    dk_sum, dv_sum = dk, dv
    if grouped:
        padded = tiles_n * step.tile_n
        dk_sum, dv_sum = (zeros(rows, key_heads, padded * x, dtype=torch.float32) for x in (wide, v_wide))
        turns[1:] = (zeros(rows, key_heads, tiles_n, 2, dtype=torch.int32) for _ in range(2))
    dlse = None if dlse is None else dlse.contiguous()
    step.prepare(
        out, dout, delta, lse.contiguous(), lse2, None if all_see else dq_sum, None, None, dlse, None, None, 1.0,
        None, None,
    )  # fmt: skip
    step.main(
        q, k, v, dout, lse2, delta, dq_sum, dk_sum, dv_sum, scale, *(None,) * 4, *_sides(causal, window), *turns,
        NO_AUXILIARY, None, None,
    )  # fmt: skip
    if grouped:
        step.finish_keys(dk_sum, dk, scale, None, None, None, None)
        step.finish_values(dv_sum, dv, 1.0, None, None, None, None)
    return Held(dq_sum, scale, step)


def copyable(x: Tensor) -> Tensor:
    """x as `[B, T, H, E]`, copied when its strides do not suit the copy engine."""
    x = x.detach().transpose(1, 2)
    wide = 16 // x.element_size()
    regular = (
        x.stride(3) == 1 and all(s > 0 and s % wide == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0
    )
    return x if regular else x.clone(memory_format=torch.contiguous_format)
