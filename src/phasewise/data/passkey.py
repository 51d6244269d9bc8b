"""Passkeys to train on: a number given to a name somewhere in Austen's text, and asked for at the end.

The sentences are those that retrieval is evaluated with (after Mohtashami and Jaggi, arXiv 2305.16300, and for
several needles RULER's multi-key form, arXiv 2404.06654).
"""

from __future__ import annotations

import random

import numpy as np

from phasewise.data.corpus import Corpus, Made, Split, Task, sha256_of
from phasewise.data.text import austen

NAMES = (
    "Anna", "Boris", "Clara", "David", "Edith", "Felix", "Greta", "Henry", "Irene", "James", "Karen", "Louis",
    "Maria", "Nancy", "Oscar", "Paula", "Quinn", "Ralph", "Susan", "Tobias", "Ursula", "Victor", "Wendy",
)  # fmt: skip
ASKED = "\nThe pass key of {name} is"
CLOSED = ". Remember it.\n"
LEAST, MOST = 10_000, 99_999
SIZES = {"train": 1_000_000, "validation": 1_000, "test": 1_000}
HASHED = 50
NEEDLES = 4


class Passkeys(Made):
    """Rows of `length` tokens and the answer, each a pure function of the stream and its index.

    The needle asked for is at any depth, and so are the others; names differ.
    """

    def __init__(
        self, stream: int, size: int, filler: Split, corpus: Corpus, *, length: int, needles: int
    ) -> None:
        super().__init__(stream, size)
        self._filler, self._corpus, self._length, self._needles = filler, corpus, length, needles

    @property
    def lengths(self) -> np.ndarray:
        """Made by making every row."""
        return np.array([len(tokens) for tokens in self.take(np.arange(self._size))])

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        return [self._row(index) for index in indices.tolist()]

    def _row(self, index: int) -> np.ndarray:
        source = random.Random(f"passkey {self._stream} {index}")
        asked, closed = [], self._encode(CLOSED)
        for name in source.sample(NAMES, self._needles):
            asked.append(
                (self._encode(ASKED.format(name=name)), self._encode(f" {source.randint(LEAST, MOST)}"))
            )
        needles = [np.concatenate([question, answer, closed]) for question, answer in asked]
        question, answer = asked[0]
        room = self._length + 1 - sum(map(len, needles)) - len(question) - len(answer)
        document = self._filler[source.randrange(len(self._filler))]
        start = source.randrange(len(document) - room + 1)
        filler = document[start : start + room]
        source.shuffle(needles)
        places = sorted(source.randint(0, room) for _ in needles)
        parts = []
        for before, place, needle in zip([0, *places], places, needles, strict=False):
            parts += [filler[before:place], needle]
        return np.concatenate([*parts, filler[places[-1] :], question, answer]).astype(np.int32)

    def _encode(self, text: str) -> np.ndarray:
        assert self._corpus.encode is not None
        return self._corpus.encode(text)


def passkey(length: int, *, needles: int = 1, tokenizer: str = "bytes") -> Corpus:
    """Rows of `length` tokens of Austen's text with needles; the number asked for is scored.

    The filler of each split is that split's novels.
    Raises ValueError for a length without room for the needles, or longer than a novel, and a tokenizer
    that is unknown.

    >>> corpus = passkey(256)
    >>> corpus.decode(corpus.split("train")[0])[-31:]
    '\\nThe pass key of Felix is 23526'
    """
    filler = austen(tokenizer)
    encode = filler.encode
    assert encode is not None
    shortest = min(int(split.lengths.min()) for split in filler.splits.values())
    sentence = max(len(encode(ASKED.format(name=name) + f" {MOST}" + CLOSED)) for name in NAMES)
    least = (needles + 1) * (sentence + 8)
    if not least <= length < shortest:
        raise ValueError(
            f"rows of {length} tokens do not hold {needles} needles and a question in a novel; give from {least} "
            f"to {shortest - 1}"
        )
    splits = {
        name: Passkeys(stream, size, filler.split(name), filler, length=length, needles=needles)
        for stream, (name, size) in enumerate(SIZES.items())
    }
    kind = "passkey" if needles == 1 else "needles"
    return Corpus(
        name=f"{kind}:{length}" + ("" if tokenizer == "bytes" else f", {tokenizer}"),
        source=f"generated, {needles} pass keys in {filler.source}",
        licence="public domain",
        unit=filler.unit,
        vocab_size=filler.vocab_size,
        sha256=sha256_of(splits, examples=HASHED),
        splits=splits,
        decode=filler.decode,
        task=Task(
            row_length=length, answer_length=None, answer_after=int(encode(ASKED.format(name="Anna"))[-1])
        ),
        encode=encode,
        tokenizer=filler.tokenizer,
    )
