"""flash-attn-4's causal forward for tensors that are still being prepared: it waits for them head by head."""

import dataclasses
from inspect import signature
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from flash_attn.cute import utils
from flash_attn.cute.barrier import ld_acquire
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

from phasewise.kernels.flash_persistent import Draws, Launch, Order, PersistentForward

ARGUMENTS = signature(FlashAttentionForwardSm90.kernel)


@dataclasses.dataclass
class AwaitedOrder(Order):
    """The order of tiles, with the counts that they wait for: of units prepared, for so many key heads each."""

    done: cute.Tensor | None = None
    heads: Int32 | None = None
    units: Int32 | None = None


@cute.jit
def wait_for_head(order: Any, tile: Int32, head: Int32, batch: Int32):
    """Until what a tile reads is there, for the copy engine too. There may be no such tile."""
    if tile < order.total_blocks:
        place = order.done.iterator + (batch * order.num_head + head) // order.heads
        count = ld_acquire(place)
        while count < order.units:
            count = ld_acquire(place)
        cute.arch.fence_proxy("async.global")


class AwaitedDraws(Draws):
    """Tiles one after another, each of which the warp that loads gets when its head is prepared."""

    @staticmethod
    def create(params, ctx=None, *, loc=None, ip=None):
        return AwaitedDraws(params, cute.arch.block_idx()[0], Int32(0), ctx)

    def initial_work_tile_info(self, *, loc=None, ip=None):
        self.wait()
        return super().initial_work_tile_info()

    def advance_to_next_work(self, *, loc=None, ip=None):
        super().advance_to_next_work()
        self.wait()

    def wait(self):
        _, loads = self._ctx
        if loads:
            _, head, batch, _ = self.get_current_work().tile_idx
            wait_for_head(self.params, self._tile_idx, head, batch)


class LaunchBeside(Launch):
    """A kernel that is launched as soon as the one before it allows."""

    def launch(self, **settings):
        super().launch(**settings, use_pdl=True)


class AwaitingForward(PersistentForward):
    """The forward that waits for a head's keys, and queries; values are there.

    Its auxiliary data are ([counter, done, ...], (heads, units, together)); it takes so many key heads at a time. What
    follows the first two tensors is handed on to those who multiply.
    """

    def kernel(self, *arguments):
        """flash-attn-4's, with our order of tiles."""
        given = ARGUMENTS.bind(self, *arguments).arguments
        (counter, done, *others), (heads, units, together) = given["aux_data"]
        order = given["tile_sched_params"]
        all_heads, divisor = order.num_head * order.num_batch, cute.FastDivmodDivisorV2
        order = {field.name: getattr(order, field.name) for field in dataclasses.fields(order)} | {
            "l2_minor": together,
            "l2_minor_divmod": divisor(together),
            "l2_major_divmod": divisor(together * order.num_block),
            "l2_minor_residual_divmod": divisor(cutlass.max(all_heads % together, Int32(1))),
            "num_hb_quotient": all_heads // together,
        }
        given["tile_sched_params"] = AwaitedOrder(
            **order, counter=counter, done=done, heads=heads, units=units
        )
        given["TileScheduler"] = AwaitedDraws
        given["aux_data"], given["fastdiv_mods"] = utils.AuxData(others or None, None), None
        return LaunchBeside(FlashAttentionForwardSm90.kernel(*given.values()), self.programs)
