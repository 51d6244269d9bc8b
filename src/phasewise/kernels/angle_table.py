"""Angles of places in one pass over memory: product and reduction in float64, one rounding at the end.

In plain PyTorch the same bits take eight passes, which a short attention waits for.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from phasewise.kernels.tiles import ceil_div, power_of_two

TURN: tl.constexpr = tl.constexpr(2 * math.pi)
PER_TURN: tl.constexpr = tl.constexpr(0.5 / math.pi)
WHOLE: tl.constexpr = tl.constexpr(2.0**52)  # float64 has no fraction from here on
ELEMENTS = 1024  # of a program


@triton.jit
def nearest_whole(x):
    """x rounded to a whole number, halves to even ones."""
    shift = tl.where(x < 0.0, -WHOLE, WHOLE)
    return tl.where(tl.abs(x) < WHOLE, (x + shift) - shift, x)


@triton.jit
def angle_kernel(
    out_ptr, rate_ptr, index_ptr, rows, m, axes,
    PLACED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out `[rows, axes m]` of places `[rows, axes]`, or of the rows' numbers."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.arange(0, BLOCK_C)
    inside = (t[:, None] < rows) & (c[None, :] < axes * m)
    rates = tl.load(rate_ptr + c % m, c < axes * m, other=0.0) * PER_TURN
    places = t[:, None]
    if PLACED:
        places = tl.load(index_ptr + t[:, None] * axes + (c // m)[None, :], inside, other=0)
    turns = places.to(tl.float64) * rates[None, :]
    angle = (turns - nearest_whole(turns)) * TURN
    tl.store(out_ptr + t[:, None] * (axes * m) + c[None, :], angle.to(tl.float32), inside)


def fill(out: Tensor, rates: Tensor, index: Tensor | None) -> None:
    """Write the angles of places `[B, T]` or `[B, T, A]`, or of 0, 1, 2, ..., all dense, into float32 `[B, T, A m]`."""
    rows, width = out.shape[0] * out.shape[1], out.shape[2]
    block_c = power_of_two(width)
    block_t = max(1, min(power_of_two(rows), ELEMENTS // block_c))
    angle_kernel[(ceil_div(rows, block_t),)](
        out, rates, index, rows, rates.shape[0], width // rates.shape[0], PLACED=index is not None, BLOCK_T=block_t,
        BLOCK_C=block_c, enable_fp_fusion=False,
    )  # fmt: skip
