"""Settings tried on held-out text: loss by length and by position, and passkeys found, before and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phasewise.data import Corpus, Documents, windows
from phasewise.evaluate.loss import Measurement, measure
from phasewise.evaluate.retrieval import Needle, Retrieval, passkeys, retrieve
from phasewise.frequencies import AnyFrequencies
from phasewise.hf.language_model import LanguageModel
from phasewise.lens.spectrum import Values
from phasewise.model.reading import require_count

LEAST_TOKENS = 16_384
BATCH_TOKENS = 16_384
SENTENCE = "\nThe pass key of Tobias is 12345. Remember it.\n"
FEWEST_SENTENCES = 4
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Trial:
    """How to measure. lengths: None: the trained length, its doubles, and the wanted one.

    tokens: scored at each length, the same ones; None: as many as the wanted length, at least 16 384.
    examples: passkeys at each length and depth; 0 leaves retrieval out.

    Raises ValueError for counts and seeds below these.
    """

    split: str = "test"
    lengths: tuple[int, ...] | None = None
    tokens: int | None = None
    examples: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens is not None:
            require_count("tokens", self.tokens)
        require_count("examples", self.examples, least=0)
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, but is {self.seed}")


class Measured(Values):
    """What a setting did. losses: one for each length, ascending, of the same tokens at each.

    retrieval: None where the data are not text, passkeys were not asked for, or the trained length holds less
    than four such sentences.
    """

    losses: tuple[Measurement, ...]
    retrieval: Retrieval | None

    def loss(self, length: int) -> float:
        """Nats a token in windows of that length."""
        return next(measured.loss for measured in self.losses if measured.length == length)

    def found(self, length: int) -> float | None:
        """The share of passkeys found in rows of that length."""
        if self.retrieval is None:
            return None
        cells = [cell for cell in self.retrieval.cells if cell.length == length]
        return sum(cell.exact * cell.examples for cell in cells) / sum(cell.examples for cell in cells)


def lengths_between(trained: int, wanted: int) -> tuple[int, ...]:
    """The trained length, its doubles below the wanted one, and that.

    >>> lengths_between(2048, 12_000)
    (2048, 4096, 8192, 12000)
    """
    doubled = [trained]
    while doubled[-1] * 2 < wanted:
        doubled.append(doubled[-1] * 2)
    return (*doubled, wanted)


def held_out(corpus: Corpus, split: str, *, wanted: int, tokens: int) -> Corpus:
    """The starts of the documents in which the wanted length fits, about `tokens` in all, as the split "test".

    So every length scores the same tokens, and the wanted one is filled by each window. Raises ValueError
    for a corpus without such a document, and for one of examples.
    """
    if corpus.task is not None:
        raise ValueError(
            f"{corpus.name} has examples of one length: choose a corpus of documents, or do not measure "
            "(--no-measure)"
        )
    given = corpus.split(split)
    fitting = np.flatnonzero(given.lengths > wanted)
    if not len(fitting):
        raise ValueError(
            f"a length of {wanted} needs a document of {wanted + 1} tokens, but the longest one in the {split} "
            f"split of {corpus.name} has {int(given.lengths.max())}: give longer documents or a shorter length"
        )
    chosen = fitting[: -(-tokens // wanted)]
    each = max(1, round(tokens / len(chosen) / wanted))
    windows_in = np.minimum(each, (given.lengths[chosen] - 1) // wanted)
    starts = [
        given[int(place)][: count * wanted + 1] for place, count in zip(chosen, windows_in, strict=True)
    ]
    documents = Documents.join(starts, vocab_size=corpus.vocab_size)
    return dataclasses.replace(corpus, splits={"test": documents})


class Bench:
    """Measures one checkpoint under one setting after another, all on the same tokens and passkeys."""

    def __init__(
        self,
        model: LanguageModel,
        corpus: Corpus,
        trial: Trial,
        *,
        trained: int,
        wanted: int,
        device: torch.device,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tokens = trial.tokens or max(wanted, LEAST_TOKENS)
        self.corpus = held_out(corpus, trial.split, wanted=wanted, tokens=self.tokens)
        self.model, self.device, self.stop = model, device, stop
        self.trial = trial
        self.lengths = trial.lengths or lengths_between(trained, wanted)
        self.needles = [
            needles for length in (trained, wanted) if (needles := self._needles(length, trained))
        ]

    def _needles(self, length: int, trained: int) -> tuple[Needle, ...]:
        encode, documents = self.corpus.encode, self.corpus.split("test")
        if encode is None or self.trial.examples == 0 or trained < FEWEST_SENTENCES * len(encode(SENTENCE)):
            return ()
        return passkeys(
            documents[int(np.argmax(documents.lengths))],
            encode=lambda text: encode(text).tolist(),
            length=length,
            depths=DEPTHS,
            examples=self.trial.examples,
            seed=self.trial.seed,
        )

    def steps(self) -> int:
        """Pieces that one setting is measured in."""
        return len(self.lengths) + len(self.needles)

    def measure(self, rule: AnyFrequencies | None, advance: Callable[[], None]) -> Measured:
        """One setting; None: the checkpoint's own. Raises KeyboardInterrupt where `stop` says so between pieces."""
        served = self.model if rule is None else self.model.served(rule)
        losses = []
        for length in self.lengths:
            self._go_on()
            batches = windows(self.corpus, "test", length=length, batch_size=_rows(length))
            losses.append(measure(served, batches, length=length, stride=length, device=self.device))
            advance()
        cells = []
        for needles in self.needles:
            self._go_on()
            rows = _rows(needles[0].length)
            cells += retrieve(served, needles, device=self.device, batch_size=rows).cells
            advance()
        return Measured(losses=tuple(losses), retrieval=Retrieval(cells=tuple(cells)) if cells else None)

    def _go_on(self) -> None:
        if self.stop():
            raise KeyboardInterrupt


def _rows(length: int) -> int:
    """Rows of that length to read at a time."""
    return max(1, BATCH_TOKENS // length)


def by_position(measured: Measured, length: int) -> tuple[Sequence[float], Sequence[float]]:
    """Middles of the bands of places in windows of that length, and the loss in each."""
    chosen = next(loss for loss in measured.losses if loss.length == length)
    places = [(band.first + band.last) / 2 for band in chosen.by_position]
    return places, [band.loss for band in chosen.by_position]
