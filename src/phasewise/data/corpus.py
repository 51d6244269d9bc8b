"""What a corpus is: documents of tokens in three splits, with where they come from and on what terms.

A document is a one-dimensional integer array. Nothing here or downstream joins two documents.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, overload

import numpy as np

SPLITS = ("train", "validation", "test")
Unit = Literal["byte", "token", "note", "event", "character", "base", "k-mer"]
HASHED_EXAMPLES = 10_000


class Split(Sequence[np.ndarray]):
    """The documents of one split, held compactly or made when asked for; a sequence of token arrays."""

    @property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """Tokens in each document, int64 [documents]."""

    @abstractmethod
    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        """The documents at `indices`, int64 [n]."""

    @cached_property
    def longest(self) -> int:
        """Tokens in the longest document."""
        return int(self.lengths.max())

    def cumulative_rows(self, context: int) -> np.ndarray:
        """Rows of `context` targets that the documents hold, running sum, float64 [documents].

        A shorter document counts as one row, one without targets as none. Kept for the context last asked for.
        """
        known: tuple[int, np.ndarray] | None = self.__dict__.get("_cumulative_rows")
        if known is None or known[0] != context:
            targets = self.lengths - 1
            rows = np.where(targets > 0, np.maximum(1.0, targets / context), 0.0).cumsum()
            known = self.__dict__["_cumulative_rows"] = (context, rows)
        return known[1]

    def draw(
        self, random: np.random.Generator, count: int, context: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`count` windows: their documents, where they start, and their targets, `context` or a whole document's.

        Starts are drawn as if a window might stand out of its document by half, and moved inside. So a token at
        an end of a document is drawn at least half as often as the average one, and none more than half more often.
        """
        rows = self.cumulative_rows(context)
        chosen = np.searchsorted(rows, random.random(count) * rows[-1], side="right")
        targets = self.lengths[chosen] - 1
        last = np.maximum(0, targets - context)
        starts = random.integers(-(context // 2), last + context // 2 + 1).clip(0, last)
        return chosen, starts, np.minimum(targets, context)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.take(np.array([index % len(self)]))[0]


class Made(Split):
    """Documents that are made when they are asked for, each a function of its stream and index alone."""

    def __init__(self, stream: int, size: int) -> None:
        self._stream, self._size = stream, size

    def __len__(self) -> int:
        return self._size


class Documents(Split):
    """Documents held in memory as one array of tokens, uint16 or int32 [tokens], and their lengths.

    >>> documents = Documents.join([[3, 1, 2], [5]], vocab_size=10)
    >>> [document.tolist() for document in documents]
    [[3, 1, 2], [5]]
    """

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        assert tokens.shape == (lengths.sum(),)
        self._tokens = tokens
        self._lengths = lengths.astype(np.int64)
        self._ends = np.cumsum(self._lengths)

    @classmethod
    def join(cls, documents: Iterable[Sequence[int] | np.ndarray], *, vocab_size: int) -> Documents:
        """Copies `documents` into one array of the smallest type that holds `vocab_size` tokens."""
        dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        arrays = [np.asarray(document, dtype=dtype) for document in documents]
        return cls(np.concatenate(arrays), np.array([len(array) for array in arrays]))

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        ends, lengths = self._ends[indices], self._lengths[indices]
        return [
            self._tokens[end - length : end]
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Task:
    """A corpus of questions whose answers alone are scored.

    row_length: the width every example is padded to, in tokens; examples are never cut.
    answer_length: how many tokens at the end of an example are its answer; None where answers differ.
    answer_after: then, the token whose last occurrence in an example ends its question.
    """

    row_length: int
    answer_length: int | None = 1
    answer_after: int | None = None

    def answer_of(self, example: np.ndarray) -> int:
        """How many tokens at the end of an example [n] are its answer."""
        if self.answer_length is not None:
            return self.answer_length
        (found,) = np.nonzero(example == self.answer_after)
        return len(example) - 1 - int(found[-1])


@dataclass(frozen=True)
class Corpus:
    """Documents of tokens in the splits "train", "validation" and "test".

    name: what `load` was given, with what else decides the tokens.
    source, licence: one sentence each, for tables and reports.
    unit: what one token is.
    vocab_size: tokens lie in [0, vocab_size); padding is written 0 and marked by its segment, -1.
    sha256: of every split's document lengths and tokens (a generated split: of its first 10 000 examples).
    splits: split name -> sequence of documents, each uint16 or int32 [tokens].
    decode: tokens -> readable text.
    encode: text -> tokens, without special ones; None where the data are not text.
    tokenizer: what a tokenizer.json holds of it; None for bytes, and where the data are not text.
    bytes_per_token: UTF-8 bytes a token on average, for each split; None where the data are not text.
    task: None for language modelling, where every token but a document's first is scored.
    """

    name: str
    source: str
    licence: str
    unit: Unit
    vocab_size: int
    sha256: str
    splits: Mapping[str, Split]
    decode: Callable[[np.ndarray], str]
    bytes_per_token: Mapping[str, float] | None = None
    task: Task | None = None
    encode: Callable[[str], np.ndarray] | None = None
    tokenizer: str | None = None

    def split(self, name: str) -> Split:
        """The documents of split `name`; ValueError when there is none of that name."""
        if name not in self.splits:
            raise ValueError(f"{self.name} has no split {name!r}; it has {', '.join(self.splits)}")
        return self.splits[name]

    def require_known(self, vocab_size: int) -> None:
        """Raise ValueError for more kinds of tokens than a model of `vocab_size` knows."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"{self.name} has {self.vocab_size} tokens and the model knows {vocab_size}; "
                "give the data and tokenizer that the model was trained with"
            )


def sha256_of(splits: Mapping[str, Split], *, examples: int = HASHED_EXAMPLES) -> str:
    """Hash of every split's name, lengths and tokens (of a generated split: its first `examples`)."""
    digest = hashlib.sha256()
    for name, split in splits.items():
        whole = isinstance(split, Documents)
        documents = split.take(np.arange(len(split) if whole else min(len(split), examples)))
        digest.update(f"{name}:{len(split)}".encode())
        digest.update(np.array([len(document) for document in documents], dtype="<i8").tobytes())
        for document in documents:
            digest.update(document.astype("<i4").tobytes())
    return digest.hexdigest()
