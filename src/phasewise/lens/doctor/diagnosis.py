"""What a doctor says: findings with their numbers and remedies, and what became of every check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_validator

from phasewise.lens.spectrum import Values

Severity = Literal["wrong", "warning", "note"]
Number = float | int | str | bool | None


def plain(value: object) -> Number:
    """A value that may be anything, as JSON and a reader take it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, int | str):
        return value
    return f"{len(value)} numbers" if isinstance(value, list | tuple) else str(value)


class Edit(Values):
    """One safe change of a config: the value at `path`, or its removal."""

    path: tuple[str, ...]
    value: Any = None
    remove: bool = False

    def __str__(self) -> str:
        name = ".".join(self.path)
        return f"{name} removed" if self.remove else f"{name} = {self.value!r}"


class Finding(Values):
    """Something that is not as it should be.

    severity: wrong gives other numbers than meant; a warning does so in some engine or under some use; a
    note is worth knowing. said: what it is. evidence: the numbers, named with their units. remedy: what to do.
    edits: what makes the config right without a guess; without any, `by_hand` says why none is safe.
    """

    check: str
    severity: Severity
    said: str
    evidence: dict[str, Number]
    remedy: str
    edits: tuple[Edit, ...] = ()
    by_hand: str = ""

    @field_validator("evidence", mode="before")
    @classmethod
    def _plain(cls, evidence: Mapping[str, object]) -> dict[str, Number]:
        return {name: plain(value) for name, value in evidence.items()}


class Check(Values):
    """A check and what became of it; `said`: what was measured where it passed, why it was not made."""

    name: str
    outcome: Literal["passed", "found", "not made"]
    said: str = ""


class Curve(Values):
    """A measured line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class Diagnosis(Values):
    """What was found in a checkpoint when it serves `length` tokens.

    trained_length: tokens; None where nothing says it. turns: of each frequency, in training and when served.
    phase_error: by position, radians, of the layer and frequency that are furthest off. partial: None, or what
    was left out.
    """

    checkpoint: str
    family: str
    dtype: str | None
    length: int
    trained_length: int | None
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...]
    turns: tuple[Curve, ...] = ()
    phase_error: Curve | None = None
    partial: str | None = None

    @property
    def wrong(self) -> bool:
        """Whether any finding is wrong, not only worth a warning."""
        return any(finding.severity == "wrong" for finding in self.findings)


class NotMade(Exception):
    """Why a check cannot be made, in a few words."""
