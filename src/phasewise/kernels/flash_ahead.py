"""flash-attn-4's causal forward, begun while its queries and keys are being prepared (optional package)."""

import dataclasses
import functools
from inspect import signature
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from flash_attn.cute import utils
from flash_attn.cute.barrier import ld_acquire
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from phasewise.kernels.ahead import VECTOR, Plan
from phasewise.kernels.flash import (
    ELEMENTS,
    NO_AUXILIARY,
    Kind,
    compiled,
    copyable,
    forward_kernel,
    kind_of,
    quiet,
)
from phasewise.kernels.flash_persistent import Draws, Launch, Order, PersistentForward
from phasewise.kernels.flash_prepare import HEADS, Preparing
from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.prepare import expanded_like

ARGUMENTS = signature(FlashAttentionForwardSm90.kernel)


@dataclasses.dataclass
class AwaitedOrder(Order):
    """The order of tiles, with the counts that they wait for: of units prepared, for so many key heads each."""

    done: cute.Tensor | None = None
    heads: Int32 | None = None
    units: Int32 | None = None


@cute.jit
def wait_for_head(order: Any, tile: Int32, head: Int32, batch: Int32):
    """Until a tile's queries and keys are there, for the copy engine too. There may be no such tile."""
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
    """The forward that waits for a head's queries and keys; values are there.

    Its auxiliary data are ([counter, done], (heads, units, together)); it takes so many key heads at a time.
    """

    def kernel(self, *arguments):
        """flash-attn-4's, with our order of tiles."""
        given = ARGUMENTS.bind(self, *arguments).arguments
        (counter, done), (heads, units, together) = given["aux_data"]
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
        given["aux_data"], given["fastdiv_mods"] = NO_AUXILIARY, None
        return LaunchBeside(FlashAttentionForwardSm90.kernel(*given.values()), self.programs)


class Ahead:
    """Both kernels, one launched right after the other."""

    def __init__(self, preparing: Preparing, attention: AwaitingForward):
        self.preparing, self.attention = preparing, attention

    @cute.jit
    def __call__(
        self, q, k, q_made, k_made, v, out, lse, q_angle, k_angle, phase, counter, done, factor: Float32,
        scale: Float32, q_programs: Int32, k_programs: Int32, together: Int32, stream: cuda.CUstream = None,
    ):  # fmt: skip
        self.preparing(
            q, k, q_made, k_made, q_angle, k_angle, phase, done, factor, q_programs, k_programs, stream
        )
        units = self.preparing.units(q.shape[1]) + self.preparing.units(k.shape[1])
        awaited = utils.AuxData([counter, done], (Int32(self.preparing.k_heads), Int32(units), together))
        self.attention(q_made, k_made, v, out, lse, scale, *(None,) * 9, awaited, None, None, stream)


@functools.cache
@quiet()
def compiled_ahead(kind: Kind, n: int, preparation: str, phased: bool, key_heads: int) -> Any:
    """For any lengths. kind is that of what is multiplied; key_heads are counted together."""
    element = ELEMENTS[kind.dtype]
    width = 2 * n if preparation == "rope" else n
    batch, queries, keys, all_heads, all_key_heads = (cute.sym_int() for _ in range(5))
    halves = functools.partial(make_fake_tensor, element, divisibility=VECTOR)
    floats = functools.partial(make_fake_tensor, Float32, divisibility=4)
    of_query, of_key = (batch, queries, all_heads), (batch, keys, all_key_heads)
    counts = [make_fake_tensor(Int32, (size,)) for size in (1, cute.sym_int())]
    return compiled(
        Ahead(
            Preparing(element, n, preparation, key_heads * kind.group, key_heads),
            forward_kernel(kind, AwaitingForward, programs=multiprocessors(torch.device("cuda"))),
        ),
        halves((*of_query, width)), halves((*of_key, width)), halves((*of_query, 2 * n)), halves((*of_key, 2 * n)),
        halves((*of_key, kind.v_width)), halves((*of_query, kind.v_width)),
        make_fake_tensor(Float32, (batch, all_heads, queries)), floats((batch, queries, n)), floats((batch, keys, n)),
        floats((all_heads, n)) if phased else None, *counts, Float32(1.0), Float32(1.0), *(Int32(1),) * 3,
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor, k_angle: Tensor, phase: Tensor | None, plan: Plan,
    *, preparation: str, factor: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]`, log-sum-exp `[B, H, T]`, and prepared q and k, of the calls that `ahead.plan` names."""
    rows, heads, queries, _ = q.shape
    key_heads, n = k.shape[1], q_angle.shape[2]
    q_made, k_made, out = expanded_like(q, 2 * n), expanded_like(k, 2 * n), expanded_like(q, v.shape[3])
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    most = max(1, HEADS // (heads // key_heads))
    together = max(count for count in range(1, most + 1) if key_heads % count == 0)
    counts = torch.zeros(1 + rows * key_heads // together, dtype=torch.int32, device=q.device)
    kind = kind_of(q_made, k_made, v, True, None)
    compiled_ahead(kind, n, preparation, phase is not None, together)(
        copyable(q), copyable(k), *(x.transpose(1, 2) for x in (q_made, k_made)), copyable(v), out.transpose(1, 2),
        lse, q_angle.expand(rows, -1, -1), k_angle.expand(rows, -1, -1), phase, counts[:1], counts[1:], factor, scale,
        *plan,
    )  # fmt: skip
    return out, lse, q_made, k_made
