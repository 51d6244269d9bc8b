"""What a scaling rule is: the rates of n channels, in radians per position, and what its settings may be.

n channels; L positions served so far.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from torch import Tensor

Device = torch.device | str | None


def _where(condition: Callable[[Any], bool], remedy: str) -> AfterValidator:
    def check(value: Any, info: ValidationInfo) -> Any:
        if not condition(value):
            raise ValueError(f"{info.field_name} is {value}; {remedy}")
        return value

    return AfterValidator(check)


def _plain(value: Any) -> Any:
    """A whole number of numpy's as Python's; all else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def _listing(condition: Callable[[float], bool], remedy: str) -> AfterValidator:
    return _where(lambda values: len(values) > 0 and all(map(condition, values)), remedy)


LONGEST = 2**62  # positions are int64
MOST_CHANNELS = 2**20
SMALLEST, LARGEST = 1e-100, 1e100  # what rules make of these is finite in float64

Base = Annotated[float, _where(lambda base: 1 < base < math.inf, "give a finite base above 1, as 10000.0")]
Stretched = Annotated[
    float, _where(lambda base: 1 < base <= LARGEST, "give a base above 1, 1e100 at most, as 10000.0")
]
Factor = Annotated[
    float, _where(lambda x: 1 <= x <= LONGEST, "give wanted / original length, from 1 to 2^62")
]
Length = Annotated[
    int,
    BeforeValidator(_plain),
    _where(lambda x: 1 <= x <= LONGEST, "give the number of positions trained on, from 1 to 2^62"),
]
Positive = Annotated[
    float, _where(lambda x: SMALLEST <= x <= LARGEST, "give a finite number above 0, from 1e-100 to 1e100")
]
Share = Annotated[float, _where(lambda x: 0 <= x <= 1, "give a share of the channels, from 0 to 1")]
Divisors = Annotated[
    tuple[float, ...],
    Field(strict=False),
    _listing(
        lambda x: SMALLEST <= x <= LARGEST,
        "list one finite number above 0 for each channel, from 1e-100 to 1e100",
    ),
]
Rates = Annotated[
    tuple[float, ...],
    Field(strict=False),
    _listing(
        lambda x: 0 <= x <= LARGEST,
        "list finite radians per position, from 0 to 1e100, one for each channel",
    ),
]


class Frequencies(BaseModel):
    """A rule that gives n channels their rates, told apart by its `kind`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Any
    depends_on_length: ClassVar[bool]

    @model_validator(mode="before")
    @classmethod
    def _own_fields(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            takes = ", ".join(cls.model_fields)
            unknown = [str(name) for name in data if name not in cls.model_fields]
            if unknown:
                raise ValueError(f"{', '.join(unknown)} is not permitted; {cls.__name__} takes {takes}")
            missing = [
                name for name, field in cls.model_fields.items() if field.is_required() and name not in data
            ]
            if missing:
                raise ValueError(f"{cls.__name__} is missing {', '.join(missing)}; it takes {takes}")
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

        >>> from phasewise.frequencies import DynamicNTK, Geometric
        >>> Geometric(base=10_000.0).rates(2).tolist()
        [1.0, 0.01]
        >>> DynamicNTK(base=10_000.0, factor=2.0, original_length=2048).rates(2, length=3072).tolist()
        [1.0, 0.005]
        """

    @abstractmethod
    def attention_factor(self, n: int, *, length: int | None = None) -> float:
        """What multiplies cosine and sine of queries and of keys, hence scores by its square.

        >>> from phasewise.frequencies import YaRN
        >>> round(YaRN(base=10_000.0, factor=64.0, original_length=4096).attention_factor(32), 4)
        1.4159
        """

    @abstractmethod
    def at(self, length: int, n: int) -> "Static":
        """The static rule equal to this one for n channels when `length` positions are served.

        >>> from phasewise.frequencies import DynamicYaRN
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
        return self._rates(self._checked(n, length), device)

    def attention_factor(self, n: int, *, length: int | None = None) -> float:
        self._checked(n, length)
        return self._attention_factor()

    def at(self, length: int, n: int) -> "Static":
        self._checked(n, length)
        return self

    def _checked(self, n: int, length: int | None) -> int:
        if length is not None:
            _served(self, length)
        return _channels(n)


class LengthDependent(Frequencies):
    """A rule whose rates follow the number of positions served."""

    depends_on_length: ClassVar[bool] = True

    @abstractmethod
    def _at(self, length: int, n: int) -> Static: ...

    def at(self, length: int, n: int) -> Static:
        return self._at(_served(self, length), _channels(n))

    def rates(self, n: int, *, length: int | None = None, device: Device = None) -> Tensor:
        return self.at(_served(self, length), n).rates(n, device=device)

    def attention_factor(self, n: int, *, length: int | None = None) -> float:
        return self.at(_served(self, length), n).attention_factor(n)


class Continuous(LengthDependent):
    """A rule whose rates may change with every position served."""

    @property
    def regimes(self) -> None:
        return None

    @abstractmethod
    def along(self, lengths: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """What `rates` and `attention_factor` are at each of int64 `lengths` [..., 1]: float64 [..., n] and [..., 1].

        >>> from phasewise.frequencies import DynamicNTK
        >>> rule = DynamicNTK(base=10_000.0, factor=2.0, original_length=2048)
        >>> rule.along(torch.tensor([[2048], [3072]]), 2)[0].tolist()
        [[1.0, 0.01], [1.0, 0.005]]
        """


def _channels(n: int) -> int:
    n = _plain(n)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_CHANNELS:
        raise ValueError(
            f"n is {n!r}; give the number of channels, from 1 to 2^20: rotated_dim // 2 for RoPE, head_dim for PoPE"
        )
    return n


def _served(rule: Frequencies, length: int | None) -> int:
    length = _plain(length)
    if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= LONGEST:
        raise ValueError(
            f"length is {length!r}; {type(rule).__name__} takes the number of positions served, from 1 to 2^62"
        )
    return length
