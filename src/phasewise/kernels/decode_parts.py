"""What decoding's kernels share: turns by float64 angles, how keys are split over programs, and the parts added up.

Letters: B batch, H query heads, T queries, S keys, V the width of v.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasewise.kernels.prepare import expanded_like, magnitude, turn
from phasewise.kernels.tiles import EMPTY, block_width, ceil_div

TURN: tl.constexpr = tl.constexpr(2 * math.pi)
PER_TURN: tl.constexpr = tl.constexpr(0.5 / math.pi)
SHIFT_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2.0**52)  # adding it leaves float64 no fraction
MOST_TILES = 512  # a program: in half precision each adds 6e-8 to an angle, so 3e-5 in all


@triton.jit
def turns(place, rates, FAST: tl.constexpr):
    """cos and sin of places times rates (float64, radians a place), reduced in float64."""
    angle = place * (rates * PER_TURN)
    whole = (angle + SHIFT_TO_INTEGER) - SHIFT_TO_INTEGER
    return turn((angle - whole).to(tl.float32) * TURN, FAST)


@triton.jit
def product(x, y):
    """x y in half precision, two at a time."""
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", "=r,r,r", [x, y],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def pair(x, y, cos, sin, KIND: tl.constexpr, FAST: tl.constexpr):
    """What is turned, as two parts: RoPE's pairs (x, y), or PoPE's magnitude of x times cosines and sines.

    In half precision when PoPE's cosines are: two roundings more, and half the multiplications.
    """
    if KIND == "rope":
        x, y = x.to(tl.float32), y.to(tl.float32)
        return x * cos - y * sin, y * cos + x * sin
    else:
        size, _ = magnitude(x.to(tl.float32), KIND, FAST)
        if cos.dtype == tl.float32:
            return size * cos, size * sin
        else:
            size = size.to(cos.dtype)
            return product(size, cos), product(size, sin)


@triton.jit
def turned_back(x, y, cos, sin):
    """The pairs (x, y) of rows of queries turned back by the angles of one place."""
    return x * cos[None, :] + y * sin[None, :], y * cos[None, :] - x * sin[None, :]


def tiles_each(tiles: int, programs: int, room: int) -> int:
    """How many of its `tiles` of keys a program takes, for `programs` rows of keys and room for so many programs.

    >>> tiles_each(1024, 64, 264)
    256
    """
    splits = max(1, min(room // programs, tiles))
    return min(ceil_div(tiles, splits), MOST_TILES)


@triton.jit(do_not_specialize=["rows", "splits"])
def combine_kernel(
    out_ptr, out_strides, lse_out_ptr, part_ptr, lse_ptr, rows, H, T, splits,
    V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One query's output from its parts, each weighted by its share of the exponentials' sum."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_V)
    top = EMPTY
    total = 0.0
    mixed = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, splits, BLOCK_S):
        at = (first + s).to(tl.int64) * rows + row
        inside = first + s < splits
        lse = tl.load(lse_ptr + at, inside, other=-float("inf"))
        higher = tl.maximum(top, tl.max(lse))
        weights = tl.exp(lse - higher)
        parts = tl.load(
            part_ptr + at[:, None] * V + d[None, :], inside[:, None] & (d < V)[None, :], other=0.0
        )
        fade = tl.exp(top - higher)
        mixed = mixed * fade + tl.sum(weights[:, None] * parts, 0)
        total = total * fade + tl.sum(weights)
        top = higher
    tl.store(lse_out_ptr + row, top + tl.log(total))
    out_ptr += row // (H * T) * out_strides[0] + row // T % H * out_strides[1] + row % T * out_strides[2]
    tl.store(out_ptr + d * out_strides[3], (mixed / total).to(out_ptr.dtype.element_ty), d < V)


def combined(part: Tensor, part_lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, V]`, stored place by place, and log-sum-exp `[B, H, T]`, of float32 `[parts, B H T, V]`."""
    parts, rows, width = part.shape
    out, lse = expanded_like(q, width), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    combine_kernel[(rows,)](
        out, out.stride(), lse, part, part_lse, rows, q.shape[1], q.shape[2], parts,
        V=width, BLOCK_V=block_width(width), BLOCK_S=16,
    )  # fmt: skip
    return out, lse
