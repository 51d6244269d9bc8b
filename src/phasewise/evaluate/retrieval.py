"""Passkeys hidden in long text: does a model still find, at some length and depth, what it was told once?

A sentence that gives a number to a name stands somewhere in the filler; the row ends with the same sentence
up to the number. With several needles, the others give other numbers to other names (the multi-key form of
RULER, arXiv 2404.06654; passkeys after Mohtashami and Jaggi, arXiv 2305.16300).

Letters: B rows, T tokens, A tokens of an answer, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from phasewise.evaluate.loss import NOT_SCORED, graded

NAMES = (
    "Anna", "Boris", "Clara", "David", "Edith", "Felix", "Greta", "Henry", "Irene", "James", "Karen", "Louis",
    "Maria", "Nancy", "Oscar", "Paula", "Quinn", "Ralph", "Susan", "Tobias", "Ursula", "Victor", "Wendy",
)  # fmt: skip
DIGITS = 5
"""Of a passkey, so that a guess is right once in 90 000 times."""
ASKED = "\nThe pass key of {name} is"
CLOSED = ". Remember it.\n"


@dataclass(frozen=True, eq=False)
class Needle:
    """One row to answer: the filler with its needles, the question last; the answer is what should follow.

    tokens: int64 [length]. answer: int64 [A]. depth: where the needle asked for stands, from 0 (at the start)
    to 1 (just before the question).
    """

    tokens: Tensor
    answer: Tensor
    depth: float
    length: int


class RetrievalCell(BaseModel):
    """What became of the passkeys at one length and depth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int
    depth: float
    examples: int
    exact: float
    """Share of answers of which every token is the model's first choice: those that greedy decoding gives."""
    loss: float
    """Mean negative log-likelihood, nats per answer token."""


class Retrieval(BaseModel):
    """Passkey retrieval by length and depth, in that order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cells: tuple[RetrievalCell, ...]


def passkeys(
    filler: np.ndarray,
    *,
    encode: Callable[[str], Sequence[int]],
    length: int,
    depths: Sequence[float],
    needles: int = 1,
    examples: int = 1,
    seed: int = 0,
) -> tuple[Needle, ...]:
    """Rows of `length` tokens with passkeys at each of `depths`, `examples` of each.

    filler: integer tokens [n] of a long text; each example takes another stretch of it. encode: text to
    tokens, without special ones; sentences are encoded in pieces (up to the number, the number, the rest), so
    that question and needle have the same tokens.
    needles: how many stand in the filler; the depth is that of the one asked for, the others are anywhere.
    The numbers, names, places of the others and stretch of an example are the same at all depths.

    Raises ValueError for a filler or length that is too short, and depths or counts out of their range.

    >>> filler = np.frombuffer(b"It was a dark and stormy night. " * 20, dtype=np.uint8)
    >>> needle = passkeys(filler, encode=str.encode, length=200, depths=[0.5])[0]
    >>> bytes(needle.tokens.tolist())[-25:].decode().strip()
    'The pass key of Susan is'
    """
    _check(length, depths, needles, examples, seed)
    rows: dict[float, list[Needle]] = {depth: [] for depth in depths}
    for example in range(examples):
        random = np.random.default_rng([seed, example])
        names = random.permutation(NAMES)[:needles].tolist()
        numbers = random.choice(9 * 10 ** (DIGITS - 1), needles, replace=False) + 10 ** (DIGITS - 1)
        asked = [_tokens(encode, ASKED.format(name=name)) for name in names]
        answers = [_tokens(encode, f" {number}") for number in numbers]
        closed = _tokens(encode, CLOSED)
        sentences = [np.concatenate([*pair, closed]) for pair in zip(asked, answers, strict=True)]
        room = length - len(asked[0]) - sum(map(len, sentences))
        if room < 1:
            raise ValueError(
                f"length {length} does not hold {needles} needles and a question, {length - room} tokens: "
                "ask for a greater length, or fewer needles"
            )
        if len(filler) < room:
            raise ValueError(
                f"length {length} needs {room} tokens of filler, but there are {len(filler)}: "
                "ask for shorter lengths, or give a longer text"
            )
        start = int(random.integers(len(filler) - room + 1))
        stretch = np.asarray(filler[start : start + room], dtype=np.int64)
        others = np.rint(random.random(needles - 1) * room).astype(int).tolist()
        for depth in depths:
            places = [round(depth * room), *others]
            row = np.concatenate([_with(stretch, sentences, places), asked[0]])
            rows[depth].append(Needle(torch.from_numpy(row), torch.from_numpy(answers[0]), depth, length))
    return tuple(needle for depth in depths for needle in rows[depth])


@torch.no_grad()
def retrieve(
    model: nn.Module,
    needles: Sequence[Needle],
    *,
    device: torch.device,
    batch_size: int = 1,
    on_rows: Callable[[int], None] = lambda _rows: None,
) -> Retrieval:
    """Ask a model for every needle's answer, `batch_size` rows of one length at a time.

    A model is any `forward(tokens, at=None) -> logits [B, T, V]`; it reads the answer's own tokens before each
    next one, which finds the same exact answers as greedy decoding. It is put into evaluation mode.
    on_rows: told how many rows each batch had.

    Raises ValueError when there is no needle.
    """
    if not needles:
        raise ValueError("there is no needle to retrieve: ask for at least one length and depth")
    model.eval()
    by_length: dict[int, list[Needle]] = {}
    for needle in needles:
        by_length.setdefault(needle.length, []).append(needle)
    outcomes: dict[tuple[int, float], list[_Outcome]] = {}
    for length, rows in by_length.items():
        for start in range(0, len(rows), batch_size):
            together = rows[start : start + batch_size]
            for needle, outcome in zip(together, _ask(model, together, device), strict=True):
                outcomes.setdefault((length, needle.depth), []).append(outcome)
            on_rows(len(together))
    return Retrieval(cells=tuple(_cell(*key, outcomes[key]) for key in sorted(outcomes)))


@dataclass(frozen=True)
class _Outcome:
    exact: bool
    loss: float
    tokens: int


def _ask(model: nn.Module, needles: Sequence[Needle], device: torch.device) -> list[_Outcome]:
    """The outcome of each of several needles of one length, their answers padded on the right."""
    length, longest = needles[0].length, max(len(needle.answer) for needle in needles)
    tokens = torch.zeros(len(needles), length + longest - 1, dtype=torch.int64)
    targets = torch.full_like(tokens, NOT_SCORED)
    for row, needle in enumerate(needles):
        tokens[row, :length] = needle.tokens
        tokens[row, length : length + len(needle.answer) - 1] = needle.answer[:-1]
        targets[row, length - 1 : length - 1 + len(needle.answer)] = needle.answer
    losses, right = graded(model, tokens.to(device), targets.to(device), at=None)
    exact, loss = right.all(1).tolist(), losses.double().sum(1).tolist()
    return [
        _Outcome(*both, tokens=len(needle.answer)) for *both, needle in zip(exact, loss, needles, strict=True)
    ]


def _cell(length: int, depth: float, outcomes: Sequence[_Outcome]) -> RetrievalCell:
    return RetrievalCell(
        length=length,
        depth=depth,
        examples=len(outcomes),
        exact=sum(outcome.exact for outcome in outcomes) / len(outcomes),
        loss=math.fsum(outcome.loss for outcome in outcomes) / sum(outcome.tokens for outcome in outcomes),
    )


def _tokens(encode: Callable[[str], Sequence[int]], text: str) -> np.ndarray:
    tokens = np.array(list(encode(text)), dtype=np.int64)
    if not len(tokens):
        raise ValueError(f"the tokenizer makes no tokens of {text!r}: give the model's own tokenizer")
    return tokens


def _with(stretch: np.ndarray, sentences: Sequence[np.ndarray], places: Sequence[int]) -> np.ndarray:
    """The stretch with each sentence put in before the token at its place."""
    pieces, done = [], 0
    for place, sentence in sorted(zip(places, sentences, strict=True), key=lambda pair: pair[0]):
        pieces += [stretch[done:place], sentence]
        done = place
    return np.concatenate([*pieces, stretch[done:]])


def _check(length: int, depths: Sequence[float], needles: int, examples: int, seed: int) -> None:
    for name, value in (("length", length), ("examples", examples)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, but is {value}")
    if not 1 <= needles <= len(NAMES):
        raise ValueError(f"needles must be from 1 to {len(NAMES)}, but is {needles}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, but is {seed}")
    if not depths or len(set(depths)) < len(depths) or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths must be different numbers from 0 to 1, but are {list(depths)}")
