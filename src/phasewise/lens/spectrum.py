"""What `inspect` says of a layer whose scores are sums of sinusoids: RoPE and PoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from phasewise.encodings import PoPE
from phasewise.lens.energy import Energies, Meter
from phasewise.model.reading import Layer

DIGITS = 5


class Values(BaseModel):
    """Frozen values without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Use(Values):
    """How a head, or a layer on average over its heads, spreads its energy over the frequencies that turn.

    energy: the sum over these. zero_share: what channels that do not turn have of all energy.
    share: each frequency's part, sum 1; all 0 where there is no energy, and the next two are then None.
    theta_eff: exp(sum share ln rate), radians per token. participation: exp(entropy of share), how many
    frequencies are in use.
    """

    energy: float
    zero_share: float
    share: tuple[float, ...]
    theta_eff: float | None
    participation: float | None

    @property
    def excess(self) -> tuple[float, ...]:
        """Each share over the uniform one: 1 means as much as any."""
        return tuple(share * len(self.share) for share in self.share)


class Head(Values):
    """A query head: its use in the mean, causal and attention-weighted form, and the coherent part.

    coherent: of each frequency's mean energy, the part left when content averages out, 0 to 1.
    """

    mean: Use
    causal: Use
    weighted: Use | None
    coherent: tuple[float, ...]


class Polar(Values):
    """What PoPE learned: mean magnitudes of queries and keys and the phases, [head][frequency].

    phase: radians in [-pi, pi]. frozen: the share of phases that a clamp holds, so that they do not learn.
    """

    query_magnitude: tuple[tuple[float, ...], ...]
    key_magnitude: tuple[tuple[float, ...], ...]
    phase: tuple[tuple[float, ...], ...]
    frozen: float


class Spectrum(Values):
    """A layer's use of its frequencies.

    rates: radians per token of the frequencies that turn, in the order of every other list over frequencies.
    turns_trained, turns_wanted: full turns within the trained and the wanted length; None where not known.
    mean, causal, weighted: averages over heads, each head counted alike. excess: of `mean`, over uniform.
    coherent: the content-free part of the layer's energy, all frequencies together.
    """

    kind: Literal["rope", "pope"]
    layer: int
    kv_heads: int
    head_dim: int
    window: int | None
    rates: tuple[float, ...]
    turns_trained: tuple[float, ...] | None
    turns_wanted: tuple[float, ...] | None
    mean: Use
    causal: Use
    weighted: Use | None
    excess: tuple[float, ...]
    coherent: float
    heads: tuple[Head, ...]
    polar: Polar | None

    @property
    def wavelengths(self) -> tuple[float, ...]:
        """Tokens a full turn takes."""
        return tuple(2 * math.pi / rate for rate in self.rates)


class SpectrumMeter:
    """Takes a layer's queries and keys, gives its `Spectrum`."""

    def __init__(self, layer: Layer, *, length: int, queries: int) -> None:
        self.layer = layer
        self._meter = Meter(layer, length=length, queries=queries)
        self._shape = (0, 0)

    def add(self, q: Tensor, k: Tensor) -> None:
        self._shape = (k.shape[1], q.shape[-1])
        self._meter.add(q, k)

    def result(self, *, trained: int | None, wanted: int | None) -> Spectrum:
        energies = self._meter.energies()
        turning = energies.rates > 0
        rates = energies.rates[turning]
        mean = _uses(energies.mean, energies)
        causal = _uses(energies.causal, energies)
        weighted = None if energies.weighted is None else _uses(energies.weighted, energies)
        coherent = energies.coherent[:, turning] / energies.mean[:, turning].clamp(min=1e-300)
        heads = tuple(
            Head(
                mean=mean[head],
                causal=causal[head],
                weighted=None if weighted is None else weighted[head],
                coherent=rounded(coherent[head]),
            )
            for head in range(len(mean))
        )
        average = _average(mean, rates)
        encoding = self.layer.encoding
        total = energies.mean[:, turning].sum().clamp(min=1e-300)
        return Spectrum(
            kind="pope" if isinstance(encoding, PoPE) else "rope",
            layer=self.layer.index,
            kv_heads=self._shape[0],
            head_dim=self._shape[1],
            window=self.layer.window,
            rates=rounded(rates),
            turns_trained=None if trained is None else rounded(rates * trained / (2 * math.pi)),
            turns_wanted=None if wanted is None else rounded(rates * wanted / (2 * math.pi)),
            mean=average,
            causal=_average(causal, rates),
            weighted=None if weighted is None else _average(weighted, rates),
            excess=rounded(torch.tensor(average.excess)),
            coherent=rounded(energies.coherent[:, turning].sum() / total)[0],
            heads=heads,
            polar=self._polar(encoding, turning) if isinstance(encoding, PoPE) else None,
        )

    def _polar(self, encoding: PoPE, turning: Tensor) -> Polar:
        query, key = self._meter.magnitudes()
        delta = encoding.delta().detach().double().cpu()
        wrapped = torch.atan2(delta.sin(), delta.cos())
        return Polar(
            query_magnitude=tuple(rounded(row) for row in query[:, turning]),
            key_magnitude=tuple(rounded(row) for row in key[:, turning]),
            phase=tuple(rounded(row) for row in wrapped[:, turning]),
            frozen=encoding.frozen_fraction(),
        )


def rounded(values: Tensor) -> tuple[float, ...]:
    """The numbers to five digits."""
    return tuple(float(f"{value:.{DIGITS}g}") for value in values.flatten().tolist())


def _uses(energy: Tensor, energies: Energies) -> list[Use]:
    """The use of each head, energy [Hq, n]."""
    turning = energies.rates > 0
    rates, used, all_energy = energies.rates[turning], energy[:, turning], energy.sum(1)
    uses = []
    for row, total in zip(used, all_energy, strict=True):
        own = row.sum()
        share = row / own if own > 0 else torch.zeros_like(row)
        zero = 1 - own / total if total > 0 else torch.zeros(())
        uses.append(_use(own, zero, share, rates))
    return uses


def _average(uses: Sequence[Use], rates: Tensor) -> Use:
    """The mean over heads of shares; heads without energy have no share to count."""
    live = [use for use in uses if use.energy > 0] or list(uses)
    share = torch.tensor([use.share for use in live], dtype=torch.float64).mean(0)
    energy = torch.tensor([use.energy for use in uses], dtype=torch.float64).mean()
    zero = torch.tensor([use.zero_share for use in live], dtype=torch.float64).mean()
    return _use(energy, zero, share, rates)


def _use(energy: Tensor, zero_share: Tensor, share: Tensor, rates: Tensor) -> Use:
    live = bool(share.sum() > 0)
    return Use(
        energy=rounded(energy)[0],
        zero_share=rounded(zero_share.clamp(min=0))[0],
        share=rounded(share),
        theta_eff=rounded((share * rates.log()).sum().exp())[0] if live else None,
        participation=rounded(torch.special.entr(share).sum().exp())[0] if live else None,
    )
