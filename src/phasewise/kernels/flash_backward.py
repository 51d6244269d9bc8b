"""flash-attn-4's deterministic backward for Hopper, without its interface: as `flash` (optional package)."""

import functools
from typing import Any, NamedTuple

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from flash_attn.cute import interface, utils
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from phasewise.kernels.flash import ELEMENTS, NO_AUXILIARY, Kind, compiled, copyable, kept, kind_of, sides_of
from phasewise.kernels.flash_ordered import OrderedBackward
from phasewise.kernels.prepare import Sums, finish_rotated, rotate
from phasewise.kernels.table import exact
from phasewise.kernels.tiles import power_of_two

HOPPER = 90


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
    by_rows: bool  # whether dq's sums are held as `_by_rows` says
    by_channels: bool  # whether they are held as `prepare.Sums` has them


def _config(kind: Kind, device: torch.device) -> Any:
    """For widths (128, 64) flash-attn-4's own tiles are those of (128, 128), so the launch table has some of ours."""
    tiles = exact("separable.flash.gradient", device, kind.dtype, kind.width, kind.v_width)
    if tiles is not None:
        return interface.BwdConfig(**tiles)
    return interface._tile_size_bwd_sm90(kind.width, kind.v_width, kind.row_ends, kind.windowed)


def _by_rows(kind: Kind, config: Any) -> bool:
    """Whether dq's sums are held by 64 rows and the halves of their channels."""
    rows = config.m_block_size == 64 * config.AtomLayoutMdQ
    return rows and not config.dQ_swapAB and kind.width % 64 == 0


def _turns(kind: Kind, config: Any, n: int) -> bool:
    """Whether RoPE's gradients of queries, by n angles, are turned back out of their sums, and those of keys where they
    are made, which from 128 channels on takes less time than to read and write them again.
    """
    whole = config.AtomLayoutNdKV == config.num_wg and not config.dKV_swapAB
    paired = kind.width == 2 * n and n == power_of_two(n)
    return kind.width >= 128 and paired and whole and kind.group == 1 and _by_rows(kind, config)


@kept
def compiled_main(kind: Kind, config: Any, all_see: bool, turned: bool) -> Any:
    """The deterministic backward itself, which adds up dq in a fixed order."""
    element, grouped = ELEMENTS[kind.dtype], kind.group > 1
    kernel = (functools.partial(OrderedBackward, turned=turned) if all_see else FlashAttentionBackwardSm90)(
        element, kind.width, kind.v_width, kind.group, kind.row_ends, is_local=kind.windowed, deterministic=True,
        tile_m=config.m_block_size, tile_n=config.n_block_size, Q_stage=config.num_stages_Q,
        dO_stage=config.num_stages_dO, PdS_stage=config.num_stages_PdS, SdP_swapAB=config.SdP_swapAB,
        dKV_swapAB=config.dKV_swapAB, dQ_swapAB=config.dQ_swapAB, AtomLayoutMSdP=config.AtomLayoutMSdP,
        AtomLayoutNdKV=config.AtomLayoutNdKV, AtomLayoutMdQ=config.AtomLayoutMdQ,
        num_threads=config.num_wg * 128 + 128, q_subtile_factor=2, dQ_single_wg=config.dQ_single_wg,
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
    angles = make_fake_tensor(Float32, (k.shape[0], k.shape[1], cute.sym_int()), divisibility=4)
    auxiliary = utils.AuxData([angles], None) if turned else NO_AUXILIARY
    return compiled(
        kernel, q, k, v, dout, lse2, delta, dq_sum, dk, dv, Float32(1.0), *(None,) * 4, *sides, *turns,
        auxiliary, None, None,
    )  # fmt: skip


@kept
def compiled_prepare(
    dtype: torch.dtype, width: int, v_width: int, tile_m: int, with_dlse: bool, zeros: bool, multiple: int
) -> Any:
    """What makes delta, and zeros for sums of dq where that is asked for."""
    return interface._compile_bwd_preprocess(
        ELEMENTS[dtype], width, v_width, tile_m, False, False, with_dlse, zeros, False, True, True, False, False, 1, 1,
        False, multiple,
    )  # fmt: skip


@kept
def compiled_finish(dtype: torch.dtype, multiple: int, width: int, *layout: Any) -> Any:
    """From float32 sums, in the order of the product's registers, to a gradient: (sums, gradient, scale, ...)."""
    return interface._compile_bwd_postprocess(
        ELEMENTS[dtype], width, *layout, False, False, False, 1, HOPPER, False, None, multiple
    )


@functools.cache
def compiled_backward(kind: Kind, config: Any, with_dlse: bool, all_see: bool, turned: bool) -> Backward:
    """The deterministic backward; all_see: there is no window, and no query sees nothing; turned: as
    `OrderedBackward` has it, for which all must see.
    """
    warps = config.num_wg * 128
    multiple = 64 if config.dKV_swapAB else 32
    finish = functools.partial(compiled_finish, kind.dtype, multiple)
    dq_warps = 128 if config.dQ_single_wg else warps
    keys = (config.n_block_size, warps, config.AtomLayoutNdKV, config.dKV_swapAB)
    return Backward(
        prepare=compiled_prepare(
            kind.dtype, kind.width, kind.v_width, config.m_block_size, with_dlse, not all_see, multiple
        ),
        main=compiled_main(kind, config, all_see, turned),
        finish_queries=finish(
            kind.width, config.m_block_size, dq_warps, config.AtomLayoutMdQ, config.dQ_swapAB
        ),
        finish_keys=finish(kind.width, *keys) if kind.group > 1 else None,
        finish_values=finish(kind.v_width, *keys) if kind.group > 1 else None,
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        multiple=multiple,
        by_rows=_by_rows(kind, config),
        by_channels=config.dQ_swapAB and warps == 256 and config.AtomLayoutMdQ == 1 and kind.width == 128
        and config.m_block_size % 16 == 0,
    )  # fmt: skip


class Held(NamedTuple):
    """The gradient of queries as the backward leaves it: sums in the order of the threads that hold them."""

    sums: Tensor
    scale: float
    step: Backward
    turned: bool  # whether the gradient of keys is that of the ones that RoPE turned

    def write(self, dq: Tensor) -> None:
        self.step.finish_queries(self.sums, dq.transpose(1, 2), self.scale, None, None, None, None)

    def turn_back(self, dq: Tensor, dk: Tensor, q_angle: Tensor, k_angle: Tensor, factor: float) -> None:
        """Write dq, and turn it back by RoPE's angles, and dk where it is not."""
        n = q_angle.shape[2]
        if self.turned:
            finish_rotated(self.sums, self.scale, dq, None, q_angle, None, factor)
        elif self.step.by_rows and 2 * n == dq.shape[3] and n == power_of_two(n):
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
    into: tuple[Tensor, Tensor], *, scale: float, causal: bool, window: int | None, angles: Tensor | None = None,
) -> Held:  # fmt: skip
    """Gradients of k and v, into given tensors, of which that of k may be k itself, and of q.

    angles: float32 `[B | 1, S, E / 2]` by which RoPE turned k; where the kernel can, dk is turned back.
    """
    rows, heads, queries, width = q.shape
    key_heads, keys, v_width = v.shape[1:]
    grouped = heads > key_heads
    all_see = window is None and (queries <= keys or not causal)
    kind = kind_of(q, k, v, causal, window)
    config = _config(kind, q.device)
    turned = angles is not None and all_see and _turns(kind, config, angles.shape[2])
    auxiliary = NO_AUXILIARY
    if turned and angles is not None:
        auxiliary = utils.AuxData([angles.expand(rows, -1, -1)], None)
    step = compiled_backward(kind, config, dlse is not None, all_see, turned)
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
        q, k, v, dout, lse2, delta, dq_sum, dk_sum, dv_sum, scale, *(None,) * 4, *sides_of(causal, window), *turns,
        auxiliary, None, None,
    )  # fmt: skip
    if grouped:
        step.finish_keys(dk_sum, dk, scale, None, None, None, None)
        step.finish_values(dv_sum, dv, 1.0, None, None, None, None)
    return Held(dq_sum, scale, step, turned)
