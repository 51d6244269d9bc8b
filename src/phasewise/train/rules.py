"""How a checkpoint's rates are changed for a longer context: one frozen type a way, each a function of length.

Every length's rule starts from the rates and the length of the checkpoint, so a schedule of lengths never
stretches what was stretched.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from phasewise.frequencies import NTK, AnyFrequencies, Geometric, Linear, Llama3, YaRN, changed_base
from phasewise.model.sight import Bound
from phasewise.record import parsed
from phasewise.train.schedule import from_text

FILE = "grid:"
EXAMPLE = Geometric(base=10_000.0).model_dump_json()


@dataclass(frozen=True)
class Present:
    """What a checkpoint turns with: its rule, None where it has no rates, and the length it was trained at.

    bound: how far its layers with rates see, where each of them has a window.
    """

    frequencies: AnyFrequencies | None
    length: int
    bound: Bound | None = None

    def require_reach(self, kind: str) -> None:
        """Raise ValueError where no layer with rates sees beyond `length`, so that other rates would reach nothing."""
        if self.bound is not None and self.bound.window <= self.length:
            raise ValueError(
                f"rule {kind!r} would gain nothing beyond {self.length:,} tokens and change what layers do within "
                f"their windows: {self.bound}. Leave the rates: --rule none with steps or, of a Hugging Face folder, "
                "another max_position_embeddings in its config.json"
            )


class Way(BaseModel):
    """A way to longer contexts that is a formula, or leaves the rates alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Any

    def at(self, present: Present, length: int) -> AnyFrequencies | None:
        """The rule to serve `length` with; None where rates stay as they are.

        Raises ValueError for a checkpoint without rates, or with rates that see no further than it serves, and for
        rates that this way does not start from.
        """
        present.require_reach(self.kind)
        if present.frequencies is None:
            raise ValueError(f"rule {self.kind!r} changes rates, and the encoding has none; use --rule none")
        rule = self._rule(present.frequencies, present.length, length)
        if rule is None:
            raise ValueError(
                f"rule {self.kind!r} does not start from rates of rule {present.frequencies.kind!r}, which the "
                "checkpoint has; use --rule grid:FILE to replace them or, with steps, none to keep them"
            )
        return rule

    def _rule(self, now: AnyFrequencies, trained: int, length: int) -> AnyFrequencies | None:
        raise NotImplementedError


class AsIs(Way):
    """The rates the checkpoint has, as for PoPE and TAPA."""

    kind: Literal["none"] = "none"

    def at(self, present: Present, length: int) -> AnyFrequencies | None:
        return None


class Interpolate(Way):
    """Position interpolation: every rate divided by length / trained length (arXiv 2306.15595).

    >>> Interpolate().at(Present(Geometric(base=1e4), 128), 512)
    Linear(kind='linear', base=10000.0, factor=4.0)
    """

    kind: Literal["pi"] = "pi"

    def _rule(self, now: AnyFrequencies, trained: int, length: int) -> AnyFrequencies | None:
        if isinstance(now, Geometric | Linear):
            return Linear(base=now.base, factor=_factor(now) * length / trained)
        return None


class StretchBase(Way):
    """NTK-aware: the base by which the slowest rate alone is divided in full (arXiv 2309.00071, 3.1)."""

    kind: Literal["ntk"] = "ntk"

    def _rule(self, now: AnyFrequencies, trained: int, length: int) -> AnyFrequencies | None:
        if isinstance(now, Geometric | NTK):
            return NTK(base=now.base, factor=_factor(now) * length / trained)
        return None


class ByParts(Way):
    """YaRN (arXiv 2309.00071); a checkpoint of YaRN keeps its original length and its settings."""

    kind: Literal["yarn"] = "yarn"

    def _rule(self, now: AnyFrequencies, trained: int, length: int) -> AnyFrequencies | None:
        if isinstance(now, YaRN):
            return now.model_copy(update={"factor": length / now.original_length})
        if isinstance(now, Geometric):
            return YaRN(base=now.base, factor=length / trained, original_length=trained)
        return None


class LikeLlama3(Way):
    """Llama 3.1's rule; a checkpoint of it keeps its original length and its settings."""

    kind: Literal["llama3"] = "llama3"

    def _rule(self, now: AnyFrequencies, trained: int, length: int) -> AnyFrequencies | None:
        if isinstance(now, Llama3):
            return now.model_copy(update={"factor": now.factor * length / trained})
        if isinstance(now, Geometric):
            return Llama3(base=now.base, factor=length / trained, original_length=trained)
        return None


class ChangeBase(Way):
    """Adjusted base frequency: the given base, or the one that keeps the critical channel (`changed_base`).

    >>> round(ChangeBase().at(Present(Geometric(base=100.0), 128), 512).base)
    831
    """

    kind: Literal["abf"] = "abf"
    base: Annotated[float, Field(gt=1)] | None = None

    def _rule(self, now: AnyFrequencies, trained: int, length: int) -> AnyFrequencies | None:
        if not isinstance(now, Geometric):
            return None
        if self.base is not None:
            return Geometric(base=self.base)
        return changed_base(now.base, trained, length)


class Grid(Way):
    """Rates of one's own, the same for every length."""

    kind: Literal["grid"] = "grid"
    frequencies: AnyFrequencies

    def _rule(self, now: AnyFrequencies, trained: int, length: int) -> AnyFrequencies | None:
        return self.frequencies


class Search(BaseModel):
    """LongRoPE's search: one divisor a channel, found by evolution (arXiv 2402.13753); its budget.

    Each candidate costs the loss of `tokens` validation tokens at the wanted length: `population` candidates
    at first, of which the interpolations above are three, and `children` in each of `generations`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["longrope"] = "longrope"
    population: Annotated[int, Field(ge=4, le=10_000)] = 12
    generations: Annotated[int, Field(ge=0, le=10_000)] = 6
    children: Annotated[int, Field(ge=1, le=10_000)] = 8
    tokens: Annotated[int, Field(ge=1)] = 4096

    def start(self, present: Present) -> Geometric:
        """The rates that are searched from; ValueError for a checkpoint that has no plain ones."""
        present.require_reach(self.kind)
        now = present.frequencies
        if not isinstance(now, Geometric):
            raise ValueError(
                "rule 'longrope' searches from plain rates, and the checkpoint has "
                f"{'none' if now is None else repr(now.kind)}; use --rule none to keep what it has"
            )
        return now


def _from_text(value: Any) -> Any:
    """`from_text`, and the two short forms abf:BASE and grid:FILE."""
    if isinstance(value, str) and value.startswith("abf:"):
        return {"kind": "abf", "base": value.removeprefix("abf:")}
    if isinstance(value, str) and value.startswith(FILE):
        return {"kind": "grid", "frequencies": read_grid(Path(value.removeprefix(FILE)))}
    return from_text(value)


def read_grid(path: Path) -> AnyFrequencies:
    """The rule in a JSON file, or that of the best option in a report of `phasewise advise`.

    Raises ValueError when it holds neither.
    """
    try:
        content = parsed(path.read_text(encoding="utf-8"))
        match content:
            case {"values": {"options": [{"settings": {"phasewise": rule}}, *_]}}:
                content = rule
        return TypeAdapter[AnyFrequencies](AnyFrequencies).validate_python(content)
    except FileNotFoundError as error:
        raise ValueError(f"no file {path}; give a rule as JSON, as {EXAMPLE}") from error
    except ValueError as error:
        raise ValueError(
            f"{path} is not a rule, nor a report of advise with one; write one as {EXAMPLE} "
            'or {"kind": "explicit", "values": [...]}'
        ) from error


AnyWay = Annotated[
    AsIs | Interpolate | StretchBase | ByParts | LikeLlama3 | ChangeBase | Grid | Search,
    Field(discriminator="kind"),
    BeforeValidator(_from_text),
]


def _factor(now: AnyFrequencies) -> float:
    return now.factor if isinstance(now, Linear | NTK) else 1.0
