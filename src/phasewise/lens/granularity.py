"""One corpus cut into tokens of several sizes, each token hashed into one of at most 256 classes."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import numpy as np

from phasewise.data import Corpus, load
from phasewise.data.corpus import HASHED_EXAMPLES

MOST_CLASSES = 256
BY_UNIT = {
    "byte": ("bytes", "bpe:1024", "bpe:8192", "words"),
    "note": ("notes", "steps"),
    "base": ("bases", "kmers:4", "kmers:8"),
    "k-mer": ("k-mers",),
    "event": ("events",),
    "token": ("tokens",),
    "character": ("characters",),
}
FINEST = {unit: "character" if unit == "byte" else unit for unit in BY_UNIT}
VOICES = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Sequences:
    """The documents of a split at one granularity.

    classes: uint8 [tokens], all documents in a row; each below `count`.
    lengths: int64 [documents], the tokens of each.
    vocab_size: distinct tokens there could be before hashing; None where that is not bounded.
    span: mean length of a token in the corpus's finest unit, `unit`: distances times span compare.
    """

    granularity: str
    classes: np.ndarray
    lengths: np.ndarray
    count: int
    vocab_size: int | None
    span: float
    unit: str


def sequences(corpus: Corpus, granularity: str, *, split: str = "train") -> Sequences:
    """The documents of a corpus at one granularity, as classes.

    granularity: for text "bytes", "words" (runs of letters and digits, and single other signs), or what
        `load` takes as a tokenizer: "bpe:SIZE", PATH of a tokenizer.json; for music "notes" or "steps" (all
        voices of a sixteenth); for genomes "bases" or "kmers:K" (K bases, not overlapping).
    Tokens keep classes of their own where at most 256 exist. Otherwise they are hashed, which can only lower
    their mutual information. Of a generated corpus, the first 10 000 examples are taken.

    Raises ValueError for a granularity that the corpus does not have.

    >>> words = sequences(load("austen"), "words")
    >>> words.count, 4 < words.span < 6
    (256, True)
    """
    require_granularity(corpus, granularity)
    given = corpus.split(split)
    taken = np.arange(len(given) if corpus.task is None else min(len(given), HASHED_EXAMPLES))
    documents = given.take(taken)
    own = BY_UNIT[corpus.unit][0]
    unit = FINEST[corpus.unit]
    if granularity == own:
        total = sum(len(document) for document in documents)
        span = _characters(documents) / total if corpus.unit == "byte" else 1.0
        return _joined(granularity, documents, corpus.vocab_size, span=span, unit=unit)
    if corpus.unit == "byte" and granularity == "words":
        words = [_words(corpus.decode(document)) for document in documents]
        span = _characters(documents) / max(1, sum(len(document) for document in words))
        return Sequences(granularity, *_flat(words), MOST_CLASSES, None, span, unit)
    if corpus.unit == "byte":
        tokenized = load(corpus.name, tokenizer=granularity)
        pieces = tokenized.split(split).take(taken)
        span = _characters(documents) / sum(len(piece) for piece in pieces)
        return _joined(granularity, pieces, tokenized.vocab_size, span=span, unit=unit)
    if corpus.unit == "note":
        return _grouped(granularity, documents, VOICES, corpus.vocab_size, unit)
    size = int(granularity.partition(":")[2])
    return _grouped(granularity, documents, size, corpus.vocab_size, unit)


def granularities_of(corpus: Corpus) -> tuple[str, ...]:
    """Those a corpus is profiled at unless told: no BPE where none is trained, of what is generated or in shards."""
    own = BY_UNIT[corpus.unit]
    if corpus.task is None and not _in_shards(corpus):
        return own
    return tuple(granularity for granularity in own if not granularity.startswith("bpe:"))


def require_granularity(corpus: Corpus, granularity: str) -> None:
    """Raise ValueError, naming those there are, for a granularity that the corpus does not have."""
    kind, _, size = granularity.partition(":")
    known = granularities_of(corpus)
    others = {
        "byte": granularity in known
        or not (
            granularity in BY_UNIT["note"] + BY_UNIT["base"]
            or kind == "kmers"
            or _in_shards(corpus)
            or (kind == "bpe" and corpus.task is not None)
        ),
        "note": granularity == "steps",
        "base": kind == "kmers" and size.isdecimal() and 2 <= int(size) <= 31,
    }
    if granularity != known[0] and not others.get(corpus.unit, False):
        raise ValueError(
            f"{corpus.name} has no granularity {granularity!r}; its tokens are {corpus.unit}s, "
            f"so choose from {', '.join(known)}"
        )


def _in_shards(corpus: Corpus) -> bool:
    return corpus.name.startswith("shards:")


def _characters(documents: list[np.ndarray]) -> int:
    """Characters of UTF-8 bytes: all bytes but those that continue one."""
    return sum(int(((document & 0xC0) != 0x80).sum()) for document in documents)


def _words(text: str) -> np.ndarray:
    hashes = (zlib.crc32(found.group().encode()) for found in _WORD.finditer(text))
    return np.fromiter((value & 0xFF for value in hashes), dtype=np.uint8)


def _grouped(granularity: str, documents: list[np.ndarray], size: int, base: int, unit: str) -> Sequences:
    """Tokens of `size` consecutive ones, as digits of a number; a shorter rest of a document is dropped."""
    digits = np.uint64(base) ** np.arange(size, dtype=np.uint64)
    groups = [
        document[: len(document) // size * size].reshape(-1, size).astype(np.uint64) @ digits
        for document in documents
    ]
    return _joined(granularity, groups, base**size, span=float(size), unit=unit)


def _joined(
    granularity: str, documents: list[np.ndarray], vocab_size: int, *, span: float, unit: str
) -> Sequences:
    hashed = [_hashed(document, vocab_size) for document in documents]
    return Sequences(granularity, *_flat(hashed), min(vocab_size, MOST_CLASSES), vocab_size, span, unit)


def _hashed(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Fibonacci hashing (Knuth, volume 3, 6.4): consecutive tokens spread evenly over the classes."""
    if vocab_size <= MOST_CLASSES:
        return tokens.astype(np.uint8)
    return ((tokens.astype(np.uint64) * _GOLDEN) >> np.uint64(56)).astype(np.uint8)


def _flat(documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    return np.concatenate(documents) if len(documents) else np.zeros(0, dtype=np.uint8), lengths
