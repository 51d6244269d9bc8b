"""How much energy each frequency carries in the scores of a layer, from its queries and keys alone.

Channel c of a query and a key adds A_c cos(theta_c r - phi) to the raw score at distance r, and
A_c^2 = |q_c|^2 |k_c|^2 whatever the places: c is a pair for RoPE and one channel's magnitude for PoPE. So a
pass over the tokens is enough, in memory O(tokens x D), and scores of all with all are never made.
Letters: B rows, T tokens, Hq and Hkv query and key heads, n frequencies, p numbers a channel (2 for pairs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phasewise.encodings import PoPE, RoPE
from phasewise.encodings.base import working_dtype
from phasewise.encodings.spectral import Spectral
from phasewise.model.reading import Layer
from phasewise.positions import Positions, visible

CHUNK = 1024


@dataclass(frozen=True)
class Energies:
    """What a layer's tokens had, float64 on the CPU.

    rates: radians per token, [n]; 0 for channels that do not turn.
    mean: mean |q_t|^2 times mean |k_s|^2 over all tokens, [Hq, n].
    causal: mean over t of |q_t|^2 times the mean of |k_s|^2 over s <= t.
    weighted: mean over sampled queries of |q_t|^2 times the mean of |k_s|^2 under the attention that the
        query pays; None without a sample.
    coherent: |mean q|^2 |mean k|^2, what is left when content averages out.
    """

    rates: Tensor
    mean: Tensor
    causal: Tensor
    weighted: Tensor | None
    coherent: Tensor


class Meter:
    """Adds up one layer's energies, row after row.

    >>> from phasewise.encodings import RoPE
    >>> meter = Meter(Layer(0, RoPE(head_dim=8)), length=16)
    >>> meter.add(torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8))
    >>> meter.energies().mean.shape
    torch.Size([4, 4])
    """

    def __init__(self, layer: Layer, *, length: int, queries: int = 0, seed: int = 0) -> None:
        encoding = layer.encoding
        assert isinstance(encoding, Spectral)
        self.layer = layer
        self.encoding = encoding
        self.rule = encoding.frequencies.at(length, encoding.channels)
        self.queries = queries
        self._random = torch.Generator().manual_seed(seed)
        self._sums: dict[str, Tensor] = {}
        self._tokens = self._sampled = 0

    def add(self, q: Tensor, k: Tensor) -> None:
        """Count queries [B, Hq, T, D] and keys [B, Hkv, T, D] as every layer's `Sink` gets them."""
        length, groups = q.shape[2], q.shape[1] // k.shape[1]
        before: Tensor | float = 0.0
        for start in range(0, length, CHUNK):
            piece = slice(start, start + CHUNK)
            query, key = self._channels(q[:, :, piece]), self._channels(k[:, :, piece])
            query_energy, key_energy = query.square().sum(-1), key.square().sum(-1)
            seen = before + key_energy.double().cumsum(2)
            before = seen[:, :, -1:]
            count = torch.arange(start + 1, start + seen.shape[2] + 1, device=q.device)[:, None]
            running = (seen / count).repeat_interleave(groups, 1)
            self._count("q", query.double().sum((0, 2)))
            self._count("k", key.double().sum((0, 2)))
            self._count("q2", query_energy.double().sum((0, 2)))
            self._count("k2", key_energy.double().sum((0, 2)))
            self._count("causal", (query_energy * running).sum((0, 2)))
        self._tokens += q.shape[0] * length
        if self.queries:
            self._sample(q, k)

    def energies(self) -> Energies:
        """The energies of everything added so far."""
        gain = self._gain()
        mean = {name: total / self._tokens for name, total in self._sums.items() if name != "weighted"}
        groups = mean["q2"].shape[0] // mean["k2"].shape[0]
        keys, centre = (mean[name].repeat_interleave(groups, 0) for name in ("k2", "k"))
        weighted = self._sums["weighted"] / self._sampled * gain if self._sampled else None
        return Energies(
            rates=self._rates(),
            mean=mean["q2"] * keys * gain,
            causal=mean["causal"] * gain,
            weighted=weighted,
            coherent=mean["q"].square().sum(-1) * centre.square().sum(-1) * gain,
        )

    def magnitudes(self) -> tuple[Tensor, Tensor]:
        """Mean queries [Hq, n] and keys [Hkv, n], of an encoding with one number a channel."""
        q, k = self._sums["q"], self._sums["k"]
        return q.squeeze(-1) / self._tokens, k.squeeze(-1) / self._tokens

    def _channels(self, x: Tensor) -> Tensor:
        """The numbers of each channel, [.., n, p]: turning ones first, then those that pass, two and two."""
        wide = x.to(working_dtype(x.dtype))
        if isinstance(self.encoding, PoPE):
            return self.encoding.magnitude(wide)[..., None]
        assert isinstance(self.encoding, RoPE)
        n = self.encoding.channels
        turning = torch.stack([wide[..., :n], wide[..., n : 2 * n]], -1)
        passing = wide[..., 2 * n :]
        passing = F.pad(passing, (0, passing.shape[-1] % 2)).unflatten(-1, (2, -1)).transpose(-1, -2)
        return torch.cat([turning, passing], -2)

    def _rates(self) -> Tensor:
        rates = self.rule.rates(self.encoding.channels)
        n = self._sums["q2"].shape[1]
        return F.pad(rates, (0, n - len(rates)))

    def _gain(self) -> Tensor:
        """What an attention factor does to the energy of turning channels."""
        turning = torch.arange(self._sums["q2"].shape[1]) < self.encoding.channels
        return torch.where(turning, self.encoding.gain(self.rule) ** 2, 1.0).double()

    def _sample(self, q: Tensor, k: Tensor) -> None:
        """Energies under the attention that some queries pay, drawn evenly over the row."""
        length, groups = q.shape[2], q.shape[1] // k.shape[1]
        drawn = torch.randperm(length, generator=self._random)[: self.queries].sort().values.to(q.device)
        every = Positions.arange(length, device=q.device)
        chosen = Positions(every.index[:, drawn], every.segment[:, drawn])
        layer, query = self.layer, q[:, :, drawn]
        scores = layer.encoding.scores(query, k, chosen, every, scale=layer.scale)
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        mask = visible(chosen, every, window=layer.window)[:, None]
        attention = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        key_energy = torch.cat(
            [self._channels(piece).square().sum(-1) for piece in k.split(CHUNK, dim=2)], 2
        ).to(attention.dtype)
        attended = (attention.unflatten(1, (-1, groups)) @ key_energy[:, :, None]).flatten(1, 2)
        self._count("weighted", (self._channels(query).square().sum(-1) * attended).double().sum((0, 2)))
        self._sampled += q.shape[0] * len(drawn)

    def _count(self, name: str, total: Tensor) -> None:
        self._sums[name] = self._sums.get(name, torch.zeros((), dtype=torch.float64)) + total.cpu()
