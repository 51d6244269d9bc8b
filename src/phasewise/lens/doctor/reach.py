"""Frequencies that the length served takes further than training ever did.

A frequency that makes no full turn in training shows only a part of its circle; a longer input takes it to
phases never seen. How far it went in training: the original length at the unscaled rate, or, where the config
states a longer one, that length at the rate in use there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from phasewise.frequencies import Explicit, Frequencies, Geometric
from phasewise.lens.doctor.diagnosis import Curve, Finding, Number
from phasewise.model.sight import Bound

TURN = 2 * math.pi
SLACK = 1 + 1e-6


@dataclass(frozen=True)
class Field:
    """How far the frequencies of a rule on n channels went in training, and go when `length` tokens are served.

    trained: the original length, longest: the length the checkpoint says it serves, in tokens. where: which
    layers, in words. polar: PoPE's, which lose less by leaving their field. sees: the longest window of those layers,
    where each has one.
    """

    rule: Frequencies
    n: int
    length: int
    trained: int
    longest: int
    where: str = ""
    polar: bool = False
    sees: int | None = None

    @property
    def seen(self) -> Tensor:
        """Radians that each frequency turned through in training, float64 [n]."""
        base = getattr(self.rule, "base", None)
        plain = (
            self.rule.rates(self.n, length=self.trained)
            if base is None
            else Geometric(base=base).rates(self.n)
        )
        seen = plain * self.trained
        if self.longest == self.trained or isinstance(self.rule, Explicit):
            return seen
        return seen.maximum(self.rule.rates(self.n, length=self.longest) * self.longest)

    @property
    def served(self) -> Tensor:
        """Radians that each turns through at the length served, as far as a layer sees, float64 [n]."""
        return self.rule.rates(self.n, length=self.length) * self.reach

    @property
    def reach(self) -> int:
        """Tokens of the length served that a layer with rates sees at once."""
        return self.length if self.sees is None else min(self.length, self.sees)

    @property
    def scaled(self) -> bool:
        """Whether the rule is one for longer contexts."""
        return not isinstance(self.rule, Geometric | Explicit) and getattr(self.rule, "factor", None) != 1

    def findings(self) -> Iterator[Finding]:
        """One when frequencies that made less than a turn in training go further."""
        seen, served = self.seen, self.served
        out = (seen < TURN) & (served > seen * SLACK)
        if not out.any():
            return
        first = int(out.nonzero()[0])
        yield Finding(
            check="field",
            severity="note" if self.polar else "warning",
            said=f"{int(out.sum())} of {self.n} frequencies{self.where} turn further than in training, where they "
            "made less than one turn",
            evidence={
                "length": self.length,
                "trained length": self.trained,
                "length stated": self.longest,
                "frequencies beyond": int(out.sum()),
                "first of them": first,
                "its turns in training": seen[first].item() / TURN,
                "its turns when served": served[first].item() / TURN,
                "largest reach beyond": (served / seen)[out].max().item(),
            },
            remedy="ask `phasewise advise` for a scaling, or serve at most the length stated",
            by_hand="which scaling keeps this checkpoint's answers is measured, not read off a config",
        )

    def turns(self) -> tuple[Curve, Curve]:
        """Full turns of each frequency in training and when served."""
        x = tuple(float(place) for place in range(self.n))
        return tuple(
            Curve(name=f"{name}{self.where}, {length:,} tokens", x=x, y=tuple((angle / TURN).tolist()))
            for name, length, angle in (
                ("in training", self.trained, self.seen),
                ("served", self.reach, self.served),
            )
        )  # type: ignore[return-value]


def asked(field: Field) -> bool:
    """Whether it matters how far layers with rates see: beyond what is stated, or where rates are scaled."""
    return field.length > field.longest or field.scaled


def within(bound: Bound | None, fields: Sequence[Field]) -> Iterator[Finding]:
    """One where layers with rates have windows that end within the trained length: scaling has no use there."""
    if bound is None or any(bound.window > field.trained for field in fields):
        return
    first = fields[0]
    evidence: dict[str, Number] = {
        "layers with rates": bound.layers,
        "their window": bound.window,
        "layers that see the whole context, without rates": bound.whole,
        "length": first.length,
        "trained length": first.trained,
    }
    if scaled := next((field for field in fields if field.scaled), None):
        yield Finding(
            check="field",
            severity="warning",
            said=f"{bound}: {scaled.rule.kind} changes what layers do within their windows, and no frequency would go "
            "further than in training without it",
            evidence=evidence,
            remedy="remove the scaling, unless the checkpoint was trained with it",
            by_hand="whether the checkpoint was trained with it is not in the config",
        )
    else:
        yield Finding(
            check="field",
            severity="note",
            said=f"{bound}: no frequency goes further than in training at any length, so that no scaling is of use",
            evidence=evidence,
            remedy="leave the rates; ask `phasewise evaluate` what the model does at this length",
            by_hand="nothing is known to be wrong",
        )


def said(fields: Sequence[Field]) -> str:
    """What was measured where nothing is beyond: the slowest frequency's turns."""
    least = min((field.served.min().item() / TURN for field in fields), default=None)
    return "" if least is None else f"slowest frequency makes {least:.3g} turns in {fields[0].reach:,} tokens"
