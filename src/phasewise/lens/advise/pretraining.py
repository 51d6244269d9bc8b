"""Rates to pretrain with, from a corpus alone: a base whose slowest rate covers what the data need, and a grid."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from rich.console import Console

from phasewise.data import Corpus
from phasewise.frequencies import Explicit, Geometric
from phasewise.lens.advise.evidence import need_of
from phasewise.lens.advise.grid import reaching
from phasewise.lens.dilation import windowed
from phasewise.lens.profile import Profiled
from phasewise.lens.spectrum import Values
from phasewise.lens.thresholds import UNEVEN
from phasewise.lens.width import quantile
from phasewise.model.reading import require_count
from phasewise.progress import bars

LEAST_WIDTH = 8.0
WIDEST_HEAD = 16_384  # as the widest model of a comparison
LIMITS = (
    "Mutual information between two tokens says nothing on retrieval, nor on what many tokens tell together: only "
    "a kernel that ends sharply makes the base smaller than the length asks for. The grid was not trained "
    "against the geometric one."
)


class Planned(Values):
    """Rates for RoPE (head_dim / 2 pairs) and PoPE (head_dim channels), radians a token.

    width: tokens within which 90 % of the kernel lies in windows of `length`, or a compact kernel's support;
    None: nothing stands above noise. reach: what the slowest rate covers, turning by pi: the support of a
    compact kernel, or else the length, as a dependence of many tokens together may reach further than that of
    two. rope_grid: half of the rates spread evenly in logarithm, half where the kernel has its mass.
    encodings: what speaks for each, by kind.
    """

    corpus: str
    length: int
    head_dim: int
    width: float | None
    reach: float
    rope_base: Geometric
    pope_base: Geometric
    rope_grid: Explicit
    profile: Profiled
    encodings: dict[str, str]
    limits: str


def plan(
    corpus: Corpus,
    *,
    length: int,
    head_dim: int,
    console: Console | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Planned:
    """Recommend rates for training on windows of `length` tokens with heads of `head_dim` channels.

    Raises ValueError for a head_dim that is odd, below 4 or above 16 384, and a length that no document fills.

    >>> from phasewise.data import load
    >>> found = plan(load("austen"), length=256, head_dim=16)
    >>> found.reach, round(found.rope_base.base), len(found.rope_grid.values)
    (256.0, 153, 8)
    """
    require_count("length", length, least=8)
    if head_dim % 2 or not 4 <= head_dim <= WIDEST_HEAD:
        raise ValueError(
            f"head_dim is {head_dim}; RoPE turns pairs, so give an even number from 4 to {WIDEST_HEAD}"
        )
    longest = int(corpus.split("train").lengths.max())
    if longest <= length:
        raise ValueError(
            f"a length of {length} needs a document of {length + 1} tokens, but the longest one in the train "
            f"split of {corpus.name} has {longest}: give longer documents or a shorter length"
        )
    with bars(console) as progress:
        need = need_of(corpus, length, progress=progress, stop=stop)
    n, profile = head_dim // 2, need.profile
    kernel = np.ones(length)
    width, reach = None, float(length)
    if need.kernel is not None:
        kernel = windowed(reaching(need.kernel, profile.power_law, length), length)
        width = quantile(kernel)
        if profile.width.kind == "compact" and profile.width.width is not None:
            width = profile.width.width
            reach = min(reach, max(LEAST_WIDTH, width))
    return Planned(
        corpus=corpus.name,
        length=length,
        head_dim=head_dim,
        width=width,
        reach=reach,
        rope_base=_covering(reach, n),
        pope_base=_covering(reach, head_dim),
        rope_grid=_grid(kernel, reach, n),
        profile=profile,
        encodings=_encodings(profile),
        limits=LIMITS,
    )


def described(planned: Planned) -> str:
    """What was found, in words, rules ready to paste."""
    width = "not seen above noise" if planned.width is None else f"{planned.width:.4g} tokens"
    lines = [
        f"{planned.corpus} in windows of {planned.length}: {planned.profile.verdict.kind}, width {width}",
        *(f"  {reason}" for reason in planned.profile.verdict.reasons),
        f"the slowest rate turns by pi within {planned.reach:g} tokens:",
        f"RoPE, head_dim {planned.head_dim}: {planned.rope_base.model_dump_json()}",
        f"PoPE, head_dim {planned.head_dim}: {planned.pope_base.model_dump_json()}",
        f"grid for RoPE: {planned.rope_grid.model_dump_json()}",
        *(f"{kind}: {said}" for kind, said in planned.encodings.items()),
        planned.limits,
    ]
    return "\n".join(lines)


def _covering(width: float, n: int) -> Geometric:
    """The base whose slowest of n rates turns by pi within the width."""
    return Geometric(base=(width / math.pi) ** (n / (n - 1)))


def _grid(kernel: np.ndarray, reach: float, n: int) -> Explicit:
    even = _covering(reach, n - n // 2).rates(n - n // 2).numpy() if n - n // 2 > 1 else np.ones(1)
    fields = [max(1.0, quantile(kernel, (place + 0.5) / (n // 2))) for place in range(n // 2)]
    rates = np.sort(np.concatenate([even, math.pi / np.array(fields)]))[::-1]
    return Explicit(values=tuple(float(f"{rate:.6g}") for rate in rates))


def _encodings(profile: Profiled) -> dict[str, str]:
    uneven = profile.unevenness is not None and profile.unevenness > UNEVEN
    near = profile.width.kind in ("compact", "decaying")
    distant = "single distances count far away" if uneven else "dependences far away are smooth"
    return {
        "rope, pope": f"rates give a resolution at any distance; {distant}"
        + (", so fast rates must stay fast when the context grows" if uneven else ""),
        "alibi": "a penalty that grows with distance fits dependences that end near"
        if near
        else "a penalty that grows with distance works against dependences that reach as far as the window",
        "tapa, nope": "the profile says nothing for or against them",
        "which one": "a profile does not tell which one learns it best: `phasewise compare` does",
    }
