"""NoPE: no positional encoding; order enters through the causal mask alone (Kazemnejad et al., 2023)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from phasewise.encodings.base import Encoding, EncodingConfig, products
from phasewise.positions import Positions


class NoPEConfig(EncodingConfig):
    """Settings of NoPE: it has none."""

    kind: Literal["nope"] = "nope"

    def build(self, *, num_heads: int, head_dim: int) -> NoPE:
        return NoPE()


class NoPE(Encoding):
    """score(t, s) = d^-1/2 q_t . k_s, whatever the places.

    Source: Kazemnejad et al., arXiv 2305.19466.

    >>> NoPE().config.model_dump()
    {'kind': 'nope'}
    """

    kind: ClassVar[str] = "nope"

    @property
    def config(self) -> NoPEConfig:
        return NoPEConfig()

    def check(self, num_heads: int, head_dim: int, axes: int) -> None:
        pass

    def scores(
        self,
        q: Tensor,
        k: Tensor,
        q_at: Positions,
        k_at: Positions,
        *,
        scale: float | None = None,
    ) -> Tensor:
        return products(q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)

    @property
    def separable(self) -> bool:
        return True

    def factors(
        self,
        q: Tensor,
        k: Tensor,
        q_at: Positions,
        k_at: Positions,
    ) -> tuple[Tensor, Tensor]:
        return q, k
