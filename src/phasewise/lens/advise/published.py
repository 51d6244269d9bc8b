"""What others published on extending RoPE, as functions of n pairs, base and length, for geometric rates.

A pair i turns base^(-i/n) radians a token, so L base^(-i/n) / 2 pi times within L tokens.
"""

import math


def correction_range(n: int, base: float, length: int) -> tuple[int, int]:
    """YaRN's ramp: the last pair that is kept (32 turns), and the first that is interpolated in full (under 1).

    The latter is the critical pair: beyond it phases are new (arXiv 2310.05209; LongRoPE2, arXiv 2502.20082).
    Source: YaRN, arXiv 2309.00071.

    >>> correction_range(64, 10_000.0, 4096)
    (20, 46)
    """
    return (
        max(0, math.floor(_pair(n, base, length, turns=32.0))),
        max(0, math.ceil(_pair(n, base, length, turns=1.0))),
    )


def llama3_range(n: int, base: float, length: int) -> tuple[int, int]:
    """Llama 3.1's rule: the first pair it changes (under 4 turns), and the first it divides in full (under 1).

    Source: the code released with Llama 3.1.

    >>> llama3_range(64, 500_000.0, 8192)
    (29, 35)
    """
    first, full = (math.ceil(_pair(n, base, length, turns=turns)) for turns in (4.0, 1.0))
    return max(0, first), max(0, full)


def _pair(n: int, base: float, length: int, *, turns: float) -> float:
    """The pair, as a real number, that turns so often within `length` tokens."""
    return n * math.log(length / (turns * 2 * math.pi)) / math.log(base)
