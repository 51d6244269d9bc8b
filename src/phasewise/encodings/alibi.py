"""ALiBi: a penalty linear in distance, steeper in some heads than in others (Press et al., 2021)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from phasewise.encodings.base import EncodingConfig, Joint, check_size, distances, one_axis, products
from phasewise.positions import Positions


class ALiBiConfig(EncodingConfig):
    """Settings of ALiBi: it has none; the slopes follow from the number of heads."""

    kind: Literal["alibi"] = "alibi"

    def build(self, *, num_heads: int, head_dim: int) -> ALiBi:
        return ALiBi(num_heads=num_heads)


class ALiBi(Joint):
    """score(t, s) = d^-1/2 q_t . k_s - m_h |t - s|, slopes m_h = 2^(-8h/H) for h = 1..H heads.

    For H no power of two: the slopes of the power below it, then every other slope of the power above it,
    as the authors do. Source: Press et al., arXiv 2108.12409.

    >>> ALiBi(num_heads=4).slopes().tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """

    kind: ClassVar[str] = "alibi"

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        check_size("num_heads", num_heads)
        self.num_heads = num_heads

    @property
    def config(self) -> ALiBiConfig:
        return ALiBiConfig()

    def slopes(self, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The slope of each head, [H]."""
        whole = 2 ** math.floor(math.log2(self.num_heads))
        head = torch.arange(self.num_heads, device=device, dtype=torch.float64)
        exponents = torch.where(head < whole, 8 * (head + 1), 4 * (2 * (head - whole) + 1)) / -whole
        return torch.exp2(exponents).to(dtype)

    def check(self, num_heads: int, head_dim: int, axes: int) -> None:
        one_axis("ALiBi", axes)
        if num_heads != self.num_heads:
            raise ValueError(
                f"this ALiBi has {self.num_heads} heads, but q has {num_heads}; use ALiBi(num_heads={num_heads})"
            )

    def penalty(self, q_at: Positions, k_at: Positions, dtype: torch.dtype) -> Tensor:
        """m_h |t - s| as `dtype` [B or 1, H, T, S]."""
        return distances(q_at, k_at).to(dtype) * self.slopes(device=q_at.device, dtype=dtype)[:, None, None]

    def scores(
        self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions, *, scale: float | None = None
    ) -> Tensor:
        scores = products(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return scores - self.penalty(q_at, k_at, scores.dtype)
