"""Tasks whose dependency kernel is known: what a model needs from how far away, for any width B.

Tokens are drawn, and a token to predict at every place whose whole kernel lies in the row. Letters: B the
width of a task's blocks, N rows, T tokens in a row, V letters. Definitions [ours], after the tasks that "How
data shapes RoPE frequency use" describes.
"""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from phasewise.data.corpus import Corpus, Made, Task, sha256_of

NOT_SCORED = -100
LETTERS = 16
NOISE = 0.5
LENGTH, LEAST_LENGTHS = 512, 8
GAIN = float(np.log1p((1 - NOISE) * LETTERS / NOISE))
"""What a token adds to the logarithm of its letter's odds to be the block's."""
SIZES = {"train": 1_000_000, "validation": 2_000, "test": 2_000}
ALPHABET = "0123456789+=." + string.ascii_uppercase[:3]
PLUS, EQUALS, BLANK = (ALPHABET.index(character) for character in "+=.")


@dataclass(frozen=True)
class Suite(ABC):
    """A task of the suite at block length B.

    A row needs `draws` numbers in [0, 1) a place. Raises ValueError for a block below 2.
    """

    block: int
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.block < 2:
            raise ValueError(f"{type(self).__name__} needs blocks of at least 2 tokens, not {self.block}")

    @property
    @abstractmethod
    def kernel(self) -> np.ndarray:
        """K at the lags 0, 1, .. of the predicted token's place, float64, sum 1: how far the token there
        coincides with the predicted one beyond chance."""

    @property
    def width(self) -> int:
        """The largest lag that counts, tokens."""
        return int(np.flatnonzero(self.kernel)[-1])

    @property
    def length(self) -> int:
        """Tokens in a row as trained on: one for all blocks up to 64."""
        return max(LENGTH, LEAST_LENGTHS * self.block)

    @property
    def answer_length(self) -> int:
        """How many targets at the end of a row make up an answer."""
        return 1

    def stretched(self, scale: float) -> Self:
        """The same task, blocks and all lags `scale` times as long."""
        return replace(self, block=round(scale * self.block))

    @abstractmethod
    def rows(self, random: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 [N, T], from numbers in [0, 1), [N, T, draws]; -100 is not scored.

        >>> tokens, targets = Lag(block=4).rows(torch.rand(2, 16, 2))
        >>> bool((targets[:, 4:] == tokens[:, :-4]).all())
        True
        """

    @abstractmethod
    def posterior(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """What is known of the targets of `tokens`, int64 [N, T], at best: float32 [N, T, V].

        Its entropy is the least loss that can be expected. targets: from `rows`, for tasks that have one answer.
        """


class Mixture(Suite):
    """The target is the token at a lag drawn from the kernel: so its distribution is the kernel's histogram."""

    def rows(self, random: Tensor) -> tuple[Tensor, Tensor]:
        tokens = (random[..., 0] * LETTERS).long()
        cumulated = torch.from_numpy(self.kernel.cumsum()[:-1]).to(random)
        lag = torch.searchsorted(cumulated, random[..., 1].contiguous(), right=True)
        place = torch.arange(tokens.shape[1], device=random.device) - lag
        targets = tokens.gather(1, place.clamp(min=0))
        targets[:, : self.width] = NOT_SCORED
        return tokens, targets

    def posterior(self, tokens: Tensor, targets: Tensor) -> Tensor:
        shown = F.one_hot(tokens, LETTERS).float()
        found = torch.zeros_like(shown)
        for lag, weight in enumerate(self.kernel.tolist()):
            found[:, lag:] += weight * shown[:, : shown.shape[1] - lag]
        return found


class RaisedCosine(Mixture):
    """S1: a smooth kernel, K(r) ~ 1 + cos(pi r / B) for r < B."""

    @property
    def kernel(self) -> np.ndarray:
        weight = 1 + np.cos(np.pi * np.arange(self.block) / self.block)
        return weight / weight.sum()


class Window(Mixture):
    """S2: the histogram of the last B tokens, each counting alike."""

    @property
    def kernel(self) -> np.ndarray:
        return np.full(self.block, 1 / self.block)


class Lag(Mixture):
    """S3: the token B places back, exactly."""

    @property
    def kernel(self) -> np.ndarray:
        return np.eye(self.block + 1)[self.block]


class Blocks(Suite):
    """S4: blocks of B tokens show a hidden letter through noise; the target is the one B places back.

    Where blocks begin is drawn for each row. A token is its block's letter with probability 1/2, otherwise any.
    """

    draws: ClassVar[int] = 3

    @property
    def kernel(self) -> np.ndarray:
        """A token r back lies in the block of the one B back with probability 1 - |r - B| / B."""
        shared = 1 - np.abs(np.arange(2 * self.block) - self.block) / self.block
        return shared / shared.sum()

    def rows(self, random: Tensor) -> tuple[Tensor, Tensor]:
        phase = (random[:, :1, 2] * self.block).long()
        letters = (random[..., 0] * LETTERS).long()
        latent = letters.gather(1, self._starts(random.shape[1], phase).clamp(min=0))
        coin = random[..., 1]
        tokens = torch.where(coin < NOISE, (coin / NOISE * LETTERS).long(), latent)
        targets = latent.roll(self.block, 1)
        targets[:, : self.width] = NOT_SCORED
        return tokens, targets

    def posterior(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Over where blocks begin too: each beginning is as likely as it makes the tokens so far."""
        shown = F.one_hot(tokens, LETTERS).float()
        counts = F.pad(shown.cumsum(1), (0, 0, 1, 0))
        phases = torch.arange(self.block, device=tokens.device)
        evidence = torch.stack([self._evidence(counts, phase) for phase in phases])
        likely = evidence.softmax(0)
        found = torch.zeros_like(shown)
        for phase, weight in zip(phases, likely, strict=True):
            starts = self._starts(tokens.shape[1], phase[None, None])[0].roll(self.block)
            inside = (
                counts[:, (starts + self.block).clamp(max=tokens.shape[1])] - counts[:, starts.clamp(min=0)]
            )
            found += weight[..., None] * (GAIN * inside).softmax(-1)
        return found

    def _evidence(self, counts: Tensor, phase: Tensor) -> Tensor:
        """The logarithm of how likely blocks from `phase` on make the tokens up to each place, [N, T]."""
        length = counts.shape[1] - 1
        starts = self._starts(length, phase[None, None])[0].clamp(min=0)
        block = (GAIN * (counts[:, 1:] - counts[:, starts])).logsumexp(-1) - np.log(LETTERS)
        ends = F.pad(starts[1:] > starts[:-1], (0, 1))
        finished = F.pad((block * ends).cumsum(1), (1, 0))[:, :-1]
        return block + finished

    def _starts(self, length: int, phase: Tensor) -> Tensor:
        """Where the block of each place begins, int64 [N, T]; the first block may begin before the row."""
        place = torch.arange(length, device=phase.device)
        return (place + phase) // self.block * self.block - phase


@dataclass(frozen=True)
class Addition(Suite):
    """S6: two numbers of `digits` digits in fields of B places, lowest digit first, and their sum.

    Every target is a digit of the sum and a function of five tokens: the two digits below it in its column,
    those of the column before, and the sum's own digit there, which together show the carry. `spacing`: each
    token stands at the start of so many places, the rest is blank. Raises ValueError for digits that do not
    fit the field.
    """

    digits: int = 0
    spacing: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.digits <= self.block:
            raise ValueError(
                f"{self.digits} digits do not fit a field of {self.block}; give 1 to {self.block}"
            )

    @property
    def kernel(self) -> np.ndarray:
        """The five lags, each counting alike; two tokens alone tell nothing of the sum."""
        lags = (
            np.array([0, self.block, self.block + 1, 2 * self.block + 1, 2 * self.block + 2]) * self.spacing
        )
        return np.bincount(lags) / len(lags)

    @property
    def length(self) -> int:
        return self.spacing * (3 * self.block + 2)

    @property
    def answer_length(self) -> int:
        return self.digits + 1

    def stretched(self, scale: float) -> Addition:
        """More digits: fields and numbers `scale` times as long."""
        return replace(self, block=round(scale * self.block), digits=round(scale * self.digits))

    def padded(self, scale: float) -> Addition:
        """More padding: fields `scale` times as long for the same numbers."""
        return replace(self, block=round(scale * self.block))

    def spaced(self, scale: float) -> Addition:
        """More padding, evenly: every token takes `scale` times as many places."""
        return replace(self, spacing=round(scale * self.spacing))

    def rows(self, random: Tensor) -> tuple[Tensor, Tensor]:
        assert random.shape[1] == self.length
        numbers = (random[:, : self.digits] * 10).long()
        tokens = numbers.new_full((len(random), self.length + 1), BLANK)
        targets = torch.full_like(tokens, NOT_SCORED)
        at = self.spacing * torch.arange(self.digits + 1, device=random.device)
        second, answer = self.spacing * (self.block + 1), self.spacing * (2 * self.block + 2)
        tokens[:, at[:-1]], tokens[:, second + at[:-1]] = numbers.unbind(-1)
        tokens[:, second - self.spacing], tokens[:, answer - self.spacing] = PLUS, EQUALS
        carry = torch.zeros_like(numbers[:, 0, 0])
        for place, column in enumerate(F.pad(numbers.sum(-1), (0, 1)).unbind(1)):
            carry = carry + column
            targets[:, answer - self.spacing + self.spacing * place] = carry % 10
            if place < self.block:
                tokens[:, answer + self.spacing * place] = carry % 10
            carry = carry // 10
        return tokens[:, :-1], targets[:, :-1]

    def posterior(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Certain, as five of the tokens give the digit."""
        return F.one_hot(targets.clamp(min=0), LETTERS).float()


class Examples(Made):
    """Rows of a task and the token to predict after each, every one a pure function of stream and index."""

    def __init__(self, task: Suite, stream: int, size: int) -> None:
        super().__init__(stream, size)
        self._task = task

    @property
    def lengths(self) -> np.ndarray:
        return np.full(self._size, self._task.length + 1)

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        shape = self._task.length, self._task.draws
        random = [
            np.random.default_rng([self._stream, index]).random(shape, dtype=np.float32)
            for index in indices.tolist()
        ]
        tokens, targets = self._task.rows(torch.from_numpy(np.stack(random)))
        return list(torch.cat([tokens, targets[:, -1:]], 1).numpy().astype(np.uint16))


KINDS: dict[str, Callable[[int], Suite]] = {
    "cosine": RaisedCosine,
    "window": Window,
    "lag": Lag,
    "blocks": Blocks,
    "columns": lambda block: Addition(block, digits=block),
}


def suite(kind: str, block: int) -> Corpus:
    """The task of that name in `KINDS` as a corpus of questions whose answers end the examples.

    The answer is the last token; for "columns", additions of `block` digits, the whole sum.
    Raises ValueError for an unknown name and a block below 2.

    >>> corpus = suite("columns", 4)
    >>> corpus.decode(corpus.splits["train"][0])
    '8530+6200=48300'
    """
    if kind not in KINDS:
        raise ValueError(f"no task {kind!r} in the suite; there are {', '.join(KINDS)}")
    task = KINDS[kind](block)
    splits = {name: Examples(task, stream, size) for stream, (name, size) in enumerate(SIZES.items())}
    return Corpus(
        name=f"{kind}:{block}",
        source="generated; a task with a known dependency kernel",
        licence="none needed",
        unit="character",
        vocab_size=LETTERS,
        sha256=sha256_of(splits),
        splits=splits,
        decode=_decode,
        task=Task(row_length=task.length, answer_length=task.answer_length),
    )


def _decode(tokens: np.ndarray) -> str:
    return "".join(ALPHABET[token] for token in np.asarray(tokens).tolist())
