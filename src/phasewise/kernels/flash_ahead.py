"""flash-attn-4's causal forward, begun while its queries and keys are being prepared (optional package)."""

import functools
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from flash_attn.cute import utils
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from phasewise.kernels.ahead import VECTOR, Plan
from phasewise.kernels.flash import ELEMENTS, Kind, compiled, copyable, forward_config, forward_kernel, kept
from phasewise.kernels.flash_awaiting import AwaitingForward
from phasewise.kernels.flash_expanding import ExpandingForward
from phasewise.kernels.flash_prepare import HEADS, Preparing
from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.prepare import expanded_like


class Ahead:
    """Both kernels, one launched right after the other."""

    def __init__(self, preparing: Preparing, attention: AwaitingForward):
        self.preparing, self.attention = preparing, attention

    @cute.jit
    def __call__(
        self, q, k, q_made, k_made, v, out, lse, q_angle, k_angle, phase, counter, done, factor: Float32,
        scale: Float32, q_programs: Int32, k_programs: Int32, together: Int32, stream: cuda.CUstream = None,
    ):  # fmt: skip
        """q_made None: attention expands queries itself."""
        units, awaited = self.preparing.units(k.shape[1]), [counter, done]
        if const_expr(q_made is None):
            queries, multiplied = (None, None, None), q
            awaited += [q_angle] if const_expr(phase is None) else [q_angle, phase]
        else:
            queries, multiplied = (q, q_made, q_angle), q_made
            units += self.preparing.units(q.shape[1])
        some_q, some_made, some_angle = queries
        self.preparing(
            some_q, k, some_made, k_made, some_angle, k_angle, done, factor, q_programs, k_programs, stream
        )
        awaited = utils.AuxData(awaited, (Int32(self.preparing.k_heads), Int32(units), together))
        self.attention(multiplied, k_made, v, out, lse, scale, *(None,) * 9, awaited, None, None, stream)


@kept
def compiled_ahead(
    kind: Kind, config: Any, programs: int, n: int, preparation: str, phased: bool, key_heads: int
) -> Any:
    """For any lengths. kind is that of what is multiplied; key_heads are counted together."""
    element = ELEMENTS[kind.dtype]
    rotates = preparation == "rope"
    width = 2 * n if rotates else n
    batch, queries, keys, all_heads, all_key_heads = (cute.sym_int() for _ in range(5))
    halves = functools.partial(make_fake_tensor, element, divisibility=VECTOR)
    floats = functools.partial(make_fake_tensor, Float32, divisibility=4)
    of_query, of_key = (batch, queries, all_heads), (batch, keys, all_key_heads)
    counts = [make_fake_tensor(Int32, (size,)) for size in (1, cute.sym_int())]
    form, settings = (AwaitingForward, {}) if rotates else (ExpandingForward, {"preparation": preparation})
    return compiled(
        Ahead(
            Preparing(element, n, preparation, key_heads * kind.group, key_heads),
            forward_kernel(kind, config, form, programs=programs, **settings),
        ),
        halves((*of_query, width)), halves((*of_key, width)), halves((*of_query, 2 * n)) if rotates else None,
        halves((*of_key, 2 * n)), halves((*of_key, kind.v_width)), halves((*of_query, kind.v_width)),
        make_fake_tensor(Float32, (batch, all_heads, queries)), floats((batch, queries, n)), floats((batch, keys, n)),
        floats((all_heads, n)) if phased else None, *counts, Float32(1.0), Float32(1.0), *(Int32(1),) * 3,
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor, k_angle: Tensor, phase: Tensor | None, plan: Plan,
    *, preparation: str, factor: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Output `[B, H, T, D]`, log-sum-exp `[B, H, T]`, RoPE's rotated q, prepared k, of what `ahead.plan` names."""
    rows, heads, queries, _ = q.shape
    key_heads, n = k.shape[1], q_angle.shape[2]
    q_made = expanded_like(q, 2 * n) if preparation == "rope" else None
    k_made, out = expanded_like(k, 2 * n), expanded_like(q, v.shape[3])
    lse = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    most = HEADS if q_made is None else max(1, HEADS // (heads // key_heads))
    together = max(count for count in range(1, most + 1) if key_heads % count == 0)
    counts = torch.zeros(1 + rows * key_heads // together, dtype=torch.int32, device=q.device)
    kind = Kind(q.dtype, 2 * n, v.shape[3], heads // key_heads, True, False)
    settings = (n, preparation, phase is not None, together)
    compiled_ahead(kind, forward_config(kind, q.device), multiprocessors(q.device), *settings)(
        copyable(q), copyable(k), None if q_made is None else q_made.transpose(1, 2), k_made.transpose(1, 2),
        copyable(v), out.transpose(1, 2), lse, q_angle.expand(rows, -1, -1), k_angle.expand(rows, -1, -1), phase,
        counts[:1], counts[1:], factor, scale, *plan,
    )  # fmt: skip
    return out, lse, q_made, k_made
