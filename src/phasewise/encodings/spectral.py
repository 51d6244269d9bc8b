"""What RoPE and PoPE share: channels that turn with position at the rates of a scaling rule.

Rules with one set of rates, and LongRoPE with two, separate into a query's and a key's part. Dynamic rules
change their rates with every position past the original length, so there each query turns the keys itself.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from phasewise.encodings.base import Encoding, angles, products, recomputed, working_dtype
from phasewise.frequencies import Continuous, Frequencies, Geometric, Static
from phasewise.positions import Positions

STANDARD = Geometric(base=10_000.0)  # the rates of both papers
TURNED_AT_ONCE = 2**20  # elements of keys, each turned for several queries


class Spectral(Encoding):
    """An encoding with a spectrum. A query at position i uses the rates that its rule has at length i + 1.

    That is a property of the place, not of the call, so decoding, chunked prefill and a full pass agree
    for every rule. `frequencies.at(length, n)` is the rule with the rates of one length for all queries.
    """

    def __init__(self, frequencies: Frequencies, channels: int, axes: int = 1) -> None:
        super().__init__()
        if axes > 1 and frequencies.depends_on_length:
            raise ValueError(
                f"{frequencies.kind} depends on the length served, which {axes} axes do not define; "
                "use a rule with fixed rates"
            )
        self.frequencies = frequencies
        self.channels = channels
        self.axes = axes
        with torch.device("cpu"):  # a rule is numbers, also where a model is built on the meta device
            frequencies.at(1, channels // axes).rates(channels // axes)  # raises where the rule does not fit
            self.regimes = [
                (first, last, frequencies.at(first, channels // axes))
                for first, last in frequencies.regimes or ()
            ]

    @abstractmethod
    def turn_queries(self, q: Tensor, angle: Tensor, gain: Tensor | float) -> Tensor:
        """Queries [B, Hq, T, D] turned by `angle` [B or 1, T, n], what turns times `gain`: [B, Hq, T, E].

        gain: a number, or one for each place, [B or 1, T, 1].
        """

    @abstractmethod
    def turn_keys(self, k: Tensor, angle: Tensor) -> Tensor:
        """Keys [B, Hkv, S, D] turned by `angle` [B or 1, S, n]: [B, Hkv, S, E]."""

    def phases(self, index: Tensor, rule: Static, dtype: torch.dtype = torch.float32) -> Tensor:
        """The angle of every channel at places `index`, [B or 1, T, n] in [-pi, pi], at the rates of `rule`."""
        rates = rule.rates(self.channels // self.axes, device=index.device)
        if self.axes == 1:
            return angles(index, rates, dtype=dtype)
        return torch.cat([angles(along, rates, dtype=dtype) for along in index.unbind(-1)], dim=-1)

    def gain(self, rule: Static) -> float:
        """What a rule multiplies the scores of turning channels with: its attention factor squared."""
        return rule.attention_factor(self.channels // self.axes) ** 2

    @property
    def separable(self) -> bool:
        return len(self.regimes) > 0

    def factors(self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions) -> tuple[Tensor, Tensor] | None:
        if not self.regimes:
            return None
        dtype = working_dtype(q.dtype)
        length = (q_at.index[..., 0] if self.axes > 1 else q_at.index).clamp(min=0) + 1
        queries, keys = [], []
        for first, last, rule in self.regimes:
            q_angle = self.phases(q_at.index, rule, dtype)
            turned = self.turn_queries(q, q_angle, self.gain(rule))
            if len(self.regimes) > 1:
                inside = length >= first if last is None else (length >= first) & (length <= last)
                turned = turned * inside[:, None, :, None]
            queries.append(turned)
            keys.append(self.turn_keys(k, q_angle if k_at is q_at else self.phases(k_at.index, rule, dtype)))
        return (queries[0], keys[0]) if len(queries) == 1 else (torch.cat(queries, -1), torch.cat(keys, -1))

    def scores(
        self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions, *, scale: float | None = None
    ) -> Tensor:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        separated = self.factors(q, k, q_at, k_at)
        if separated is not None:
            return products(*separated) * factor
        return self._scores_by_length(q, k, q_at, k_at) * factor

    def _scores_by_length(self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions) -> Tensor:
        """Scores where each query turns itself and every key at its own rates, some queries at a time."""
        rule = self.frequencies
        assert isinstance(rule, Continuous), "all other rules separate"
        dtype, length = working_dtype(q.dtype), q.shape[2]

        def some(q: Tensor, k: Tensor, first: int) -> Tensor:
            queries = q.shape[2]
            index = q_at.narrow(first, queries).index
            rates, weight = rule.along(index.clamp(min=0)[..., None] + 1, self.channels)
            gain = (weight**2).to(dtype)
            turned = self.turn_queries(q, angles(index, rates, dtype=dtype), gain)
            angle = angles(k_at.index[:, None], rates[:, :, None], dtype=dtype).expand(len(q), -1, -1, -1)
            keys = k[:, None].expand(-1, queries, -1, -1, -1).flatten(0, 1)
            turned = turned.transpose(1, 2).flatten(0, 1)[:, :, None]
            scores = products(turned, self.turn_keys(keys, angle.flatten(0, 1)))
            return scores[:, :, 0].unflatten(0, (len(q), queries)).transpose(1, 2)

        def part(first: int, last: int) -> Tensor:
            return recomputed(
                some, q[:, :, first:last], k, first
            )  # it would hold the keys turned for every query

        if length * k.numel() <= TURNED_AT_ONCE:  # apart: torch.compile unrolls a loop, one for each length
            return part(0, length)
        size = max(1, TURNED_AT_ONCE // k.numel())
        return torch.cat([part(first, first + size) for first in range(0, length, size)], dim=2)
