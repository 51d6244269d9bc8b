"""Where tokens are: positions and segments, and which keys a query may see.

Letters: B batch rows, T places (queries), S places (keys), A axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

PADDING = -1
FURTHEST = 2**62  # of windows and places: two of them still fit int64


@dataclass(frozen=True, eq=False)
class Positions:
    """The places of a batch of tokens: an integer position and the segment (document) it belongs to.

    Visibility and phase follow from these values alone, never from a token's index in a tensor, so
    decoding, chunked prefill, padding on either side and packed documents need no rules of their own.

    index: int64 [B, T], or [B, T, A] for tokens on A axes (images, video). B may be 1 and then serves
        every row of a batch.
    segment: int64 [B, T]; tokens see each other only inside one segment; -1 marks padding.

    Raises ValueError for another dtype or shape.

    >>> Positions.packed([3, 2]).index.tolist()
    [[0, 1, 2, 0, 1]]
    """

    index: Tensor
    segment: Tensor

    def __post_init__(self) -> None:
        for name, value in (("index", self.index), ("segment", self.segment)):
            _check_tensor(name, value)
            if value.dtype != torch.int64:
                raise ValueError(
                    f"positions must be int64, but {name} is {value.dtype}; use .to(torch.int64)"
                )
        if self.index.ndim not in (2, 3):
            raise ValueError(
                f"index must be [B, T] or [B, T, axes], but has shape {tuple(self.index.shape)}; "
                "add a batch dimension with index[None]"
            )
        if self.index.ndim == 3 and self.index.shape[2] == 1:
            raise ValueError("index of one axis is [B, T], but has shape [B, T, 1]; use index[..., 0]")
        if self.segment.shape != self.index.shape[:2]:
            raise ValueError(
                f"segment must have the shape {tuple(self.index.shape[:2])} of the places, "
                f"but has {tuple(self.segment.shape)}"
            )
        if self.segment.device != self.index.device:
            raise ValueError(
                f"index is on {self.index.device}, segment on {self.segment.device}; move both to one device"
            )

    @classmethod
    def arange(cls, length: int, *, start: int = 0, device: torch.device | str | None = None) -> Positions:
        """`length` consecutive places from `start`, one row, one segment; ValueError for a length below 0."""
        (length,), start = _counts("length", [length]), plain(start)
        if not is_whole(start):
            raise ValueError(f"start must be a whole number, but is {start!r}; give an int, as 128")
        _check_reach("start", start)
        index = torch.arange(start, start + length, device=device)[None]
        return cls(index, torch.zeros_like(index))

    @classmethod
    def packed(cls, lengths: Sequence[int], *, device: torch.device | str | None = None) -> Positions:
        """One row that holds several documents end to end: positions restart, segments count up.

        Raises ValueError for lengths that are no whole numbers from 0.

        >>> Positions.packed([2, 3]).segment.tolist()
        [[0, 0, 1, 1, 1]]
        """
        boundaries = [0, *accumulate(_counts("document lengths", lengths))]
        return cls.cu_seqlens(torch.tensor(boundaries, dtype=torch.int64, device=device), boundaries[-1])

    @classmethod
    def cu_seqlens(cls, boundaries: Tensor, length: int) -> Positions:
        """`packed` from the boundaries that FlashAttention's functions of variable length take.

        boundaries: int32 or int64 [documents + 1], not falling: document n holds the places from boundaries[n]
            up to boundaries[n + 1]. Of `length` places those outside of all documents are padding. Values are
            not read on the host, so none are checked.

        Raises ValueError for another dtype or shape.

        >>> Positions.cu_seqlens(torch.tensor([0, 2, 5], dtype=torch.int32), 6).segment.tolist()
        [[0, 0, 1, 1, 1, -1]]
        """
        (length,) = _counts("length", [length])
        _check_tensor("boundaries", boundaries)
        if boundaries.dtype not in (torch.int32, torch.int64) or boundaries.ndim != 1 or len(boundaries) == 0:
            raise ValueError(
                "boundaries must be int32 or int64 [documents + 1], but are "
                f"{boundaries.dtype} {list(boundaries.shape)}"
            )
        starts = boundaries.to(torch.int64).contiguous()  # torch.searchsorted warns of others
        place = torch.arange(length, device=boundaries.device)
        document = torch.searchsorted(starts, place, right=True) - 1
        inside = (document >= 0) & (place < starts[-1])
        index = place - starts[document.clamp(min=0)]
        return cls((index * inside)[None], torch.where(inside, document, PADDING)[None])

    @classmethod
    def padded(cls, mask: Tensor) -> Positions:
        """Places of a padded batch; `mask` is [B, T], True (or 1) at real tokens, padding on either side.

        >>> Positions.padded(torch.tensor([[0, 0, 1, 1]])).index.tolist()
        [[0, 0, 0, 1]]
        """
        check_mask(mask)
        if mask.ndim != 2:
            raise ValueError(f"mask must be [B, T], but has shape {tuple(mask.shape)}")
        real = mask.bool()
        index = (real.cumsum(1) - 1).clamp(min=0)
        return cls(index * real, torch.where(real, 0, PADDING))

    @classmethod
    def grid(cls, shape: Sequence[int], *, device: torch.device | str | None = None) -> Positions:
        """Every cell of a grid in raster order (last axis fastest): index [1, prod(shape), A]; A above 1.

        >>> Positions.grid([2, 2]).index.tolist()
        [[[0, 0], [0, 1], [1, 0], [1, 1]]]
        """
        shape = _counts("shape", shape)
        if len(shape) < 2:
            raise ValueError(f"shape is {list(shape)}; give the size of each axis, as (rows, columns)")
        axes = torch.meshgrid(*(torch.arange(size, device=device) for size in shape), indexing="ij")
        index = torch.stack(axes, dim=-1).reshape(1, prod(shape), len(shape))
        return cls(index, torch.zeros(index.shape[:2], dtype=torch.int64, device=device))

    @classmethod
    def after(cls, past: Positions, length: int) -> Positions:
        """`length` places that continue each row of `past` from its last real token, in its segment.

        A row without real tokens starts at position 0 of segment 0.

        >>> Positions.after(Positions.padded(torch.tensor([[0, 1, 1]])), 2).index.tolist()
        [[2, 3]]
        """
        check_places("past", past)
        if past.axes != 1:
            raise ValueError(f"places on {past.axes} axes have no single continuation; give the next places")
        if past.length == 0:
            raise ValueError("an empty past has nothing to continue; use Positions.arange(length)")
        (length,) = _counts("length", [length])
        place = torch.arange(1, past.length + 1, device=past.device)
        last = torch.where(past.segment >= 0, place, 0).amax(1, keepdim=True)
        row = (last - 1).clamp(min=0)
        start = torch.where(last > 0, past.index.gather(1, row) + 1, 0)
        segment = torch.where(last > 0, past.segment.gather(1, row), 0)
        return cls(start + torch.arange(length, device=past.device), segment.expand(-1, length).contiguous())

    @classmethod
    def cat(cls, first: Positions, second: Positions) -> Positions:
        """The places of `first` followed by those of `second`, row by row."""
        check_places("first", first)
        check_places("second", second)
        if first.axes != second.axes:
            raise ValueError(
                f"places on {first.axes} and on {second.axes} axes do not join; give both on the same axes"
            )
        if first.device != second.device:
            raise ValueError(
                f"first is on {first.device}, but second on {second.device}; use .to(device) of one"
            )
        rows = max(first.batch, second.batch)
        first, second = first.expand(rows), second.expand(rows)
        return cls(
            torch.cat([first.index, second.index], dim=1), torch.cat([first.segment, second.segment], dim=1)
        )

    @property
    def batch(self) -> int:
        return self.index.shape[0]

    @property
    def length(self) -> int:
        return self.index.shape[1]

    @property
    def axes(self) -> int:
        return 1 if self.index.ndim == 2 else self.index.shape[2]

    @property
    def device(self) -> torch.device:
        return self.index.device

    def narrow(self, start: int, length: int) -> Positions:
        """The places `start` to `start + length` of every row; ValueError beyond the last place."""
        start, length = plain(start), plain(length)
        if not (is_whole(start) and is_whole(length) and 0 <= start <= start + length <= self.length):
            raise ValueError(
                f"places {start} to {start + length} are not all among the {self.length} there are; ask for fewer"
            )
        return Positions(self.index.narrow(1, start, length), self.segment.narrow(1, start, length))

    def rows(self, rows: slice) -> Positions:
        """The places of some rows of the batch."""
        return Positions(self.index[rows], self.segment[rows])

    def expand(self, rows: int) -> Positions:
        """The same places for `rows` rows (a view); raises ValueError unless there is one row or `rows`."""
        (rows,) = _counts("rows", [rows])
        if self.batch not in (1, rows):
            raise ValueError(f"positions of {self.batch} rows cannot serve {rows}; give 1 row or {rows}")
        return Positions(
            self.index.expand(rows, *self.index.shape[1:]), self.segment.expand(rows, self.length)
        )

    def to(self, device: torch.device | str) -> Positions:
        """The same places on another device."""
        return Positions(self.index.to(device), self.segment.to(device))


def visible(q_at: Positions, k_at: Positions, *, causal: bool = True, window: int | None = None) -> Tensor:
    """Which keys each query sees, from their places alone: bool [B or 1, T, S].

    A key is visible when it is in the query's segment, not after the query (causal; on several axes
    "after" is raster order), and at a distance below `window`, which counts the query itself.

    Raises ValueError for places that do not fit each other, a window below 1 or above 2^62, or one on several axes.

    >>> visible(Positions.arange(2), Positions.arange(2)).int().tolist()
    [[[1, 0], [1, 1]]]
    """
    check_view(q_at, k_at, window)
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, but is {causal!r}")
    same = q_at.segment[:, :, None] == k_at.segment[:, None, :]
    mask = same & (q_at.segment >= 0)[:, :, None]
    if causal:
        mask = mask & _not_after(q_at.index, k_at.index)
    if window is not None:
        query, key = q_at.index[:, :, None], k_at.index[:, None, :]
        mask = mask & (key > query - window) & (key < query + window)
    return mask


def is_whole(value: object) -> bool:
    """Whether a value is a whole number: an int, numpy's or one that torch.export traces, no bool."""
    return isinstance(value, int | np.integer | torch.SymInt) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """A whole number of numpy's as Python's, since sums of numpy's are cut to its width; all else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, but is {type(value).__name__}; use torch.as_tensor")


def check_mask(mask: Any) -> None:
    """Raise ValueError unless `mask` can say which tokens are real; one that is added to scores has 0 there."""
    _check_tensor("mask", mask)
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"mask must be bool, or int with 1 at real tokens, but is {mask.dtype}; use mask.bool(), or, "
            "of one that is added to scores, mask == 0"
        )


def check_places(name: str, value: object) -> None:
    """Raise ValueError unless a value is `Positions`."""
    if not isinstance(value, Positions):
        raise ValueError(
            f"{name} must be Positions, but is {type(value).__name__}; use Positions(index, segment)"
        )


def _counts(name: str, counts: Iterable[int]) -> list[int]:
    """Whole numbers from 0, as Python's; ValueError for others."""
    if isinstance(counts, Tensor):
        raise ValueError(f"{name} must be whole numbers, but is a tensor; use .tolist()")
    if not isinstance(counts, Iterable):
        raise ValueError(f"{name} must be whole numbers, but is {counts!r}; give a list of them")
    given = [plain(count) for count in counts]
    if not all(is_whole(count) and count >= 0 for count in given):
        raise ValueError(f"{name} must be whole numbers from 0, but is {given}")
    _check_reach(name, *given)
    return given


def _check_reach(name: str, *values: int) -> None:
    """Raise ValueError for a number so far from 0 that places do not hold it; one that is traced has no value yet."""
    if any(isinstance(value, int) and abs(value) > FURTHEST for value in values):
        raise ValueError(f"{name} must be at most {FURTHEST} from 0, but is {', '.join(map(str, values))}")


def check_view(q_at: Positions, k_at: Positions, window: int | None) -> None:
    """Raise ValueError unless places of queries and keys fit each other, and `window` is one they can have."""
    check_places("q_at", q_at)
    check_places("k_at", k_at)
    if q_at.device != k_at.device:
        raise ValueError(f"q_at is on {q_at.device}, but k_at on {k_at.device}; use .to(device) of one")
    if q_at.batch != k_at.batch and 1 not in (q_at.batch, k_at.batch):
        raise ValueError(
            f"q_at places {q_at.batch} rows and k_at {k_at.batch}; give as many, or 1 that serves all"
        )
    if q_at.axes != k_at.axes:
        raise ValueError(
            f"queries are on {q_at.axes} axes and keys on {k_at.axes}; give both on the same axes"
        )
    check_window(window, q_at.axes)


def check_window(window: int | None, axes: int) -> None:
    """Raise ValueError unless `window` is one that positions on that many axes can have."""
    if window is not None and not is_whole(window):
        raise ValueError(f"window must be a whole number of places, but is {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, the query itself, but is {window}; None sees all")
    if window is not None and window > FURTHEST:
        raise ValueError(f"window must be at most {FURTHEST}, but is {window}; None sees all")
    if window is not None and axes != 1:
        raise ValueError(f"a window is defined on one axis, but the positions have {axes}; use window=None")


def _not_after(q_index: Tensor, k_index: Tensor) -> Tensor:
    if q_index.ndim == 2:
        return k_index[:, None, :] <= q_index[:, :, None]
    query, key = q_index[:, :, None, :], k_index[:, None, :, :]
    not_after = key[..., -1] <= query[..., -1]
    for axis in range(q_index.shape[2] - 2, -1, -1):
        earlier, level = key[..., axis] < query[..., axis], key[..., axis] == query[..., axis]
        not_after = earlier | (level & not_after)
    return not_after
