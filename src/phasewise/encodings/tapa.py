"""TAPA: content and distance set the phase together (Wang et al., 2025)."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from phasewise.encodings.base import (
    EncodingConfig,
    Joint,
    check_size,
    distances,
    one_axis,
    products,
    working_dtype,
)
from phasewise.positions import Positions

PhaseForm = Literal["quadratic", "linear"]


class TAPAConfig(EncodingConfig):
    """Settings of TAPA; see `TAPA` for their meaning."""

    kind: Literal["tapa"] = "tapa"
    alpha: float = Field(default=0.1, ge=0.0, le=4.0)
    fraction: float = Field(default=0.5, gt=0.0, lt=1.0)
    phase: PhaseForm = "quadratic"
    two_pi: bool = True

    def build(self, *, num_heads: int, head_dim: int) -> TAPA:
        return TAPA(head_dim=head_dim, **self.model_dump(exclude={"kind"}))


class TAPA(Joint):
    """score(m, n) = (q_A . k_A)/sqrt(Da) cos(2 pi |m - n|^alpha (q_P . k_P)/sqrt(Dp)).

    The first Da = fraction * head_dim channels are the amplitude part A, the other Dp the phase part P.
    `phase="linear"` is the paper's ablation, (sum q_P + sum k_P)/sqrt(Dp). `two_pi=False` drops the 2 pi,
    as the authors' released kernel does. On the diagonal the distance power is 0, for alpha = 0 too.

    There are no parameters: the projections learn. The score is even in m - n, so without a causal mask it
    cannot tell left from right.

    Raises ValueError for alpha outside 0 to 4 (the paper's are below 1) or a fraction that gives no whole
    split. Source: Wang et al., arXiv 2509.12635.

    >>> TAPA(head_dim=64).amplitude_dim
    32
    """

    kind: ClassVar[str] = "tapa"

    def __init__(
        self,
        *,
        head_dim: int,
        alpha: float = 0.1,
        fraction: float = 0.5,
        phase: PhaseForm = "quadratic",
        two_pi: bool = True,
    ) -> None:
        super().__init__()
        self._config = TAPAConfig(alpha=alpha, fraction=fraction, phase=phase, two_pi=two_pi)
        check_size("head_dim", head_dim, least=2)  # amplitude and phase have channels of their own
        share = head_dim * self._config.fraction
        amplitude = round(share)
        if not math.isclose(amplitude, share, abs_tol=1e-6) or not 0 < amplitude < head_dim:
            raise ValueError(
                f"fraction {self._config.fraction} of head_dim {head_dim} is {share:g} amplitude channels; "
                f"choose one that leaves a whole number from 1 to {head_dim - 1}"
            )
        self.head_dim = head_dim
        self.amplitude_dim = amplitude
        self.phase_dim = head_dim - amplitude

    @property
    def config(self) -> TAPAConfig:
        return self._config

    def check(self, num_heads: int, head_dim: int, axes: int) -> None:
        one_axis("TAPA", axes)
        if head_dim != self.head_dim:
            raise ValueError(
                f"this TAPA has head_dim {self.head_dim}, but q and k are {head_dim} wide; use head_dim={head_dim}"
            )

    def scores(
        self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions, *, scale: float | None = None
    ) -> Tensor:
        amplitude = products(q[..., : self.amplitude_dim], k[..., : self.amplitude_dim])
        phase = self._phase(q[..., self.amplitude_dim :], k[..., self.amplitude_dim :])
        distance = distances(q_at, k_at)
        power = torch.where(distance == 0, 0.0, distance.to(phase.dtype).pow(self._config.alpha))
        turn = (2 * math.pi if self._config.two_pi else 1.0) * self.phase_dim**-0.5
        factor = self.amplitude_dim**-0.5 if scale is None else scale
        return amplitude * factor * torch.cos(turn * power * phase)

    def _phase(self, q: Tensor, k: Tensor) -> Tensor:
        if self._config.phase == "quadratic":
            return products(q, k)
        dtype = working_dtype(q.dtype)
        keys = k.to(dtype).sum(-1).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        return q.to(dtype).sum(-1)[..., None] + keys[:, :, None]
