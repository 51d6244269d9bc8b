"""What `inspect` says of a TAPA layer: how its phase argument is spread, and how distance changes scores.

The argument of the cosine at distance r is x r^alpha with x from content alone. All pairs of tokens at some
distances are taken, O(tokens x D) for each distance. Letters: T tokens, Hq and Hkv heads, R distances.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from phasewise.encodings import TAPA
from phasewise.encodings.base import working_dtype
from phasewise.lens.dependency import log_spaced
from phasewise.lens.spectrum import Values, rounded
from phasewise.model.reading import Layer

DISTANCES = 24
BINS = 80
REACH = 8.0  # bins are even in asinh x, up to |x| = sinh 8 = 1490 radians
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class PhaseHead(Values):
    """A query head of TAPA, over pairs of tokens; lists over distances are in the layer's `distances`.

    argument: the share of pairs with x in each of the layer's bins. rms: root mean square of x, radians.
    quantiles: of x, at 5, 25, 50, 75 and 95 %, read off the bins.
    gate: mean cosine at each distance; its fall is the bias towards near keys that needs no content.
    spread: the cosine's standard deviation over pairs, how much content decides.
    change: root mean square change of the cosine from distance 1 to r for the same content; 0 means that
    distance does nothing, 1 that the cosine at r is unrelated to the one at 1.
    """

    argument: tuple[float, ...]
    rms: float
    quantiles: tuple[float, ...]
    gate: tuple[float, ...]
    spread: tuple[float, ...]
    change: tuple[float, ...]


class Phase(Values):
    """A TAPA layer: its settings, and each head. bins: edges of x in radians, one more than bins."""

    kind: Literal["tapa"] = "tapa"
    layer: int
    kv_heads: int
    head_dim: int
    window: int | None
    alpha: float
    distances: tuple[int, ...]
    bins: tuple[float, ...]
    heads: tuple[PhaseHead, ...]


class PhaseMeter:
    """Takes a TAPA layer's queries and keys, gives its `Phase`."""

    def __init__(self, layer: Layer, *, length: int) -> None:
        assert isinstance(layer.encoding, TAPA)
        self.layer, self.encoding = layer, layer.encoding
        self.distances: tuple[int, ...] = tuple(log_spaced(length - 1, count=DISTANCES).tolist())
        self._edges = torch.linspace(-REACH, REACH, BINS + 1, dtype=torch.float64).sinh()
        self._shape = (0, 0)
        self._pairs = torch.zeros(len(self.distances), dtype=torch.float64)
        self._sums: Tensor | None = None
        self._squares: Tensor | None = None
        self._counts: Tensor | None = None

    def add(self, q: Tensor, k: Tensor) -> None:
        """Count queries [B, Hq, T, D] and keys [B, Hkv, T, D]."""
        heads, length = q.shape[1:3]
        self._shape = (k.shape[1], q.shape[-1])
        if self._sums is None or self._squares is None or self._counts is None:
            self._sums = torch.zeros(3, heads, len(self.distances), dtype=torch.float64)
            self._squares = torch.zeros(heads, dtype=torch.float64)
            self._counts = torch.zeros(heads, BINS, dtype=torch.float64)
        for place, distance in enumerate(self.distances):
            if distance >= length:
                break
            x = self._argument(q[:, :, distance:], k[:, :, :-distance])
            near, far = x.cos(), (x * distance**self.encoding.config.alpha).cos()
            sums = torch.stack([far, far.square(), (far - near).square()])
            self._sums[:, :, place] += sums.double().sum((1, 3)).cpu()
            self._pairs[place] += x.shape[0] * x.shape[2]
            self._squares += x.double().square().sum((0, 2)).cpu()
            bins = torch.bucketize(x.double().cpu(), self._edges[1:-1]).transpose(0, 1).flatten(1)
            for head in range(heads):
                self._counts[head] += torch.bincount(bins[head], minlength=BINS)

    def result(self, *, trained: int | None, wanted: int | None) -> Phase:
        assert self._sums is not None
        assert self._squares is not None
        assert self._counts is not None
        reached = self._pairs > 0
        gate, square, change = self._sums[:, :, reached] / self._pairs[reached]
        share = self._counts / self._counts.sum(1, keepdim=True)
        return Phase(
            layer=self.layer.index,
            kv_heads=self._shape[0],
            head_dim=self._shape[1],
            window=self.layer.window,
            alpha=self.encoding.config.alpha,
            distances=tuple(d for d, kept in zip(self.distances, reached.tolist(), strict=True) if kept),
            bins=rounded(self._edges),
            heads=tuple(
                PhaseHead(
                    argument=rounded(share[head]),
                    rms=rounded((self._squares[head] / self._pairs.sum()).sqrt())[0],
                    quantiles=self._quantiles(share[head]),
                    gate=rounded(gate[head]),
                    spread=rounded((square[head] - gate[head].square()).clamp(min=0).sqrt()),
                    change=rounded(change[head].sqrt()),
                )
                for head in range(share.shape[0])
            ),
        )

    def _argument(self, q: Tensor, k: Tensor) -> Tensor:
        """The cosine's argument at distance 1 of queries with keys place by place, [B, Hq, T]."""
        encoding, dtype = self.encoding, working_dtype(q.dtype)
        query = q[..., encoding.amplitude_dim :].to(dtype)
        key = k[..., encoding.amplitude_dim :].to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
        quadratic = encoding.config.phase == "quadratic"
        content = (query * key).sum(-1) if quadratic else query.sum(-1) + key.sum(-1)
        return content * ((2 * math.pi if encoding.config.two_pi else 1.0) * encoding.phase_dim**-0.5)

    def _quantiles(self, share: Tensor) -> tuple[float, ...]:
        """Interpolated within the bin that holds each quantile."""
        below = torch.cat([torch.zeros(1, dtype=torch.float64), share.cumsum(0)])
        found = []
        for quantile in QUANTILES:
            place = int(torch.searchsorted(below, quantile).clamp(1, BINS))
            inside = (quantile - below[place - 1]) / share[place - 1].clamp(min=1e-12)
            found.append(self._edges[place - 1] + inside * (self._edges[place] - self._edges[place - 1]))
        return rounded(torch.stack(found))
