"""From documents to rows of a model: random batches to train on, and windows that tile a split to evaluate.

Letters: B rows, T tokens in a row. A segment never holds tokens of two documents, nor a row unless packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phasewise.data.corpus import Corpus, Task
from phasewise.data.packing import pack
from phasewise.positions import Positions

NOT_SCORED = -100
Row = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens and what follows each.

    tokens: int64 [B, T].
    targets: int64 [B, T], the token after each place; -100 where none is scored.
    positions: None when every row is T tokens of one document; otherwise rows are padded on the right,
        padding in segment -1, or packed, each document in a segment of its own.
    """

    tokens: Tensor
    targets: Tensor
    positions: Positions | None

    @property
    def scored(self) -> int:
        """How many targets are scored."""
        return int((self.targets != NOT_SCORED).sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        positions = None if self.positions is None else self.positions.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), positions)


def batch(
    corpus: Corpus,
    split: str,
    *,
    step: int,
    context: int,
    batch_size: int,
    seed: int,
    packed: bool = False,
) -> Batch:
    """The batch of training step `step`: a pure function of its arguments, so resuming needs no saved state.

    A row is `context` consecutive tokens of one document (a document of no more than `context` + 1 tokens
    is shown whole, padded on the right). Documents are drawn with replacement, in proportion to the number of
    rows they hold, so that every token is scored about equally often: those within `context` of an end of a
    document between half and one and a half times as often as the average. A task draws whole examples uniformly.

    context: tokens a row, a task's `row_length` for a task.
    packed: fill each row with several documents, in segments of their own whose positions start at 0: whole
        where they fit, in pieces where not. No padding, and no document needs to fill a row.
    Returns tokens and targets [batch_size, context].
    Raises ValueError for sizes below 1, a negative step or seed, an unknown split, packed rows of a task,
    and, unpacked, a context that no document of the split fills.

    >>> from phasewise.data import load
    >>> first = batch(load("austen"), "train", step=0, context=64, batch_size=4, seed=0)
    >>> first.tokens.shape, bool((first.tokens[:, 1:] == first.targets[:, :-1]).all())
    (torch.Size([4, 64]), True)
    """
    documents = corpus.split(split)
    _require_positive(context=context, batch_size=batch_size)
    if step < 0 or seed < 0:
        raise ValueError(f"step and seed count from 0, but are {step} and {seed}")
    random = np.random.default_rng([seed, step, list(corpus.splits).index(split)])
    if corpus.task is not None:
        if packed:
            raise ValueError(f"{corpus.name} has whole examples of one answer each; leave packed out")
        _require_row_length(corpus, context)
        examples = documents.take(random.integers(len(documents), size=batch_size))
        return _stack([_example(example, corpus.task) for example in examples], context)

    if packed:
        if documents.longest < 2:
            raise ValueError(
                f"no document in the {split} split of {corpus.name} has two tokens; give longer ones"
            )
        return Batch(*pack(documents, random, context=context, rows=batch_size))
    _require_fits(corpus, split, context, documents.longest - 1)
    chosen, starts, _ = documents.draw(random, batch_size, context)
    rows = []
    for document, start in zip(documents.take(chosen), starts.tolist(), strict=True):
        piece = document[start : start + context + 1]
        rows.append((piece[:-1], piece[1:].astype(np.int64)))
    return _stack(rows, context)


@dataclass(frozen=True)
class Windows:
    """Evaluation batches in a fixed order; built by `windows`.

    spans: (document, targets): the leading targets of each document that are scored.
    """

    corpus: Corpus
    split: str
    length: int
    stride: int
    batch_size: int
    spans: tuple[tuple[int, int], ...]

    @property
    def scored(self) -> int:
        """How many targets all windows together score."""
        task = self.corpus.task
        if task is None:
            return sum(targets for _, targets in self.spans)
        if task.answer_length is not None:
            return task.answer_length * len(self.spans)
        return sum(task.answer_of(example) for example in self.corpus.split(self.split)[: len(self.spans)])

    def __len__(self) -> int:
        """How many batches there are."""
        rows = sum(1 + max(0, -(-(targets - self.length) // self.stride)) for _, targets in self.spans)
        return -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        rows: list[Row] = []
        for row in self._rows():
            rows.append(row)
            if len(rows) == self.batch_size:
                yield self._batch(rows)
                rows = []
        if rows:
            yield self._batch(rows)

    def _batch(self, rows: list[Row]) -> Batch:
        task = self.corpus.task
        return _stack(rows, task.row_length if task else max(len(tokens) for tokens, _ in rows))

    def _rows(self) -> Iterator[Row]:
        documents, task = self.corpus.split(self.split), self.corpus.task
        for document, (_, targets) in zip(
            documents.take(np.array([index for index, _ in self.spans])), self.spans, strict=True
        ):
            if task is not None:
                yield _example(document, task)
                continue
            scored_before, end = 0, min(self.length, targets)
            while scored_before < targets:
                start = max(0, end - self.length)
                following = document[start + 1 : end + 1].astype(np.int64)
                following[: scored_before - start] = NOT_SCORED
                yield document[start:end], following
                scored_before, end = end, min(end + self.stride, targets)


def windows(
    corpus: Corpus,
    split: str,
    *,
    length: int,
    stride: int | None = None,
    limit_tokens: int | None = None,
    batch_size: int = 1,
) -> Windows:
    """Windows of `length` tokens that score every target of a split exactly once.

    The scored targets are the same at every length and stride: each token of each document but its first,
    or the first `limit_tokens` of these. Only how far left the model may look differs. Windows of a document
    start `stride` tokens apart; a window scores what no earlier one has, and the last one ends at the last
    target. So with stride = length (None) a window sees length / 2 tokens on average, with a small stride
    nearly `length`. A document shorter than `length` is one window of its own length.

    limit_tokens: how many targets to score (for a task: examples); None: all.
    batch_size: rows a batch; shorter rows are padded on the right. The rows do not depend on it.
    Returns an iterable of batches with a length and the count `scored`.
    Raises ValueError for sizes below 1, a stride above the length, an unknown split, and a length that no
    scored span fills.

    >>> from phasewise.data import load
    >>> corpus = load("austen")
    >>> [windows(corpus, "test", length=n, limit_tokens=5000).scored for n in (64, 512, 4096)]
    [5000, 5000, 5000]
    """
    documents = corpus.split(split)
    _require_positive(length=length, batch_size=batch_size)
    if limit_tokens is not None:
        _require_positive(limit_tokens=limit_tokens)
    if corpus.task is not None:
        _require_row_length(corpus, length)
        if stride is not None:
            raise ValueError(
                f"{corpus.name} has whole examples, so stride={stride} has no meaning; leave it out"
            )
        count = len(documents) if limit_tokens is None else min(limit_tokens, len(documents))
        spans = tuple((index, corpus.task.row_length) for index in range(count))
        return Windows(corpus, split, length, length, batch_size, spans)

    stride = length if stride is None else stride
    if not 1 <= stride <= length:
        raise ValueError(f"stride must be from 1 to the length {length}, but is {stride}")
    targets = documents.lengths - 1
    if limit_tokens is not None:
        before = np.concatenate([[0], targets.clip(min=0).cumsum()[:-1]])
        targets = np.minimum(targets, limit_tokens - before)
    _require_fits(corpus, split, length, int(targets.max()))
    spans = tuple((int(index), int(targets[index])) for index in np.flatnonzero(targets > 0))
    return Windows(corpus, split, length, stride, batch_size, spans)


def _example(document: np.ndarray, task: Task) -> Row:
    targets = document[1:].astype(np.int64)
    targets[: len(targets) - task.answer_of(document)] = NOT_SCORED
    return document[:-1], targets


def _stack(rows: list[Row], width: int) -> Batch:
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    targets = np.full((len(rows), width), NOT_SCORED, dtype=np.int64)
    lengths = np.array([len(row) for row, _ in rows])
    for row, (tokens_of_row, targets_of_row) in enumerate(rows):
        tokens[row, : lengths[row]] = tokens_of_row
        targets[row, : lengths[row]] = targets_of_row
    real = torch.from_numpy(np.arange(width) < lengths[:, None])
    positions = None if bool(real.all()) else Positions.padded(real)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), positions)


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, but is {size}")


def _require_row_length(corpus: Corpus, length: int) -> None:
    assert corpus.task is not None
    if length != corpus.task.row_length:
        raise ValueError(
            f"{corpus.name} has rows of {corpus.task.row_length} tokens and no other length, not {length}; "
            f"use {corpus.task.row_length} for the context and the only evaluation length"
        )


def _require_fits(corpus: Corpus, split: str, length: int, longest: int) -> None:
    if longest < length:
        raise ValueError(
            f"a context of {length} needs a document of {length + 1} tokens, but the longest one in the "
            f"{split} split of {corpus.name} (within any limit_tokens) has {longest + 1}; "
            f"use at most {longest}"
        )
