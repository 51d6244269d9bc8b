"""Indirect Indexing: find a letter in a string of distinct letters, then read the letter some places away.

From "Decoupling the 'What' and 'Where' With Polar Coordinate Positional Embeddings", arXiv 2509.10534.
"""

from __future__ import annotations

import string

import numpy as np

from phasewise.data.corpus import Corpus, Made, Task, sha256_of

LETTERS = string.ascii_letters
PADDING = "\0"
ALPHABET = PADDING + LETTERS + string.digits + ",+-"
SHORTEST, LONGEST = 20, 40
FURTHEST = 15
ROW_LENGTH = 50
WEYL = np.uint64(0x9E3779B97F4A7C15)
SIZES = {"train": 1_000_000, "validation": 10_000, "test": 10_000}

COMMA, PLUS, MINUS, ZERO, FIRST_LETTER = (ALPHABET.index(character) for character in ",+-0a")
LENGTH_DRAW, PLACE_DRAW, SHIFT_DRAW, LETTER_DRAWS = 0, 1, 2, np.arange(3, 3 + len(LETTERS))


class IndirectIndexing(Made):
    """Examples "string,letter,+dd,answer" as tokens, each a pure function of the stream and its index.

    The string has 20 to 40 distinct letters; the letter is one of them; the shift is drawn from -15 to 15
    until it stays inside the string (that is, uniformly from those that do); the answer stands there.

    >>> corpus = indirect_indexing()
    >>> corpus.decode(corpus.splits["train"][0])
    'nQNKmgJfoyewUibPkhEXDVxjGRHvCrzWBMO,K,+12,P'
    """

    @property
    def lengths(self) -> np.ndarray:
        return self._string_lengths(np.arange(self._size)) + len(",x,+dd,x")

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        lengths = self._string_lengths(indices)
        letters = np.argsort(_bits(self._stream, indices, LETTER_DRAWS), axis=1) + FIRST_LETTER
        places = _below(lengths, _bits(self._stream, indices, np.array([PLACE_DRAW]))[:, 0])
        least = -np.minimum(FURTHEST, places)
        most = np.minimum(FURTHEST, lengths - 1 - places)
        shifts = least + _below(most - least + 1, _bits(self._stream, indices, np.array([SHIFT_DRAW]))[:, 0])
        return [
            _example(row[:length], place, shift)
            for row, length, place, shift in zip(
                letters, lengths.tolist(), places.tolist(), shifts.tolist(), strict=True
            )
        ]

    def _string_lengths(self, indices: np.ndarray) -> np.ndarray:
        bits = _bits(self._stream, indices, np.array([LENGTH_DRAW]))[:, 0]
        return SHORTEST + _below(np.full(len(indices), LONGEST - SHORTEST + 1), bits)


def indirect_indexing() -> Corpus:
    """The task with the paper's sizes: 1 000 000 examples to train on, 10 000 each to validate and test."""
    splits = {name: IndirectIndexing(stream, size) for stream, (name, size) in enumerate(SIZES.items())}
    return Corpus(
        name="indirect-indexing",
        source="generated; task of arXiv 2509.10534",
        licence="none needed",
        unit="character",
        vocab_size=len(ALPHABET),
        sha256=sha256_of(splits),
        splits=splits,
        decode=_decode,
        task=Task(row_length=ROW_LENGTH),
    )


def _example(letters: np.ndarray, place: int, shift: int) -> np.ndarray:
    tens, ones = divmod(abs(shift), 10)
    sign = MINUS if shift < 0 else PLUS
    question = [COMMA, letters[place], COMMA, sign, ZERO + tens, ZERO + ones, COMMA, letters[place + shift]]
    return np.concatenate([letters, question]).astype(np.uint16)


def _decode(tokens: np.ndarray) -> str:
    return "".join(ALPHABET[token] for token in np.asarray(tokens).tolist())


def _below(limits: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """int64 [n] in [0, limits), from 64 random bits each."""
    return (bits % limits.astype(np.uint64)).astype(np.int64)


def _bits(stream: int, indices: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """64 random bits for each example and draw, uint64 [examples, draws], of a counter-based generator."""
    key = _mix(np.array([stream + 1], dtype=np.uint64))
    example = _mix(key + indices.astype(np.uint64) * WEYL)
    return _mix(example[:, None] + draws.astype(np.uint64) * WEYL)


def _mix(state: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), uint64 with wrap-around."""
    state = state + WEYL
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
