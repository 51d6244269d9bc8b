"""How fast each channel turns: one frozen type for every scaling rule, in radians per position.

n channels, i = 0..n-1 one of them; L positions served so far; L0 the original (trained) length.
RoPE turns n = rotated_dim / 2 pairs and PoPE n = head_dim channels, so each rule is written once over n. With
n = rotated_dim / 2 every rule equals Hugging Face transformers' own of that name, computed in float64.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from phasewise.frequencies.base import (
    Base,
    Continuous,
    Device,
    Divisors,
    Factor,
    Frequencies,
    Length,
    LengthDependent,
    Positive,
    Rates,
    Share,
    Static,
    Stretched,
)


class Unweighted(Static):
    """A static rule that leaves the size of the scores alone."""

    def _attention_factor(self) -> float:
        return 1.0


class Geometric(Unweighted):
    """base^(-i/n), the rates of RoPE (arXiv 2104.09864, section 3.2.2) and of PoPE (arXiv 2509.10534).

    >>> Geometric(base=100.0).rates(2).tolist()
    [1.0, 0.1]
    """

    kind: Literal["geometric"] = "geometric"
    base: Base

    def _rates(self, n: int, device: Device) -> Tensor:
        return _geometric(self.base, n, device)


class Linear(Unweighted):
    """Position interpolation: every rate divided by factor (arXiv 2306.15595).

    >>> Linear(base=100.0, factor=4.0).rates(2).tolist()
    [0.25, 0.025]
    """

    kind: Literal["linear"] = "linear"
    base: Base
    factor: Factor

    def _rates(self, n: int, device: Device) -> Tensor:
        return _geometric(self.base, n, device) / self.factor


class NTK(Unweighted):
    """The base times factor^(n/(n-1)): the fastest rate is kept, the slowest divided by factor (NTK-aware).

    Source: arXiv 2309.00071, section 3.1.

    >>> NTK(base=100.0, factor=4.0).rates(2).tolist()
    [1.0, 0.025]
    """

    kind: Literal["ntk"] = "ntk"
    base: Stretched
    factor: Factor

    def geometric(self, n: int) -> Geometric:
        """The same rates for n channels, at least 2, as a changed base."""
        return Geometric(base=_stretched(self.base, self.factor, n))

    def _rates(self, n: int, device: Device) -> Tensor:
        return _geometric(_stretched(self.base, self.factor, n), n, device)


class DynamicNTK(Continuous):
    """NTK whose stretch follows the served length: 1 + factor * (L / L0 - 1), and 1 up to L0.

    This is transformers' "dynamic", factor * L / L0 - (factor - 1), L0 = max_position_embeddings. The base
    never falls below the given one, whatever the length. Source: arXiv 2309.00071, section 3.3.

    >>> DynamicNTK(base=10_000.0, factor=2.0, original_length=2048).at(1024, 32)
    Geometric(kind='geometric', base=10000.0)
    """

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    base: Stretched
    factor: Factor
    original_length: Length

    def _at(self, length: int, n: int) -> Geometric:
        stretch = 1 + self.factor * max(length / self.original_length - 1, 0)
        return Geometric(base=_stretched(self.base, stretch, n))

    def along(self, lengths: Tensor, n: int) -> tuple[Tensor, Tensor]:
        stretch = 1 + self.factor * (lengths.double() / self.original_length - 1).clamp(min=0)
        return _geometric(_stretched(self.base, stretch, n), n, lengths.device), torch.ones_like(stretch)


class Ramp(Frequencies):
    """What YaRN and DynamicYaRN share: which channels are interpolated, and the attention factor.

    Channels that turn more than `beta_fast` times within L0 keep their rate, those that turn fewer than
    `beta_slow` times are interpolated in full, with a linear ramp over the channel index between; `truncate`
    rounds the ramp's ends outwards to whole channels. The attention factor is `attention` when given, else
    the ratio of 0.1 mscale ln(factor) + 1 to the same with `mscale_all_dim`, else 0.1 ln(factor) + 1.

    At the edges transformers decides, not the paper: the ramp is clamped to 0..2n - 1, and one that lies
    wholly below 0 (L0 < 2 pi beta_slow) interpolates no channel, one wholly above 2n - 1 every channel.
    """

    base: Base
    original_length: Length
    attention: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.beta_fast <= self.beta_slow:
            raise ValueError(
                f"beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; beta_fast, the turns above "
                "which a channel is kept, must be the larger, usually 32 and 1"
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"mscale is {self.mscale} and mscale_all_dim {self.mscale_all_dim}; they count as a ratio: "
                "give both or neither, or the result as attention"
            )
        return self

    def _ramped(self, factor: float | Tensor, n: int, device: Device) -> Tensor:
        kept = _geometric(self.base, n, device)
        return torch.lerp(kept, kept / factor, self._interpolated(n, device))

    def _weight(self, log_factor: Any) -> Any:
        """The attention factor, a number or tensor as ln(factor) is."""
        if self.attention is not None:
            return self.attention
        if self.mscale is not None and self.mscale_all_dim is not None:
            return (0.1 * self.mscale * log_factor + 1) / (0.1 * self.mscale_all_dim * log_factor + 1)
        return 0.1 * log_factor + 1

    def _interpolated(self, n: int, device: Device) -> Tensor:
        def channel(turns: float) -> float:
            return n * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(self.base)

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * n - 1)
        width = high - low if high != low else 0.001
        return ((torch.arange(n, dtype=torch.float64, device=device) - low) / width).clamp(0, 1)


class YaRN(Ramp, Static):
    """Slow rates divided by factor, fast ones kept, a ramp between, scores enlarged (arXiv 2309.00071).

    >>> YaRN(base=10_000.0, factor=4.0, original_length=4096).rates(32)[[0, 31]].tolist() == [
    ...     1.0, Geometric(base=10_000.0).rates(32)[31].item() / 4]
    True
    """

    kind: Literal["yarn"] = "yarn"
    factor: Factor

    def _rates(self, n: int, device: Device) -> Tensor:
        return self._ramped(self.factor, n, device)

    def _attention_factor(self) -> float:
        return self._weight(math.log(self.factor))


class DynamicYaRN(Ramp, Continuous):
    """YaRN whose factor is max(1, L / L0), so that inputs within the trained length are left as trained.

    Ours: transformers has no such rule. `at(length, n)` is the YaRN to serve one fixed length with.

    >>> DynamicYaRN(base=10_000.0, original_length=4096).attention_factor(32, length=4096)
    1.0
    """

    kind: Literal["dynamic_yarn"] = "dynamic_yarn"

    def _at(self, length: int, n: int) -> YaRN:
        return YaRN(factor=max(1.0, length / self.original_length), **self.model_dump(exclude={"kind"}))

    def along(self, lengths: Tensor, n: int) -> tuple[Tensor, Tensor]:
        factor = (lengths.double() / self.original_length).clamp(min=1)
        weight = torch.ones_like(factor) * self._weight(factor.log())
        return self._ramped(factor, n, lengths.device), weight


class LongRoPE(LengthDependent):
    """Each rate divided by its own number: `short_factor` up to L0 positions, `long_factor` from L0 + 1 on.

    The attention factor, one for both regimes, is `attention` when given, else sqrt(1 + ln(factor) / ln(L0)).
    Source: arXiv 2402.13753.

    >>> rule = LongRoPE(base=100.0, short_factor=[1, 1], long_factor=[1, 4], original_length=32, factor=4.0)
    >>> rule.rates(2, length=32).tolist(), rule.rates(2, length=33).tolist()
    ([1.0, 0.1], [1.0, 0.025])
    """

    kind: Literal["longrope"] = "longrope"
    base: Base
    short_factor: Divisors
    long_factor: Divisors
    original_length: Length
    factor: Factor | None = None
    attention: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"short_factor lists {len(self.short_factor)} channels, long_factor {len(self.long_factor)}; "
                "both need one number for each channel"
            )
        if self.factor is None and self.attention is None:
            raise ValueError(
                "LongRoPE is missing factor; give longest length / original_length, from which the attention "
                "factor follows, or give attention itself"
            )
        if self.attention is None and self.original_length == 1:
            raise ValueError("original_length is 1, where ln(factor) / ln(L0) has no value; give attention")
        return self

    @property
    def regimes(self) -> tuple[tuple[int, int | None], ...]:
        return ((1, self.original_length), (self.original_length + 1, None))

    def _at(self, length: int, n: int) -> "Explicit":
        divisors = self.short_factor if length <= self.original_length else self.long_factor
        _require_listed(self, len(divisors), n)
        rates = _geometric(self.base, n, "cpu") / torch.tensor(divisors, dtype=torch.float64, device="cpu")
        return Explicit(values=tuple(rates.tolist()), attention=self._attention_factor())

    def _attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        assert self.factor is not None
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))


class Llama3(Unweighted):
    """Llama 3.1's rule: kept above `high_freq_factor` turns in L0, divided by factor below `low_freq_factor`.

    Between the two the rate goes from one to the other linearly in the number of turns L0 * rate / 2 pi.
    Source: the code released with Llama 3.1.

    >>> Llama3(base=500_000.0, factor=8.0, original_length=8192).rates(64)[0].item()
    1.0
    """

    kind: Literal["llama3"] = "llama3"
    base: Base
    factor: Factor
    original_length: Length
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor} and low_freq_factor {self.low_freq_factor}; "
                "high_freq_factor must be the larger, usually 4 and 1"
            )
        return self

    def _rates(self, n: int, device: Device) -> Tensor:
        kept = _geometric(self.base, n, device)
        turns = self.original_length * kept / (2 * math.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(kept / self.factor, kept, share.clamp(0, 1))


class Proportional(Unweighted):
    """p-RoPE: the fastest floor(fraction * n) of the n geometric rates, over factor; the others do not turn.

    Partial rotation spreads a whole geometric series over fewer channels; here the turning channels keep the
    rates they have in the full series. Source: arXiv 2410.06205.

    >>> Proportional(base=100.0, fraction=0.5).rates(2).tolist()
    [1.0, 0.0]
    """

    kind: Literal["proportional"] = "proportional"
    base: Base
    fraction: Share
    factor: Factor = 1.0

    def _rates(self, n: int, device: Device) -> Tensor:
        turning = torch.arange(n, device=device) < math.floor(self.fraction * n)
        return torch.where(turning, _geometric(self.base, n, device) / self.factor, 0)


class Explicit(Static):
    """Rates listed one by one, in radians per position: learned or advised grids.

    >>> Explicit(values=[0.5, 0.125]).rates(2).tolist()
    [0.5, 0.125]
    """

    kind: Literal["explicit"] = "explicit"
    values: Rates
    attention: Positive = 1.0

    def _rates(self, n: int, device: Device) -> Tensor:
        _require_listed(self, len(self.values), n)
        return torch.tensor(self.values, dtype=torch.float64, device=device)

    def _attention_factor(self) -> float:
        return self.attention


def _rule(value: Any) -> Any:
    if not isinstance(value, Frequencies | Mapping):
        raise ValueError(f"{value!r:.100} is no rule; give one, as Geometric(base=10_000.0)")
    return value


AnyFrequencies = Annotated[
    Geometric | Linear | NTK | DynamicNTK | YaRN | DynamicYaRN | LongRoPE | Llama3 | Proportional | Explicit,
    Field(discriminator="kind"),
    BeforeValidator(_rule),
]


def changed_base(base: float, trained: int, wanted: int) -> Geometric:
    """The base at which the critical channel, the last that turned whole within `trained`, is that of `wanted`.

    base^(ln(wanted / 2 pi) / ln(trained / 2 pi)). Raises ValueError for a trained length in which no channel turns
    whole. Source: Scaling laws of RoPE-based extrapolation, arXiv 2310.05209.

    >>> round(changed_base(10_000.0, 4096, 16_384).base)
    71738
    """
    turn = 2 * math.pi
    if trained <= turn:
        raise ValueError(f"no channel turns whole within {trained} tokens; give the base, as abf:500000")
    return Geometric(base=base ** (math.log(wanted / turn) / math.log(trained / turn)))


def only(rules: Sequence[AnyFrequencies]) -> AnyFrequencies | None:
    """The one rule of a model's layers; None for no rules. Raises ValueError for different ones.

    >>> only([Geometric(base=1e4), Geometric(base=1e4)])
    Geometric(kind='geometric', base=10000.0)
    """
    if len(set(rules)) > 1:
        raise ValueError(
            f"the layers have different rules ({'; '.join(map(str, dict.fromkeys(rules)))}); "
            "give a model whose layers share one"
        )
    return rules[0] if rules else None


def _geometric(base: float | Tensor, n: int, device: Device) -> Tensor:
    """base^(-i/n), float64 [n], or [..., n] of bases [..., 1]."""
    if isinstance(base, Tensor):
        return base ** (torch.arange(0, -n, -1, dtype=torch.float64, device=device) / n)
    return torch.logspace(0.0, (1 - n) / n, n, base=base, dtype=torch.float64, device=device)


def _stretched(base: float, stretch: Any, n: int) -> Any:
    """The base at which the slowest of n channels is `stretch` times slower and the fastest unchanged."""
    if n < 2:
        raise ValueError(
            f"n is {n}; a changed base moves no rate of a single channel: use 2 or more, or Linear"
        )
    return base * stretch ** (n / (n - 1))


def _require_listed(rule: Frequencies, count: int, n: int) -> None:
    if count != n:
        raise ValueError(
            f"{type(rule).__name__} lists {count} channels and n is {n}; give one number for each channel "
            "(RoPE: rotated_dim // 2, PoPE: head_dim)"
        )
