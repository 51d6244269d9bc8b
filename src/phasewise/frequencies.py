"""How fast each channel turns: one frozen type for every scaling rule, in radians per position.

n channels, i = 0..n-1 one of them; L positions served so far; L0 the original (trained) length.
RoPE turns n = rotated_dim / 2 pairs and PoPE n = head_dim channels, so each rule is written once over n. With
n = rotated_dim / 2 every rule equals Hugging Face transformers' own of that name, computed in float64.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from torch import Tensor

Device = torch.device | str | None


def _where(condition: Callable[[Any], bool], remedy: str) -> AfterValidator:
    def check(value: Any, info: ValidationInfo) -> Any:
        if not condition(value):
            raise ValueError(f"{info.field_name} is {value}; {remedy}")
        return value

    return AfterValidator(check)


def _listing(condition: Callable[[float], bool], remedy: str) -> AfterValidator:
    return _where(lambda values: len(values) > 0 and all(map(condition, values)), remedy)


Base = Annotated[float, _where(lambda base: 1 < base < math.inf, "give a finite base above 1, as 10000.0")]
Factor = Annotated[
    float, _where(lambda x: 1 <= x < math.inf, "give wanted / original length, finite, at least 1")
]
Length = Annotated[int, _where(lambda x: x >= 1, "give the number of positions trained on, at least 1")]
Positive = Annotated[float, _where(lambda x: 0 < x < math.inf, "give a finite number above 0")]
Share = Annotated[float, _where(lambda x: 0 <= x <= 1, "give a share of the channels, from 0 to 1")]
Divisors = Annotated[
    tuple[float, ...],
    Field(strict=False),
    _listing(lambda x: 0 < x < math.inf, "list one finite number above 0 for each channel"),
]
Rates = Annotated[
    tuple[float, ...],
    Field(strict=False),
    _listing(
        lambda x: 0 <= x < math.inf, "list finite radians per position, none below 0, one for each channel"
    ),
]


class Frequencies(BaseModel):
    """A rule that gives n channels their rates, told apart by its `kind`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Any
    depends_on_length: ClassVar[bool]

    @model_validator(mode="before")
    @classmethod
    def _required_fields(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            missing = [
                name for name, field in cls.model_fields.items() if field.is_required() and name not in data
            ]
            if missing:
                raise ValueError(
                    f"{cls.__name__} is missing {', '.join(missing)}; it takes {', '.join(cls.model_fields)}"
                )
        return data

    @property
    @abstractmethod
    def regimes(self) -> tuple[tuple[int, int | None], ...] | None:
        """(first, last) length of each stretch of constant rates; None when they vary continuously."""

    @abstractmethod
    def rates(self, n: int, *, length: int | None = None, device: Device = None) -> Tensor:
        """Radians per position of n channels when `length` positions are served so far, float64 [n].

        Only the rules with `depends_on_length` need `length`. Raises ValueError where they lack it, and for
        an n that the rule cannot serve.

        >>> Geometric(base=10_000.0).rates(2).tolist()
        [1.0, 0.01]
        >>> DynamicNTK(base=10_000.0, factor=2.0, original_length=2048).rates(2, length=3072).tolist()
        [1.0, 0.005]
        """

    @abstractmethod
    def attention_factor(self, n: int, *, length: int | None = None) -> float:
        """What multiplies cosine and sine of queries and of keys, hence scores by its square.

        >>> round(YaRN(base=10_000.0, factor=64.0, original_length=4096).attention_factor(32), 4)
        1.4159
        """

    @abstractmethod
    def at(self, length: int, n: int) -> "Static":
        """The static rule equal to this one for n channels when `length` positions are served.

        >>> DynamicYaRN(base=10_000.0, original_length=2048).at(8192, 32).factor
        4.0
        """


class Static(Frequencies):
    """A rule whose rates are the same at every length."""

    depends_on_length: ClassVar[bool] = False

    @abstractmethod
    def _rates(self, n: int, device: Device) -> Tensor: ...

    @abstractmethod
    def _attention_factor(self) -> float: ...

    @property
    def regimes(self) -> tuple[tuple[int, int | None], ...]:
        return ((1, None),)

    def rates(self, n: int, *, length: int | None = None, device: Device = None) -> Tensor:
        self._check(n, length)
        return self._rates(n, device)

    def attention_factor(self, n: int, *, length: int | None = None) -> float:
        self._check(n, length)
        return self._attention_factor()

    def at(self, length: int, n: int) -> "Static":
        self._check(n, length)
        return self

    def _check(self, n: int, length: int | None) -> None:
        _require_channels(n)
        if length is not None:
            _served(self, length)


class LengthDependent(Frequencies):
    """A rule whose rates follow the number of positions served."""

    depends_on_length: ClassVar[bool] = True

    @abstractmethod
    def _at(self, length: int, n: int) -> Static: ...

    def at(self, length: int, n: int) -> Static:
        _require_channels(n)
        return self._at(_served(self, length), n)

    def rates(self, n: int, *, length: int | None = None, device: Device = None) -> Tensor:
        return self.at(_served(self, length), n).rates(n, device=device)

    def attention_factor(self, n: int, *, length: int | None = None) -> float:
        return self.at(_served(self, length), n).attention_factor(n)


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
    base: Base
    factor: Factor

    def geometric(self, n: int) -> Geometric:
        """The same rates for n channels, at least 2, as a changed base."""
        return Geometric(base=_stretched(self.base, self.factor, n))

    def _rates(self, n: int, device: Device) -> Tensor:
        return _geometric(_stretched(self.base, self.factor, n), n, device)


class DynamicNTK(LengthDependent):
    """NTK whose stretch follows the served length: 1 + factor * (L / L0 - 1), and 1 up to L0.

    This is transformers' "dynamic", factor * L / L0 - (factor - 1), L0 = max_position_embeddings. The base
    never falls below the given one, whatever the length. Source: arXiv 2309.00071, section 3.3.

    >>> DynamicNTK(base=10_000.0, factor=2.0, original_length=2048).at(1024, 32)
    Geometric(kind='geometric', base=10000.0)
    """

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    base: Base
    factor: Factor
    original_length: Length

    @property
    def regimes(self) -> None:
        return None

    def _at(self, length: int, n: int) -> Geometric:
        stretch = 1 + self.factor * max(length / self.original_length - 1, 0)
        return Geometric(base=_stretched(self.base, stretch, n))


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
        kept = _geometric(self.base, n, device)
        return torch.lerp(kept, kept / self.factor, self._interpolated(n, device))

    def _attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        log_factor = math.log(self.factor)
        if self.mscale is not None and self.mscale_all_dim is not None:
            return (0.1 * self.mscale * log_factor + 1) / (0.1 * self.mscale_all_dim * log_factor + 1)
        return 0.1 * log_factor + 1


class DynamicYaRN(Ramp, LengthDependent):
    """YaRN whose factor is max(1, L / L0), so that inputs within the trained length are left as trained.

    Ours: transformers has no such rule. `at(length, n)` is the YaRN to serve one fixed length with.

    >>> DynamicYaRN(base=10_000.0, original_length=4096).attention_factor(32, length=4096)
    1.0
    """

    kind: Literal["dynamic_yarn"] = "dynamic_yarn"

    @property
    def regimes(self) -> None:
        return None

    def _at(self, length: int, n: int) -> YaRN:
        return YaRN(factor=max(1.0, length / self.original_length), **self.model_dump(exclude={"kind"}))


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


AnyFrequencies = Annotated[
    Geometric | Linear | NTK | DynamicNTK | YaRN | DynamicYaRN | LongRoPE | Llama3 | Proportional | Explicit,
    Field(discriminator="kind"),
]


def _geometric(base: float, n: int, device: Device) -> Tensor:
    """base^(-i/n), float64 [n]."""
    return base ** (torch.arange(0, -n, -1, dtype=torch.float64, device=device) / n)


def _stretched(base: float, stretch: float, n: int) -> float:
    """The base at which the slowest of n channels is `stretch` times slower and the fastest unchanged."""
    if n < 2:
        raise ValueError(
            f"n is {n}; a changed base moves no rate of a single channel: use 2 or more, or Linear"
        )
    return base * stretch ** (n / (n - 1))


def _require_channels(n: int) -> None:
    if not isinstance(n, int) or n < 1:
        raise ValueError(
            f"n is {n!r}; give the number of channels: rotated_dim // 2 for RoPE, head_dim for PoPE"
        )


def _served(rule: Frequencies, length: int | None) -> int:
    if not isinstance(length, int) or length < 1:
        raise ValueError(
            f"length is {length!r}; {type(rule).__name__} takes the number of positions served, from 1"
        )
    return length


def _require_listed(rule: Frequencies, count: int, n: int) -> None:
    if count != n:
        raise ValueError(
            f"{type(rule).__name__} lists {count} channels and n is {n}; give one number for each channel "
            "(RoPE: rotated_dim // 2, PoPE: head_dim)"
        )
