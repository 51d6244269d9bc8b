"""Frequencies that the length served takes further than training ever did.

A frequency that makes no full turn in training shows only a part of its circle; a longer input takes it to
phases never seen. How far it went in training: the original length at the unscaled rate, or, where the config
states a longer one, that length at the rate in use there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from phasewise.frequencies import Explicit, Frequencies, Geometric
from phasewise.lens.doctor.diagnosis import Finding

TURN = 2 * math.pi
SLACK = 1 + 1e-6


def beyond(
    rule: Frequencies, n: int, *, where: str, length: int, trained: int, longest: int, polar: bool = False
) -> Iterator[Finding]:
    """A finding when frequencies of `rule` on n channels leave the field they were trained in.

    trained: the original length, longest: the length the checkpoint says it serves, in tokens. polar: PoPE's,
    which lose less by it.
    """
    base = getattr(rule, "base", None)
    plain = rule.rates(n, length=trained) if base is None else Geometric(base=base).rates(n)
    seen = plain * trained
    if longest > trained and not isinstance(rule, Explicit):
        seen = seen.maximum(rule.rates(n, length=longest) * longest)
    served = rule.rates(n, length=length) * length
    out = (seen < TURN) & (served > seen * SLACK)
    if not out.any():
        return
    first = int(out.nonzero()[0])
    yield Finding(
        check="field",
        severity="note" if polar else "warning",
        said=f"{int(out.sum())} of {n} frequencies{where} turn further than in training, where they made less "
        "than one turn",
        evidence={
            "length": length,
            "trained length": trained,
            "length stated": longest,
            "frequencies beyond": int(out.sum()),
            "first of them": first,
            "its turns in training": seen[first].item() / TURN,
            "its turns when served": served[first].item() / TURN,
            "largest reach beyond": (served / seen)[out].max().item(),
        },
        remedy="ask `phasewise advise` for a scaling, or serve at most the length stated",
        by_hand="which scaling keeps this checkpoint's answers is measured, not read off a config",
    )


def said(rules: list[tuple[Frequencies, int]], length: int) -> str:
    """What was measured where nothing is beyond: the slowest frequency's turns."""
    turns = [rule.rates(n, length=length).min().item() * length / TURN for rule, n in rules]
    return f"slowest frequency makes {min(turns):.3g} turns in {length:,} tokens" if turns else ""
