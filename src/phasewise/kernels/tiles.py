"""What the attention kernels share: places, visibility, tile spans and tensor descriptors.

Letters: T queries, S keys, BLOCK_M queries and BLOCK_N keys in a tile, i and j the places of a query and of a
key.
Log-sum-exps are natural logarithms; a row that sees nothing has `EMPTY_LSE`, which is finite.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from phasewise.kernels.table import launch as launch
from phasewise.kernels.table import launch_table as launch_table

EMPTY_LSE = -1e30
LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))
LN2: tl.constexpr = tl.constexpr(math.log(2.0))
EMPTY: tl.constexpr = tl.constexpr(EMPTY_LSE)
UNSEEN: tl.constexpr = tl.constexpr(-1e30)  # a masked score: finite, so that no row makes inf - inf


@triton.jit
def load_places(index_ptr, segment_ptr, row_offset, offsets, length, shift, PLACED: tl.constexpr):
    """Place and segment of `offsets`: int64 from memory, or `offsets + shift` in segment 0 when not PLACED.

    Offsets past `length` get segment -1, which nothing sees.
    """
    inside = offsets < length
    if PLACED:
        at = row_offset + offsets
        return tl.load(index_ptr + at, inside, other=0), tl.load(segment_ptr + at, inside, other=-1)
    else:
        return offsets + shift, tl.where(inside, 0, -1)


@triton.jit
def visible(i, i_segment, j, j_segment, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Which keys j the queries i see; the arguments broadcast, so either axis may hold the queries."""
    seen = (i_segment == j_segment) & (j_segment >= 0)
    if CAUSAL:
        seen &= j <= i
    if WINDOWED:
        seen &= i - j < window
        if not CAUSAL:
            seen &= j - i < window
    return seen


@triton.jit
def key_span(
    first_m, T, S, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys `[low, high)` that any query of a tile sees, and `[full_low, full_high)` that all of them see.

    For queries at places t + S - T. All four are multiples of BLOCK_N except `high`, which may be S.
    """
    first = first_m + S - T
    last = tl.minimum(first_m + BLOCK_M, T) - 1 + S - T
    low = 0
    high = S
    full_low = 0
    full_high = S
    if CAUSAL:
        high = tl.minimum(high, last + 1)
        full_high = tl.minimum(full_high, first + 1)
    if WINDOWED:
        low = tl.maximum(low, first - window + 1)
        full_low = tl.maximum(full_low, last - window + 1)
        if not CAUSAL:
            high = tl.minimum(high, last + window)
            full_high = tl.minimum(full_high, first + window)
    high = tl.maximum(high, 0)
    low = tl.minimum(low, high) // BLOCK_N * BLOCK_N
    full_low = tl.maximum(tl.cdiv(full_low, BLOCK_N) * BLOCK_N, low)
    full_high = tl.maximum(full_high, 0) // BLOCK_N * BLOCK_N
    full_low = tl.minimum(full_low, tl.cdiv(high, BLOCK_N) * BLOCK_N)
    full_high = tl.maximum(full_high, full_low)
    return low, full_low, full_high, high


@triton.jit
def query_span(
    first_n, T, S, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Queries `[low, high)` that see any key of a tile, and `[full_low, full_high)` that see all of them.

    As `key_span` with the sides exchanged: multiples of BLOCK_M except `high`, which may be T. A full tile may
    hold rows past T: they need no mask when their log-sum-exp is loaded as +infinity. A tile with keys past S is
    never full.
    """
    shift = S - T
    last_n = tl.minimum(first_n + BLOCK_N, S) - 1
    low = 0
    high = T
    full_low = 0
    full_high = T
    if CAUSAL:
        low = tl.maximum(low, first_n - shift)
        full_low = tl.maximum(full_low, last_n - shift)
    if WINDOWED:
        high = tl.minimum(high, last_n + window - shift)
        full_high = tl.minimum(full_high, first_n + window - shift)
        if not CAUSAL:
            low = tl.maximum(low, first_n - window + 1 - shift)
            full_low = tl.maximum(full_low, last_n - window + 1 - shift)
    high = tl.maximum(high, 0)
    low = tl.minimum(low, high) // BLOCK_M * BLOCK_M
    full_low = tl.maximum(tl.cdiv(full_low, BLOCK_M) * BLOCK_M, low)
    # The last tile counts as full when its queries up to T do.
    full_high = tl.where(full_high >= T, tl.cdiv(T, BLOCK_M), tl.maximum(full_high, 0) // BLOCK_M) * BLOCK_M
    full_low = tl.minimum(full_low, tl.cdiv(high, BLOCK_M) * BLOCK_M)
    full_high = tl.where(first_n + BLOCK_N > S, full_low, tl.maximum(full_high, full_low))
    return low, full_low, full_high, high


@triton.jit
def span_kernel(
    span_ptr, index_ptr, segment_ptr, row_stride, length,
    other_index_ptr, other_segment_ptr, other_row_stride, other_length, window,
    QUERIES: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr, OTHER_BLOCK: tl.constexpr, OTHER_TILES: tl.constexpr,
):  # fmt: skip
    """For a tile of one side, the first and one past the last tile of the other side that it may see."""
    own_tiles = tl.cdiv(length, BLOCK)
    tile = tl.program_id(0) % own_tiles
    row = (tl.program_id(0) // own_tiles).to(tl.int64)
    here, here_segment = load_places(
        index_ptr, segment_ptr, row * row_stride, tile * BLOCK + tl.arange(0, BLOCK), length, 0, True
    )
    real = here_segment >= 0
    huge: tl.constexpr = 1 << 62
    here_low = tl.min(tl.where(real, here, huge))
    here_high = tl.max(tl.where(real, here, -huge))
    segment_low = tl.min(tl.where(real, here_segment, huge))
    segment_high = tl.max(tl.where(real, here_segment, -1))
    tiles = tl.cdiv(other_length, OTHER_BLOCK)
    low = tiles
    high = 0
    for first in range(0, tiles, OTHER_TILES):
        at = first + tl.arange(0, OTHER_TILES)
        offsets = at[:, None] * OTHER_BLOCK + tl.arange(0, OTHER_BLOCK)[None, :]
        there, there_segment = load_places(
            other_index_ptr, other_segment_ptr, row * other_row_stride, offsets, other_length, 0, True
        )
        meets = (there_segment >= segment_low) & (there_segment <= segment_high)
        if CAUSAL:
            meets &= (there <= here_high) if QUERIES else (there >= here_low)
        if WINDOWED:
            meets &= (there > here_low - window) if QUERIES else (there < here_high + window)
            if not CAUSAL:
                meets &= (there < here_high + window) if QUERIES else (there > here_low - window)
        any_meets = tl.max(meets.to(tl.int32), 1) > 0
        low = tl.minimum(low, tl.min(tl.where(any_meets, at, tiles)))
        high = tl.maximum(high, tl.max(tl.where(any_meets, at + 1, 0)))
    at_span = (row * own_tiles + tile) * 2
    tl.store(span_ptr + at_span, tl.minimum(low, high))
    tl.store(span_ptr + at_span + 1, high)


@dataclass(frozen=True)
class Places:
    """Positions of both sides as int64 `[B | 1, T]` and `[B | 1, S]`, all given."""

    q_index: Tensor
    q_segment: Tensor
    k_index: Tensor
    k_segment: Tensor

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, q_index: Tensor | None, q_segment: Tensor | None,
        k_index: Tensor | None, k_segment: Tensor | None,
    ) -> "Places | None":  # fmt: skip
        """None when nothing is given; otherwise what is missing is filled in as the static path has it."""
        given = (q_index, q_segment, k_index, k_segment)
        if all(x is None for x in given):
            return None
        queries, keys, device = q.shape[2], k.shape[2], q.device
        rows = max(x.shape[0] for x in given if x is not None)
        if q_index is None:
            q_index = torch.arange(keys - queries, keys, device=device)[None]
        if k_index is None:
            k_index = torch.arange(keys, device=device)[None]
        if q_segment is None:
            q_segment = torch.zeros(1, queries, dtype=torch.int64, device=device)
        if k_segment is None:
            k_segment = torch.zeros(1, keys, dtype=torch.int64, device=device)
        full = (x.expand(rows, -1).contiguous() for x in (q_index, q_segment, k_index, k_segment))
        return cls(*full)

    def of_rows(self, rows: slice) -> "Places":
        """The places of some rows of the batch."""
        if self.q_index.shape[0] == 1:
            return self
        return Places(*(x[rows] for x in (self.q_index, self.q_segment, self.k_index, self.k_segment)))

    @property
    def row_strides(self) -> tuple[int, int]:
        """Elements between the rows of the query and key places; 0 where one row serves the batch."""
        shared = self.q_index.shape[0] == 1
        return (0 if shared else self.q_index.shape[1], 0 if shared else self.k_index.shape[1])

    def key_spans(self, block_m: int, block_n: int, *, causal: bool, window: int | None) -> Tensor:
        """int32 `[rows, query tiles, 2]`: the key tiles that each query tile may see."""
        here, there = (self.q_index, self.q_segment), (self.k_index, self.k_segment)
        return _spans(here, there, block_m, block_n, queries=True, causal=causal, window=window)

    def query_spans(self, block_m: int, block_n: int, *, causal: bool, window: int | None) -> Tensor:
        """int32 `[rows, key tiles, 2]`: the query tiles that may see each key tile."""
        here, there = (self.k_index, self.k_segment), (self.q_index, self.q_segment)
        return _spans(here, there, block_n, block_m, queries=False, causal=causal, window=window)


def _spans(
    here: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor], block: int, other_block: int,
    *, queries: bool, causal: bool, window: int | None,
) -> Tensor:  # fmt: skip
    rows, length = here[0].shape
    other_length = there[0].shape[1]
    tiles = ceil_div(length, block)
    spans = torch.empty(rows, tiles, 2, dtype=torch.int32, device=here[0].device)
    span_kernel[(tiles * rows,)](
        spans, *here, length, length, *there, other_length, other_length, window or 0,
        QUERIES=queries, CAUSAL=causal, WINDOWED=window is not None,
        BLOCK=block, OTHER_BLOCK=other_block, OTHER_TILES=max(1, 2048 // other_block),
    )  # fmt: skip
    return spans


def bounded(window: int | None, q: Tensor, k: Tensor, positions: Iterable[Tensor | None]) -> int | None:
    """The window; without positions, whose arithmetic is int32's, one that hides as little and adds up there."""
    if window is None or any(x is not None for x in positions):
        return window
    return min(window, q.shape[2] + k.shape[2])


def describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of x `[B, H, T, D]` whose loads are `[1, 1, rows, columns]`, zero outside.

    Reads x in place when its strides allow the copy engine (unit last stride, the others positive multiples
    of 16 bytes, 16-byte aligned start); otherwise a contiguous copy.
    """
    shape, strides, width = list(x.shape), list(x.stride()), 16 // x.element_size()
    for axis in range(3):
        if shape[axis] == 1:
            strides[axis] = shape[2] * shape[3]
    regular = strides[3] == 1 and all(s > 0 and s % width == 0 for s in strides[:3])
    if not regular or x.data_ptr() % 16:
        x = torch.nn.functional.pad(x, (0, -shape[3] % width)).contiguous()
        strides = [x.shape[1:].numel(), x.shape[2:].numel(), x.shape[3], 1]
        shape[3] = x.shape[3]
    return TensorDescriptor(x, shape, strides, [1, 1, rows, columns])


def ceil_div(a: int, b: int) -> int:
    """`triton.cdiv` for numbers; that of Triton, which serves its compiler too, takes microseconds."""
    return -(-a // b)


def power_of_two(at_least: int) -> int:
    """The smallest power of two that holds a number from 1."""
    return 1 << (at_least - 1).bit_length()


def block_width(width: int) -> int:
    """The power of two, at least 16, that holds a head dimension."""
    return max(16, power_of_two(width))
