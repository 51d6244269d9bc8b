"""How much a token says about the one r places later: mutual information against distance.

Letters: k classes, n distances, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

BLOCKS = 32
LARGEST_SHARE = 1 / 16
REPLICATES = 200
CHUNK = 1 << 19
BAND = (2.5, 97.5)

Shuffle = Literal["document", "corpus"]
Blocks = Literal["documents", "pieces", "windows"]


@dataclass(frozen=True)
class Curve:
    """A quantity against distance, with what each block of the data contributes to it.

    distances: int64 [n], ascending. pairs: int64 [n], how many were counted at each.
    parts: float64 [B, n]: the blocks' parts of the value; they sum to it.
    shares: float64 [B, n]: the blocks' shares of the pairs; they sum to 1.
    baseline: float64 [n], what was subtracted, in the same unit.
    blocks: whether a block is a group of whole documents, a piece of all of them, or a window of a model.
    """

    distances: np.ndarray
    pairs: np.ndarray
    parts: np.ndarray
    shares: np.ndarray
    baseline: np.ndarray
    blocks: Blocks

    @property
    def value(self) -> np.ndarray:
        """The estimate, float64 [n]."""
        return self.parts.sum(0)

    @property
    def error(self) -> np.ndarray:
        """Its standard error by the jackknife over blocks of unequal size (Busing and others, 1999)."""
        counted = self.shares > 0
        whole = self.parts / np.where(counted, self.shares, 1)
        spread = self.shares / (1 - np.minimum(self.shares, 0.999)) * (whole - self.value) ** 2
        return np.sqrt((spread * counted).sum(0) / counted.sum(0))

    def replicates(self, count: int = REPLICATES, *, seed: int = 0) -> np.ndarray:
        """Curves of resampled blocks, float64 [count, n]: the same blocks at every distance of a curve."""
        blocks = len(self.parts)
        drawn = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=count)
        share = drawn @ self.shares
        return np.where(share > 0, drawn @ self.parts / np.where(share > 0, share, 1), self.value)

    def band(self, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The 95 % percentile interval of the resampled curves, low and high, float64 [n] each."""
        low, high = np.percentile(self.replicates(seed=seed), BAND, axis=0)
        return low, high


def log_spaced(longest: int, *, count: int = 48) -> np.ndarray:
    """At most `count` distances from 1 to `longest`, evenly spaced in their logarithm, int64, ascending.

    >>> log_spaced(1000, count=9).tolist()
    [1, 2, 6, 13, 32, 75, 178, 422, 1000]
    """
    distances = np.array([1, longest], dtype=np.int64)
    for steps in range(count, 50 * count):
        finer = np.unique(np.geomspace(1, longest, steps).round().astype(np.int64))
        if len(finer) > count:
            break
        distances = finer
        if len(finer) in (count, longest):
            break
    return np.unique(distances)


def dependency(
    classes: np.ndarray,
    lengths: np.ndarray,
    *,
    distances: Sequence[int] | np.ndarray,
    later: np.ndarray | None = None,
    shuffle: Shuffle = "document",
    seed: int = 0,
    on_distance: Callable[[int], None] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
) -> Curve:
    """The mutual information, in nats, between tokens r apart in one document, beyond a shuffled baseline.

    classes: uint8 [tokens], all documents in a row, at most 256 classes. lengths: int [documents].
    distances: ascending, from 1 to the longest document's last. on_distance is told how many are done.
    later: uint8 [tokens], what the second of two tokens is taken from, where it is not `classes` itself.
    stop is asked before each distance: when it says so, the curve has the distances that were done; if none
        were, KeyboardInterrupt is raised.
    shuffle: the baseline is the same estimate after the tokens of each document, or of the corpus, were put
        in random order. "document" subtracts what needs no order (a document's own vocabulary) and leaves
        what only positions can carry; near the length of a document that bends a power law down. "corpus"
        subtracts nothing but chance, and keeps documents' vocabularies as a floor at all distances.

    The plug-in estimate is too high by (k - 1)^2 / 2N for N independent pairs, and by more where tokens
    repeat, as neighbouring pairs are then not independent: a correction that counts cells (Miller-Madow) and
    a shuffle, which destroys the repetition, both leave that excess. So both estimates, of the tokens and of
    the shuffled tokens, are first corrected by the jackknife over blocks much longer than a repetition, which
    removes every part of the bias that falls as 1/N (Quenouille; Zahl 1977 for entropies), and the
    difference is taken after. Blocks are 32 groups of whole documents, or 32 pieces where there are fewer
    documents or one document holds over a sixteenth of the tokens: bands then speak of these documents only.
    Counts are exact: every pair is counted once, in the block of its first token.

    Raises ValueError when a distance has no pairs in two blocks.

    >>> tokens = np.random.default_rng(0).integers(0, 4, 20_000).astype(np.uint8)
    >>> curve = dependency(tokens, np.array([20_000]), distances=[1, 10, 100])
    >>> bool((abs(curve.value) < 4 * curve.error).all())
    True
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    distances = np.asarray(distances, dtype=np.int64)
    _require(classes, lengths, distances)
    assert later is None or later.shape == classes.shape
    tokens, count = _renumbered(classes)
    following, following_count = (tokens, count) if later is None else _renumbered(later)
    count = max(count, following_count)
    remaining = _remaining(lengths)
    edges, blocks = _blocks(lengths)
    shuffled = _shuffled(tokens, lengths, shuffle, np.random.default_rng(seed))

    pairs, parts, shares, baseline = [], [], [], []
    for done, distance in enumerate(distances.tolist(), start=1):
        if stop():
            break
        own = _joint(tokens, following, remaining, edges, distance, count)
        counted = own.sum(1)
        if np.count_nonzero(counted) < 2:
            raise ValueError(
                f"pairs of tokens {distance} apart lie in fewer than two blocks of the corpus, so they "
                "have no error bars; ask for shorter distances, or give a longer corpus"
            )
        after = shuffled if later is None else following
        chance = _jackknifed(_joint(shuffled, after, remaining, edges, distance, count))
        pairs.append(int(counted.sum()))
        parts.append(_jackknifed(own) - chance)
        shares.append(counted / counted.sum())
        baseline.append(chance.sum())
        on_distance(done)
    if not pairs:
        raise KeyboardInterrupt
    return Curve(
        distances=distances[: len(pairs)],
        pairs=np.array(pairs),
        parts=np.stack(parts, axis=1),
        shares=np.stack(shares, axis=1),
        baseline=np.array(baseline),
        blocks=blocks,
    )


def mutual_information(counts: np.ndarray) -> np.ndarray:
    """Plug-in mutual information in nats of joint counts [..., k, k]; 0 where nothing is counted."""
    total = counts.sum((-2, -1))
    joint = _count_log_count(counts).sum((-2, -1))
    rows, columns = (_count_log_count(counts.sum(axis)).sum(-1) for axis in (-1, -2))
    at_least_one = np.maximum(total, 1)
    return np.log(at_least_one) + (joint - rows - columns) / at_least_one


def _count_log_count(counts: np.ndarray) -> np.ndarray:
    return counts * np.log(np.maximum(counts, 1))


def _jackknifed(counts: np.ndarray) -> np.ndarray:
    """Each block's part of the jackknifed mutual information, of joint counts [B, k * k]."""
    size = round(counts.shape[1] ** 0.5)
    whole = counts.sum(0)
    share = counts.sum(1) / whole.sum()
    without = np.array([mutual_information((whole - block).reshape(size, size)) for block in counts])
    return mutual_information(whole.reshape(size, size)) - (1 - share) * without


def _joint(
    tokens: np.ndarray,
    following: np.ndarray,
    remaining: np.ndarray,
    edges: np.ndarray,
    distance: int,
    classes: int,
) -> np.ndarray:
    """Counts of a token and what follows `distance` later in its document, int64 [B, k * k].

    A block's code buffer (8 bytes a pair) and its table (512 KiB for 256 classes) stay in the second-level
    cache or near it; bincount gets the type it wants and copies nothing.
    """
    counts = np.zeros((len(edges) - 1, classes * classes), dtype=np.int64)
    for block, (start, end) in enumerate(pairwise(edges.tolist())):
        for first in range(start, end, CHUNK):
            last = min(first + CHUNK, end, len(tokens) - distance)
            if first >= last:
                break
            codes = np.multiply(tokens[first:last], classes, dtype=np.intp)
            codes += following[first + distance : last + distance]
            codes = codes[remaining[first:last] >= distance]
            counts[block] += np.bincount(codes, minlength=classes * classes)
    return counts


def _renumbered(classes: np.ndarray) -> tuple[np.ndarray, int]:
    """The same tokens with the classes that occur numbered from 0, and how many these are: tables stay small."""
    occurring = np.zeros(256, dtype=bool)
    for start in range(0, len(classes), CHUNK):
        occurring[classes[start : start + CHUNK]] = True
    return (occurring.cumsum() - 1).astype(np.uint8)[classes], int(occurring.sum())


def _remaining(lengths: np.ndarray) -> np.ndarray:
    """How many tokens follow each one in its document, int32 [tokens]."""
    remaining = np.empty(lengths.sum(), dtype=np.int32)
    start = 0
    for length in lengths.tolist():
        remaining[start : start + length] = np.arange(length - 1, -1, -1)
        start += length
    return remaining


def _blocks(lengths: np.ndarray) -> tuple[np.ndarray, Blocks]:
    """Where blocks begin and the last ends, in tokens, int64 [B + 1]."""
    total, ends = int(lengths.sum()), lengths.cumsum()
    even = np.arange(BLOCKS + 1) * total // BLOCKS
    if len(lengths) < BLOCKS or lengths.max() > total * LARGEST_SHARE:
        return even, "pieces"
    boundaries = np.concatenate([[0], ends])
    after = np.searchsorted(boundaries, even)
    before = np.maximum(after - 1, 0)
    nearer = np.where(boundaries[after] - even < even - boundaries[before], after, before)
    nearer[0], nearer[-1] = 0, len(lengths)
    return np.unique(boundaries[nearer]), "documents"


def _shuffled(
    tokens: np.ndarray, lengths: np.ndarray, shuffle: Shuffle, random: np.random.Generator
) -> np.ndarray:
    shuffled = tokens.copy()
    ends = lengths.cumsum() if shuffle == "document" else np.array([len(tokens)])
    start = 0
    for end in ends.tolist():
        random.shuffle(shuffled[start:end])
        start = end
    return shuffled


def _require(classes: np.ndarray, lengths: np.ndarray, distances: np.ndarray) -> None:
    assert classes.dtype == np.uint8
    assert classes.shape == (lengths.sum(),)
    if len(distances) == 0 or distances[0] < 1 or (np.diff(distances) < 1).any():
        raise ValueError(f"distances must ascend from at least 1, but are {distances.tolist()}")
    longest = int(lengths.max(initial=0))
    if distances[-1] >= longest:
        raise ValueError(
            f"the longest document has {longest} tokens, so no two are {distances[-1]} apart; "
            f"ask for distances up to {max(0, longest - 1)}, or give longer documents"
        )
