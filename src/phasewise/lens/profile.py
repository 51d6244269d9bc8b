"""The dependency profile of corpora at several granularities, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import Progress

from phasewise.data import Corpus, load, load_for
from phasewise.hf.language_model import LanguageModel, open_language_model
from phasewise.lens.dependency import Blocks, Curve, Shuffle, dependency, log_spaced
from phasewise.lens.dilation import Dilation, window_dilation
from phasewise.lens.granularity import Sequences, granularities_of, require_granularity, sequences
from phasewise.lens.replacement import longer, replacement
from phasewise.lens.shape import CLOSE_UP, PowerLaw, power_law, shape_difference, unevenness
from phasewise.lens.thresholds import SHAPES
from phasewise.lens.verdict import Verdict, judge, together
from phasewise.lens.width import Width, kernel, measure_width
from phasewise.model.folder import inside
from phasewise.model.reading import require_count
from phasewise.problems import once
from phasewise.progress import bars

LONGEST = 16_384
DISTANCES = 48


class Profiled(BaseModel):
    """A dependency against distance, and what was read from it. Distances and widths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    distances: tuple[int, ...]
    pairs: tuple[int, ...]
    value: tuple[float, ...]
    """Nats: mutual information beyond the baseline, or the rise of a model's loss."""
    error: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    """95 % bands over resampled blocks, each distance by itself."""
    baseline: tuple[float, ...]
    blocks: Blocks
    """What was resampled: groups of documents; pieces, where documents are too few; a model's windows."""
    width: Width
    power_law: PowerLaw | None
    dilation: Dilation | None
    unevenness: float | None
    """Variation between neighbouring distances far away, relative to the dependence there; None where unseen."""
    verdict: Verdict
    complete: bool
    """Whether every distance asked for was measured."""
    seconds: float
    """Wall time, a granularity's tokenizing included, and whatever else the machine did meanwhile."""


class GranularityProfile(BaseModel):
    """A corpus cut into tokens of one size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    granularity: str
    tokens: int
    documents: int
    vocab_size: int | None
    classes: int
    """Classes that the vocabulary is hashed into; each token its own where vocab_size is no larger."""
    span: float
    """Mean length of a token in the corpus's finest unit."""
    shape_difference: float | None
    """From the finest granularity, distances rescaled: root mean square of ln (I / I') but for a gain."""
    information: Profiled


class CorpusProfile(BaseModel):
    """One corpus at its granularities, and as a model sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    licence: str
    sha256: str
    split: str
    unit: str
    """The finest unit, in which spans and `longest` are."""
    longest: int
    granularities: tuple[GranularityProfile, ...]
    one_shape: bool | None
    """Whether all granularities have one shape but for a gain; None where too little is seen to compare."""
    model: Profiled | None
    verdict: Verdict


class Profile(BaseModel):
    """Everything `profile` measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpora: tuple[CorpusProfile, ...]
    shuffle: Shuffle
    seed: int
    partial: str | None
    """What is missing, where Ctrl-C ended the measurement."""


@dataclass(frozen=True)
class ModelView:
    """A model to profile corpora with.

    checkpoint: its folder, of this library or of transformers.
    tokenizer: what `load` needs to give the tokens it was trained on; None: the checkpoint's own, or bytes.
    context: tokens in a window. windows: how many.
    """

    checkpoint: str
    tokenizer: str | None = None
    context: int = 256
    windows: int = 64


def profile(
    names: Sequence[str],
    *,
    granularities: Sequence[str] | None = None,
    split: str = "train",
    longest: int | None = None,
    shuffle: Shuffle = "document",
    model: ModelView | None = None,
    seed: int = 0,
    console: Console | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Profile:
    """Profile corpora by name, as `phasewise.data.load` takes them, telling `console` of the progress.

    granularities: None: `granularities_of` each corpus.
    longest: the longest distance, in the corpus's finest unit; None: where half as many pairs remain as at
        distance 1, and 16 384 at most.
    model: measure a model's use of each corpus too, see `replacement`.
    stop: asked between distances, and between a model's windows: when it says so, what was done so far is
        returned, marked partial; before any of it, KeyboardInterrupt is raised. A KeyboardInterrupt from
        elsewhere keeps the granularities that are done.

    Raises ValueError for what `load`, `sequences` and `dependency` refuse.
    """
    if not names:
        raise ValueError("give at least one corpus, as austen or text:PATH")
    once(names)
    once(granularities or ())
    if longest is not None:
        require_count("longest", longest)
    if seed < 0:
        raise ValueError(f"seed must be at least 0, but is {seed}")
    opened = None if model is None else _Opened(model, open_language_model(model.checkpoint))
    done: list[CorpusProfile] = []
    partial = None
    with bars(console) as progress:
        sittings = [_Sitting(name, split, longest, shuffle, seed, progress, stop) for name in names]
        for sitting in sittings:
            sitting.load(opened, granularities)
        for sitting in sittings:
            try:
                sitting.measure(granularities)
                sitting.look(opened)
            except KeyboardInterrupt:
                if not done and not sitting.measured:
                    raise
                partial = f"interrupted at {sitting.name}"
            if sitting.measured:
                done.append(sitting.result())
            if partial or sitting.cut:
                partial = partial or f"interrupted at {sitting.name}"
                break
    return Profile(corpora=tuple(done), shuffle=shuffle, seed=seed, partial=partial)


@dataclass(frozen=True)
class _Opened:
    """A model to profile with."""

    view: ModelView
    model: LanguageModel


@dataclass
class _Sitting:
    """One corpus as its granularities are measured."""

    name: str
    split: str
    longest: int | None
    shuffle: Shuffle
    seed: int
    progress: Progress
    stop: Callable[[], bool]
    corpus: Corpus = field(init=False)
    held_out: list[np.ndarray] = field(default_factory=list)
    measured: list[tuple[Sequences, Curve, Profiled]] = field(default_factory=list)
    seen: Profiled | None = None
    cut: bool = False

    def load(self, opened: _Opened | None, granularities: Sequence[str] | None) -> None:
        """Read the corpus, also as the model's tokens; what cannot be measured is refused before long work."""
        self._go_on()
        with self._bar("reading", None):
            self.corpus = load(self.name)
            self.corpus.split(self.split)
            for granularity in granularities or ():
                require_granularity(self.corpus, granularity)
            if opened is None:
                return
            view = opened.view
            corpus = load_for(inside(view.checkpoint), self.name, tokenizer=view.tokenizer)
            corpus.require_known(opened.model.config.vocab_size)
            held_out = corpus.split("test")
            self.held_out = longer(held_out.take(np.arange(len(held_out))), view.context)

    def measure(self, granularities: Sequence[str] | None) -> None:
        for granularity in granularities or granularities_of(self.corpus):
            self._go_on()
            with self._bar(granularity, DISTANCES) as advance:
                started = perf_counter()
                cut = sequences(self.corpus, granularity, split=self.split)
                if self.longest is None:
                    self.longest = _longest(cut)
                asked = spread(max(1, int(self.longest / cut.span)))
                try:
                    curve = dependency(
                        cut.classes,
                        cut.lengths,
                        distances=asked,
                        shuffle=self.shuffle,
                        seed=self.seed,
                        on_distance=advance,
                        stop=self.stop,
                    )
                except ValueError as error:
                    raise ValueError(f"{self.name} in {granularity}: {error}") from error
                self.cut = len(curve.distances) < len(asked)
                found = read(curve, complete=not self.cut, seconds=perf_counter() - started)
                self.measured.append((cut, curve, found))
            if self.cut:
                return

    def look(self, opened: _Opened | None) -> None:
        if self.cut or opened is None:
            return
        self._go_on()
        with self._bar("model", opened.view.windows) as advance:
            started = perf_counter()
            curve = replacement(
                opened.model,
                self.held_out,
                context=opened.view.context,
                windows=opened.view.windows,
                seed=self.seed,
                on_window=advance,
                stop=self.stop,
            )
            self.cut = len(curve.parts) < opened.view.windows
            self.seen = read(curve, complete=not self.cut, seconds=perf_counter() - started)

    def _go_on(self) -> None:
        if self.stop():
            raise KeyboardInterrupt

    def result(self) -> CorpusProfile:
        corpus = self.corpus
        finest = self.measured[0]
        levels = []
        for cut, curve, found in self.measured:
            is_finest = cut is finest[0]
            difference = None if is_finest else shape_difference(finest[1], finest[0].span, curve, cut.span)
            levels.append(
                GranularityProfile(
                    granularity=cut.granularity,
                    tokens=len(cut.classes),
                    documents=len(cut.lengths),
                    vocab_size=cut.vocab_size,
                    classes=cut.count,
                    span=cut.span,
                    shape_difference=difference,
                    information=found,
                )
            )
        differences = [level.shape_difference for level in levels[1:]]
        compared = [difference for difference in differences if difference is not None]
        assert self.longest is not None
        return CorpusProfile(
            name=corpus.name,
            source=corpus.source,
            licence=corpus.licence,
            sha256=corpus.sha256,
            split=self.split,
            unit=finest[0].unit,
            longest=self.longest,
            granularities=tuple(levels),
            one_shape=max(compared) <= SHAPES if compared else None,
            model=self.seen,
            verdict=together([(level.granularity, level.information.verdict) for level in levels]),
        )

    @contextmanager
    def _bar(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        bar = self.progress.add_task(f"{self.name}, {what}", total=total)
        try:
            yield lambda done: self.progress.update(bar, completed=done)
        finally:
            self.progress.remove_task(bar)


def read(curve: Curve, *, complete: bool = True, seconds: float = 0.0) -> Profiled:
    """Read width, power law, dilation and verdict from a curve."""
    width, law, found = measure_width(curve), power_law(curve), kernel(curve)
    dilation = None if found is None else window_dilation(found)
    uneven = unevenness(curve)
    low, high = curve.band()
    return Profiled(
        distances=tuple(curve.distances.tolist()),
        pairs=tuple(curve.pairs.tolist()),
        value=tuple(curve.value.tolist()),
        error=tuple(curve.error.tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        baseline=tuple(curve.baseline.tolist()),
        blocks=curve.blocks,
        width=width,
        power_law=law,
        dilation=dilation,
        unevenness=uneven,
        verdict=judge(
            width, law, dilation, uneven, pairs=None if curve.blocks == "windows" else int(curve.pairs[0])
        ),
        complete=complete,
        seconds=seconds,
    )


def spread(longest: int) -> np.ndarray:
    """The 48 distances measured: 40 evenly spaced in ln r, and 8 neighbours from 2 sqrt(longest) on.

    >>> spread(10_000)[16:22].tolist()
    [64, 80, 100, 125, 155, 193]
    """
    first = int(2 * longest**0.5)
    if first + CLOSE_UP > longest:
        return log_spaced(longest, count=DISTANCES)
    close_up = np.arange(first, first + CLOSE_UP)
    return np.union1d(log_spaced(longest, count=DISTANCES - CLOSE_UP), close_up)


def _longest(cut: Sequences) -> int:
    """The distance at which half of the pairs remain, 16 384 at most, in units."""
    ordered = np.sort(cut.lengths)
    reach = np.unique(np.geomspace(1, max(2, ordered[-1] - 1), 200).astype(np.int64))
    pairs = np.array([np.maximum(ordered - distance, 0).sum() for distance in reach])
    return int(min(LONGEST, reach[pairs * 2 >= pairs[0]][-1] * cut.span))
