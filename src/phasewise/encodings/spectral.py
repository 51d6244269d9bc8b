"""What RoPE and PoPE share: channels that turn with position at the rates of a scaling rule.

Rules with one set of rates, and LongRoPE with two, separate into a query's and a key's part. Dynamic rules
change their rates with every position past the original length, so there each query turns the keys itself.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from phasewise.encodings.base import Encoding, angles, products, working_dtype
from phasewise.frequencies import Frequencies, LengthDependent
from phasewise.positions import Positions


class Spectral(Encoding):
    """An encoding with a spectrum. A query at position i uses the rates that its rule has at length i + 1.

    That is a property of the place, not of the call, so decoding, chunked prefill and a full pass agree
    for every rule. `frequencies.at(length, n)` is the rule with the rates of one length for all queries.
    """

    def __init__(self, frequencies: Frequencies, channels: int, axes: int = 1) -> None:
        super().__init__()
        if axes > 1 and isinstance(frequencies, LengthDependent):
            raise ValueError(
                f"{frequencies.kind} depends on the length served, which {axes} axes do not define; "
                "use a rule with fixed rates"
            )
        self.frequencies = frequencies
        self.channels = channels
        self.axes = axes
        self.rates(1 if isinstance(frequencies, LengthDependent) else None)

    @abstractmethod
    def turn_queries(self, q: Tensor, angle: Tensor, gain: float | Tensor) -> Tensor:
        """Queries [B, Hq, T, D] turned by `angle` [B or 1, T, n], what turns times `gain`: [B, Hq, T, E]."""

    @abstractmethod
    def turn_keys(self, k: Tensor, angle: Tensor) -> Tensor:
        """Keys [B, Hkv, S, D] turned by `angle` [B or 1, S, n]: [B, Hkv, S, E]."""

    def rates(self, length: int | None = None, device: torch.device | None = None) -> Tensor:
        """Radians per position of the channels of one axis, float64 [n / axes], at the rates of `length`."""
        n = self.channels // self.axes
        if isinstance(self.frequencies, LengthDependent):
            assert length is not None
            return self.frequencies.per_length(torch.full((), length, device=device), n)[0]
        return self.frequencies.rates(n, device=device)

    def phases(self, at: Positions, dtype: torch.dtype, *, length: int | None = None) -> Tensor:
        """The angle of every channel at every place, [B or 1, T, n] in [-pi, pi], at the rates of `length`."""
        rates = self.rates(length, at.device)
        if self.axes == 1:
            return angles(at.index, rates, dtype=dtype)
        return torch.cat([angles(at.index[..., axis], rates, dtype=dtype) for axis in range(self.axes)], dim=-1)

    def gain(self, length: int | None = None) -> float:
        """What the rule multiplies the scores of turning channels with: its attention factor squared."""
        return self.frequencies.attention_factor(self.channels // self.axes, length=length) ** 2

    def separable(self, length: int) -> bool:  # noqa: ARG002
        return self.frequencies.regimes is not None

    def factors(self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions) -> tuple[Tensor, Tensor] | None:
        dtype = working_dtype(q.dtype)
        regimes = self.frequencies.regimes
        if regimes is None:
            return None
        if len(regimes) == 1:
            q_angle = self.phases(q_at, dtype)
            k_angle = q_angle if k_at is q_at else self.phases(k_at, dtype)
            return self.turn_queries(q, q_angle, self.gain()), self.turn_keys(k, k_angle)
        queries, keys = [], []
        length = (q_at.index + 1).clamp(min=1)
        for first, last in regimes:
            inside = length >= first if last is None else (length >= first) & (length <= last)
            turned = self.turn_queries(q, self.phases(q_at, dtype, length=first), self.gain(first))
            queries.append(turned * inside[:, None, :, None])
            keys.append(self.turn_keys(k, self.phases(k_at, dtype, length=first)))
        return torch.cat(queries, dim=-1), torch.cat(keys, dim=-1)

    def scores(
        self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions, *, scale: float | None = None
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        separated = self.factors(q, k, q_at, k_at)
        return (self._scores_by_length(q, k, q_at, k_at) if separated is None else products(*separated)) * scale

    def _scores_by_length(self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions) -> Tensor:
        """Scores where each query turns itself and every key at the rates of its own length."""
        assert isinstance(self.frequencies, LengthDependent)
        dtype = working_dtype(q.dtype)
        rates, factor = self.frequencies.per_length((q_at.index + 1).clamp(min=1), self.channels)
        gain = factor.square().to(dtype)[:, None, :, None]
        turned = self.turn_queries(q, angles(q_at.index, rates, dtype=dtype), gain)
        columns = []
        for place in range(q_at.length):
            keys = self.turn_keys(k, angles(k_at.index, rates[:, place : place + 1], dtype=dtype))
            columns.append(products(turned[:, :, place : place + 1], keys))
        return torch.cat(columns, dim=2)
