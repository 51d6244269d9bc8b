"""What others published on extending RoPE, as functions of n pairs, base and length, for geometric rates.

A pair i turns base^(-i/n) radians a token, so L base^(-i/n) / 2 pi times within L tokens.
"""

import math

from phasewise.frequencies import Geometric


def critical_pair(n: int, base: float, length: int) -> int:
    """The first pair that does not complete a turn within the trained length: beyond it phases are new.

    Source: Scaling laws of RoPE-based extrapolation, arXiv 2310.05209; LongRoPE2, arXiv 2502.20082.

    >>> critical_pair(64, 10_000.0, 4096), critical_pair(64, 500_000.0, 8192)  # LLaMA-2, LLaMA-3
    (46, 35)
    """
    return max(0, math.ceil(_pair(n, base, length, turns=1.0)))


def correction_range(
    n: int, base: float, length: int, *, fast: float = 32.0, slow: float = 1.0
) -> tuple[int, int]:
    """YaRN's ramp: the last pair that is kept, and the first that is interpolated in full.

    Source: YaRN, arXiv 2309.00071.

    >>> correction_range(64, 10_000.0, 4096)
    (20, 46)
    """
    return (
        max(0, math.floor(_pair(n, base, length, turns=fast))),
        max(0, math.ceil(_pair(n, base, length, turns=slow))),
    )


def llama3_range(n: int, base: float, length: int) -> tuple[int, int]:
    """Llama 3.1's rule: the first pair it changes (under 4 turns), and the first it divides in full (under 1).

    Source: the code released with Llama 3.1.

    >>> llama3_range(64, 500_000.0, 8192)
    (29, 35)
    """
    first, full = (math.ceil(_pair(n, base, length, turns=turns)) for turns in (4.0, 1.0))
    return max(0, first), max(0, full)


def changed_base(base: float, trained: int, wanted: int) -> Geometric:
    """The base at which the critical pair of the trained length is that of the wanted one.

    theta' = theta^(ln(L' / 2 pi) / ln(L / 2 pi)). Raises ValueError for a trained length below a turn of the
    fastest pair. Source: Scaling laws of RoPE-based extrapolation, arXiv 2310.05209.

    >>> round(changed_base(10_000.0, 4096, 16_384).base)
    71738
    """
    if trained <= 2 * math.pi:
        raise ValueError(f"trained length is {trained}; a base change needs at least 7 tokens")
    turn = 2 * math.pi
    return Geometric(base=base ** (math.log(wanted / turn) / math.log(trained / turn)))


def _pair(n: int, base: float, length: int, *, turns: float) -> float:
    """The pair, as a real number, that turns so often within `length` tokens."""
    return n * math.log(length / (turns * 2 * math.pi)) / math.log(base)
