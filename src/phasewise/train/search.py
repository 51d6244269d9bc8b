"""LongRoPE's search: which divisor each channel's rate gets, by evolution from the published interpolations.

Ding et al., arXiv 2402.13753. Divisors never fall from a fast channel to a slower one and lie between 1 and
1.25 length / trained length. Children come from the better half of what is known, half of them by mutation
and half by crossing two. A search that was stopped repeats its draws and goes on after the last loss it has.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter

from phasewise.frequencies import LongRoPE
from phasewise.record import replacing
from phasewise.train.folder import read
from phasewise.train.rules import ByParts, Interpolate, Present, Search, StretchBase

BEYOND = 1.25
MUTATED, SPREAD = 0.3, 0.25
PUBLISHED = (Interpolate(), StretchBase(), ByParts())


class Candidate(BaseModel):
    """Divisors, one a channel, and the loss at the wanted length with them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    divisors: tuple[float, ...]
    loss: float


_FOUND = TypeAdapter(tuple[Candidate, ...])


def search(
    way: Search,
    present: Present,
    length: int,
    *,
    channels: int,
    loss_of: Callable[[LongRoPE], float],
    seed: int,
    path: Path,
) -> tuple[LongRoPE, tuple[Candidate, ...]]:
    """The rule of the candidate with the smallest loss, and all candidates in the order they were tried.

    The first three are position interpolation, NTK and YaRN. `loss_of` measures one; `path` keeps what is
    measured. Raises ValueError for a checkpoint whose rates are not a plain series, and a damaged `path`.
    """
    now = way.start(present)

    def rule(divisors: tuple[float, ...]) -> LongRoPE:
        return LongRoPE(
            base=now.base,
            short_factor=(1.0,) * channels,
            long_factor=divisors,
            original_length=present.length,
            factor=length / present.length,
        )

    remedy = "delete it to search again"
    known = read(path, _FOUND, "the record of a search", remedy) if path.exists() else ()
    tried: list[Candidate] = []
    first = _first(way, present, length, channels, seed)
    for generation in range(way.generations + 1):
        for divisors in (
            first if generation == 0 else _children(way, tried, length, present, generation, seed)
        ):
            if len(tried) < len(known):
                if known[len(tried)].divisors != divisors:
                    raise ValueError(f"{path} is of another search: {remedy}")
                tried.append(known[len(tried)])
                continue
            tried.append(Candidate(divisors=divisors, loss=loss_of(rule(divisors))))
            with replacing(path) as unfinished:
                unfinished.write_bytes(_FOUND.dump_json(tuple(tried), indent=1))
    return rule(min(tried, key=lambda candidate: candidate.loss).divisors), tuple(tried)


def _first(way: Search, present: Present, length: int, channels: int, seed: int) -> list[tuple[float, ...]]:
    plain = way.start(present).rates(channels).numpy()
    found = []
    for published in PUBLISHED:
        rule = published.at(present, length)
        assert rule is not None
        found.append(plain / rule.rates(channels).numpy())
    random = np.random.default_rng([seed, 0])
    while len(found) < way.population:
        found.append(_mutated(found[len(found) % len(PUBLISHED)], random))
    return [_legal(divisors, present, length) for divisors in found]


def _children(
    way: Search, tried: list[Candidate], length: int, present: Present, generation: int, seed: int
) -> list[tuple[float, ...]]:
    random = np.random.default_rng([seed, generation])
    best = sorted(tried, key=lambda candidate: candidate.loss)[: max(way.population // 2, 2)]
    parents = [np.array(candidate.divisors) for candidate in best]
    found = []
    for number in range(way.children):
        one, other = random.choice(len(parents), size=2, replace=False)
        if number % 2:
            found.append(np.where(random.random(len(parents[one])) < 0.5, parents[one], parents[other]))
        else:
            found.append(_mutated(parents[one], random))
    return [_legal(divisors, present, length) for divisors in found]


def _mutated(divisors: np.ndarray, random: np.random.Generator) -> np.ndarray:
    changed = random.random(len(divisors)) < MUTATED
    return np.where(changed, divisors * np.exp(SPREAD * random.standard_normal(len(divisors))), divisors)


def _legal(divisors: np.ndarray, present: Present, length: int) -> tuple[float, ...]:
    highest = BEYOND * length / present.length
    return tuple(np.sort(divisors.clip(1.0, highest)).round(6).tolist())
