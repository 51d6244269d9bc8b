"""Which places of a row each of several processes holds."""

from dataclasses import dataclass
from typing import Literal, get_args, overload

import torch
from torch import Tensor

from phasewise.positions import Positions

Order = Literal["zigzag", "contiguous"]


@dataclass(frozen=True)
class Layout:
    """Which places of a row each of `size` processes holds; this one is number `rank`.

    order: "zigzag" cuts a row into 2n chunks and gives process r the chunks r and 2n - 1 - r, so that all have
    as much to attend to under a causal mask; "contiguous" gives process r the r-th of n.

    Raises ValueError for an unknown order.

    >>> layout = Layout(rank=1, size=2)
    >>> layout.chunks, layout.split(torch.arange(8)[None])
    ((1, 2), tensor([[2, 3, 4, 5]]))
    """

    rank: int
    size: int
    order: Order = "zigzag"

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(f"unknown order {self.order!r}; choose from {', '.join(get_args(Order))}")

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of a row that this process holds, in the order it holds them."""
        return self._chunks_of(self.rank)

    @property
    def count(self) -> int:
        """How many chunks a row is cut into, all of one length."""
        return self.size * len(self.chunks)

    @property
    def held(self) -> list[int]:
        """The chunks of a row as the processes hold them, one process after the other."""
        return [chunk for rank in range(self.size) for chunk in self._chunks_of(rank)]

    @overload
    def split(self, whole: Tensor, *, dim: int = 1) -> Tensor: ...
    @overload
    def split(self, whole: Positions) -> Positions: ...
    def split(self, whole: Tensor | Positions, *, dim: int = 1) -> Tensor | Positions:
        """What this process holds of tokens, targets or places of whole rows.

        Raises ValueError when their number does not divide into the chunks.
        """
        if isinstance(whole, Positions):
            return Positions(self.split(whole.index), self.split(whole.segment))
        length = whole.shape[dim]
        if length % self.count:
            raise ValueError(
                f"{length} places do not divide into {self.count} chunks, {len(self.chunks)} for each of "
                f"{self.size} processes; use a multiple of {self.count}, as "
                f"{max(length // self.count, 1) * self.count}"
            )
        width = length // self.count
        return torch.cat([whole.narrow(dim, chunk * width, width) for chunk in self.chunks], dim)

    def _chunks_of(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.size - 1 - rank) if self.order == "zigzag" else (rank,)
