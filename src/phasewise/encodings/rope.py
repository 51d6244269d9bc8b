"""RoPE: pairs of channels turn with position (Su et al., 2021), wholly or in part."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from phasewise.encodings.base import EncodingConfig, check_size, one_axis, working_dtype
from phasewise.encodings.spectral import STANDARD, Spectral
from phasewise.frequencies import AnyFrequencies, Frequencies


class RoPEConfig(EncodingConfig):
    """Settings of RoPE: the rule that gives its rates, and the share of channels that turn."""

    kind: Literal["rope"] = "rope"
    frequencies: AnyFrequencies = STANDARD
    fraction: float = Field(default=1.0, gt=0.0, le=1.0)

    def build(self, *, num_heads: int, head_dim: int) -> RoPE:
        return RoPE(head_dim=head_dim, frequencies=self.frequencies, fraction=self.fraction)


class RoPE(Spectral):
    """score(t, s) = d^-1/2 sum_c q_tc . R((s - t) theta_c) k_sc over pairs c, theta_c = base^(-c/n), n pairs.

    Pairs are half-split (Hugging Face): channel c turns with channel c + n. With `fraction` below 1 only
    the first fraction * head_dim channels turn (partial rotation); p-RoPE is `frequencies=Proportional(...)`.

    Raises ValueError when the number of turning channels is odd. Source: Su et al., arXiv 2104.09864, eq. 34.

    >>> RoPE(head_dim=64, fraction=0.5).channels
    16
    """

    kind: ClassVar[str] = "rope"

    def __init__(self, *, head_dim: int, frequencies: Frequencies = STANDARD, fraction: float = 1.0) -> None:
        config = RoPEConfig(frequencies=frequencies, fraction=fraction)  # type: ignore[arg-type]
        check_size("head_dim", head_dim, least=2)
        turning = int(head_dim * config.fraction)
        if turning < 2 or turning % 2:
            raise ValueError(
                f"RoPE turns channels in pairs: head_dim {head_dim} x fraction {config.fraction} gives {turning}; "
                "choose them so that this is even and at least 2"
            )
        super().__init__(config.frequencies, channels=turning // 2)
        self.head_dim = head_dim
        self._config = config

    @property
    def config(self) -> RoPEConfig:
        return self._config

    def check(self, num_heads: int, head_dim: int, axes: int) -> None:
        one_axis("RoPE", axes)
        if head_dim != self.head_dim:
            raise ValueError(
                f"this RoPE has head_dim {self.head_dim}, but q and k are {head_dim} wide; use head_dim={head_dim}"
            )

    def turn_queries(self, q: Tensor, angle: Tensor, gain: Tensor | float) -> Tensor:
        return self._turn(q, angle, gain)

    def turn_keys(self, k: Tensor, angle: Tensor) -> Tensor:
        return self._turn(k, angle, 1.0)

    def _turn(self, x: Tensor, angle: Tensor, gain: Tensor | float) -> Tensor:
        n = self.channels
        wide = x.to(working_dtype(x.dtype))
        first, second, rest = wide[..., :n], wide[..., n : 2 * n], x[..., 2 * n :]
        cos, sin = (angle.cos() * gain)[:, None], (angle.sin() * gain)[:, None]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
