"""How far back the layers of a model see, and which of them have rates: what a rule for longer contexts can reach.

Rates matter at the distances that a layer sees. Where every layer that has any sees through a window, another rule
changes what those layers do within it, and nothing beyond, as nothing is seen there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sight:
    """Whether a layer of attention has rates, and its window: a query sees keys at a distance below it; None: all."""

    rates: bool
    window: int | None


@dataclass(frozen=True)
class Bound:
    """Every layer with rates sees `window` tokens at most, itself counted. layers: how many those are.

    whole: layers without rates that see the whole context.
    """

    window: int
    layers: int
    whole: int

    @classmethod
    def of(cls, sights: Iterable[Sight]) -> Bound | None:
        """None where a layer with rates sees the whole context, or no layer has any.

        >>> Bound.of([Sight(True, 4096), Sight(True, 4096), Sight(False, None)])
        Bound(window=4096, layers=2, whole=1)
        """
        known = list(sights)
        windows = [sight.window for sight in known if sight.rates]
        bounded = [window for window in windows if window is not None]
        if not bounded or len(bounded) < len(windows):
            return None
        whole = sum(not sight.rates and sight.window is None for sight in known)
        return cls(max(bounded), len(bounded), whole)

    def __str__(self) -> str:
        others = "no layer of attention sees the whole context"
        if self.whole:
            see = "1 other sees" if self.whole == 1 else f"{self.whole} others see"
            others = f"{see} the whole context, without rates"
        count = "1 layer has" if self.layers == 1 else f"{self.layers} layers have"
        return f"{count} rates, and a window of {self.window:,} tokens at most; {others}"
