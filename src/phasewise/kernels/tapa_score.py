"""TAPA's score on tiles: scale (q_A . k_A) cos(2 pi unit |i - j|^alpha (q_P . k_P)), and what its kernels share.

Letters: B batch, H query heads, G key heads, T queries, S keys; A, P and V the widths of the amplitude part, the
phase part and the values. FAST kernels, for half precision, count phases in radians and leave them to the hardware;
the others count turns, so that reducing one to the nearest turn is exact.
The rows of a tile are the side a program keeps, its columns the side it walks over.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phasewise.kernels.tiles import UNSEEN, Places, block_width, describe, visible

SERIES_ERROR: tl.constexpr = tl.constexpr(2.0**-17)  # of the power, relative: 5e-4 rad on a phase of 10 turns
TURN: tl.constexpr = tl.constexpr(2 * math.pi)
SHIFT_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2.0**23)  # adding it leaves float32 no fraction

BEFORE = 512  # entries of a table of powers before distance 0: more than a tile's rows and columns

NEAR: tl.constexpr = tl.constexpr(0)  # every power exact, every key checked for visibility
FAR: tl.constexpr = tl.constexpr(1)  # powers by series, every key seen
EITHER: tl.constexpr = tl.constexpr(2)  # each tile decides


@triton.jit
def raised(x, alpha, FAST: tl.constexpr):
    """x^alpha for x >= 1; FAST takes the hardware's logarithm, relative error 2^-22 alpha log2(x); else float64."""
    if FAST:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.exp2(alpha * log2)
    else:
        return tl.exp2(alpha.to(tl.float64) * tl.log2(x.to(tl.float64))).to(tl.float32)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """1 / x; FAST takes the hardware's, within one unit in the last place."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def distance(rows, columns):
    """|rows - columns| in float32, the difference taken before any rounding (beyond 2^24: of int64 places only)."""
    if rows.dtype == tl.int64:
        return tl.abs(rows[:, None] - columns[None, :]).to(tl.float32)
    else:
        return tl.abs(rows.to(tl.float32)[:, None] - columns.to(tl.float32)[None, :])


@triton.jit
def power(gap, alpha, unit, FAST: tl.constexpr):
    """unit gap^alpha, with 0 at gap 0 for every alpha."""
    return tl.where(gap > 0, unit * raised(tl.maximum(gap, 1.0), alpha, FAST), 0.0)


@triton.jit
def power_kernel(out_ptr, alpha_ptr, unit, length, before, BLOCK: tl.constexpr):
    """unit d^alpha and unit (d - 1)^alpha for d from -before on, 0 where there is no distance."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gap = (at - before).to(tl.float32)
    alpha = tl.load(alpha_ptr)
    tl.store(out_ptr + 2 * at, power(gap, alpha, unit, False), at < length)
    tl.store(out_ptr + 2 * at + 1, power(gap - 1, alpha, unit, False), at < length)


def power_table(alpha: Tensor, unit: float, keys: int) -> Tensor:
    """int64 `[BEFORE + keys + BEFORE]`, each the two float32 of `power_kernel`."""
    table = torch.empty(keys + 2 * BEFORE, dtype=torch.int64, device=alpha.device)
    block = 128  # few enough that powers in float64 do not wait for each other
    power_kernel[(triton.cdiv(len(table), block),)](
        table.view(torch.float32), alpha, unit, len(table), BEFORE, BLOCK=block
    )
    return table


@triton.jit
def series_reach(alpha):
    """How many half tiles a row must lie from the middle of a tile for `power_series`.

    With rho = half / r <= 1/4 the truncated series errs by at most |binomial(alpha, 4)| rho^4 (1/8 + rho/16 +
    rho^2/(1 - rho)), relative to r^alpha, for -1 <= alpha <= 9, where the binomials fall from the fourth on; the
    bracket is below 0.23, and the power at the near edge exceeds (3/4)^alpha r^alpha.
    """
    fourth = alpha * (alpha - 1) * (alpha - 2) * (alpha - 3) / 24
    bound = 0.23 * tl.abs(fourth) * tl.exp2(0.42 * tl.maximum(alpha, 0.0)) / SERIES_ERROR
    return tl.maximum(4.0, tl.exp2(0.25 * tl.log2(bound + 1e-30)))


@triton.jit
def power_series(rows, columns, middle, half, alpha, unit, FAST: tl.constexpr):
    """unit |rows - columns|^alpha for columns within `half` of `middle` and rows far from it, as a cubic a row.

    (1 + x)^alpha with x = (middle - column) / r is cut after x^3; the next two terms are replaced by their best
    approximations of lower degree on |x| <= half / r (Chebyshev economisation).
    """
    r = (rows - middle).to(tl.float32)
    s = (columns - middle).to(tl.float32)[None, :]
    step = -reciprocal(r, FAST)
    square = half * half * step * step
    first = alpha
    second = first * (alpha - 1) / 2
    third = second * (alpha - 2) / 3
    fourth = third * (alpha - 3) / 4
    fifth = fourth * (alpha - 4) / 5
    base = unit * raised(tl.abs(r), alpha, FAST)
    w0 = base * (1 - fourth * square * square * 0.125)
    w1 = base * step * (first - fifth * square * square * 0.3125)
    w2 = base * step * step * (second + fourth * square)
    w3 = base * step * step * step * (third + fifth * square * 1.25)
    return w0[:, None] + s * (w1[:, None] + s * (w2[:, None] + s * w3[:, None]))


@triton.jit
def tile_is_far(rows, columns, rows_segment, columns_segment, window, reach, CAUSAL, WINDOWED):
    """Whether every row sees every column and the series holds, with the middle and half width of the columns.

    For places from memory. Rows may be queries or keys: causality is told by the sign of CAUSAL, +1 when the rows
    are the queries, -1 when they are the keys, 0 when it does not apply.
    """
    low = tl.min(columns)
    high = tl.max(columns)
    row_low = tl.min(rows)
    row_high = tl.max(rows)
    middle = low + (high - low) // 2
    half = tl.maximum((high - middle).to(tl.float32), 1.0)
    segment = tl.max(columns_segment)
    far = (segment >= 0) & (tl.min(columns_segment) == segment)
    far &= (tl.min(rows_segment) == segment) & (tl.max(rows_segment) == segment)
    far &= tl.maximum(row_low - middle, middle - row_high).to(tl.float32) >= reach * half
    if CAUSAL > 0:
        far &= row_low >= high
    if CAUSAL < 0:
        far &= low >= row_high
    if WINDOWED:
        far &= tl.maximum(row_high - low, high - row_low) < window
    return far, middle, half


@triton.jit
def gap_to(first, ROWS: tl.constexpr, middle):
    """How far the nearest of the consecutive places `[first, first + ROWS)` lies from `middle` outside them."""
    return tl.maximum(first - middle, middle - (first + ROWS - 1))


@triton.jit
def far_below(first, reach, BLOCK: tl.constexpr):
    """Where the columns end, a multiple of BLOCK, whose tiles are far for consecutive rows from `first` on."""
    distance = tl.ceil(reach * (BLOCK / 2)).to(tl.int32)
    return tl.maximum(first - distance + BLOCK // 2, 0) // BLOCK * BLOCK


@triton.jit
def far_above(last, reach, shift, BLOCK: tl.constexpr):
    """Where the columns start, a multiple of BLOCK, whose tiles are far for rows up to `last`; columns at c + shift."""
    distance = tl.ceil(reach * (BLOCK / 2)).to(tl.int32)
    return tl.cdiv(tl.maximum(last + distance - BLOCK // 2 - shift, 0), BLOCK) * BLOCK


@triton.jit
def place(
    amplitude, phase, far, rows, columns, middle, half, i, i_segment, j, j_segment, window, alpha, unit,
    REACH: tl.constexpr, FAST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Amplitudes and phases of a tile, and unit |i - j|^alpha; where a key is unseen UNSEEN, 0 and 0, so that cos is 1.

    Whatever the key holds: a phase that is no number times 0 is none either.
    """
    if REACH == FAR:
        return amplitude, phase, power_series(rows, columns, middle, half, alpha, unit, FAST)
    else:
        if far & (REACH == EITHER):
            strength = power_series(rows, columns, middle, half, alpha, unit, FAST)
        else:
            seen = visible(i, i_segment, j, j_segment, window, CAUSAL, WINDOWED)
            strength = tl.where(seen, power(distance(rows, columns), alpha, unit, FAST), 0.0)
            amplitude = tl.where(seen, amplitude, UNSEEN)
            phase = tl.where(seen, phase, 0.0)
        return amplitude, phase, strength


@triton.jit
def place_keys(
    amplitude, phase, first_n, full_low, full_high, first_i, i, i_segment, j, j_segment, window, alpha, unit, reach,
    REACH: tl.constexpr, PLACED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, FAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`place` for queries at i, of which the first is first_i, and keys at j, from first_n on; and both as rows and
    columns, whose differences are distances."""
    if PLACED:
        rows = i
        columns = j
        far, middle, half = tile_is_far(
            rows, columns, i_segment, j_segment, window, reach, 1 if CAUSAL else 0, WINDOWED
        )
    else:
        rows = i - first_n
        columns = tl.arange(0, BLOCK_N)
        middle: tl.constexpr = BLOCK_N // 2
        half: tl.constexpr = BLOCK_N / 2
        far = (first_n >= full_low) & (first_n < full_high)
        far &= gap_to(first_i, BLOCK_M, first_n + middle) >= reach * half
    amplitude, phase, strength = place(
        amplitude, phase, far, rows, columns, middle, half, i[:, None], i_segment[:, None], j[None, :],
        j_segment[None, :], window, alpha, unit, REACH, FAST, CAUSAL, WINDOWED,
    )  # fmt: skip
    return amplitude, phase, strength, rows, columns


@triton.jit
def cosine(phase, FAST: tl.constexpr):
    """cos of a phase in turns; FAST of one in radians, by the hardware, whose reduction costs one rounding of it.

    The fraction of a turn is exact up to 2^22 turns, where float32 ends telling halves apart.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "cos.approx.ftz.f32 $0, $1;", "=f,f", [phase], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.cos((phase - ((phase + SHIFT_TO_INTEGER) - SHIFT_TO_INTEGER)) * TURN)


@triton.jit
def sine(phase, FAST: tl.constexpr):
    """sin, as `cosine`."""
    if FAST:
        return tl.inline_asm_elementwise(
            "sin.approx.ftz.f32 $0, $1;", "=f,f", [phase], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sin((phase - ((phase + SHIFT_TO_INTEGER) - SHIFT_TO_INTEGER)) * TURN)


@triton.jit
def span_at(batch, tile, tiles, row_stride):
    """Where a tile's span lies; one row of spans serves the batch when one row of places does."""
    return (tl.where(row_stride > 0, batch, 0) * tiles + tile) * 2


@triton.jit
def store_tile(
    ptr, first_column, rows, length, row_stride, column_stride, values, width, COLUMNS: tl.constexpr
):
    """`width` columns of one head, from `first_column` on."""
    columns = tl.arange(0, COLUMNS)
    at = rows.to(tl.int64)[:, None] * row_stride
    at += (first_column + columns).to(tl.int64)[None, :] * column_stride
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), inside)


@triton.jit
def phase_product(rows, columns, LINEAR: tl.constexpr, PRECISION: tl.constexpr):
    """q_P . k_P, or for the linear phase the sum of all their entries."""
    if LINEAR:
        return tl.sum(rows.to(tl.float32), 1)[:, None] + tl.sum(columns.to(tl.float32), 1)[None, :]
    else:
        return tl.dot(rows, columns.T, input_precision=PRECISION)


@dataclass(frozen=True)
class Score:
    """What of TAPA's score is no tensor of its own: widths, factors, visibility."""

    amplitude_dim: int
    scale: float
    unit: float  # factor of the phase, in radians
    linear: bool
    causal: bool
    window: int | None

    def meta(self, q: Tensor, k: Tensor, places: Places | None) -> dict[str, object]:
        """The compile-time arguments that all kernels share."""
        return {
            "GROUP": q.shape[1] // k.shape[1], "PLACED": places is not None,
            "CAUSAL": self.causal, "WINDOWED": self.window is not None, "LINEAR": self.linear,
            "SERIES": q.dtype != torch.float32, "FAST": self.fast(q), "PRECISION": "ieee",
        }  # fmt: skip

    @staticmethod
    def fast(q: Tensor) -> bool:
        """Whether the hardware's logarithm, cosine and sine are good enough: for half precision."""
        return q.is_cuda and q.dtype != torch.float32

    def phase_unit(self, q: Tensor) -> float:
        """Factor of the phase as the kernels count it: radians when fast, else turns."""
        return self.unit if self.fast(q) else self.unit / (2 * math.pi)

    def blocks(self, q: Tensor) -> dict[str, int]:
        """Widths of the tiles of both parts."""
        return {
            "BLOCK_A": block_width(self.amplitude_dim),
            "BLOCK_P": block_width(q.shape[3] - self.amplitude_dim),
        }

    def parts(self, x: Tensor, block: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Amplitude and phase part of queries or keys, in tiles of `block` rows."""
        amplitude, phase = x.split([self.amplitude_dim, x.shape[3] - self.amplitude_dim], 3)
        return (
            describe(amplitude, block, block_width(amplitude.shape[3])),
            describe(phase, block, block_width(phase.shape[3])),
        )


def place_arguments(places: Places | None, spans: Tensor | None) -> tuple:
    """The kernels' seven arguments on places, of which they read none when there are none."""
    if places is None or spans is None:
        return (None,) * 5 + (0, 0)
    return (places.q_index, places.q_segment, places.k_index, places.k_segment, spans, *places.row_strides)
