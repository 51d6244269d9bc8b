"""inspect: which frequencies a checkpoint uses, in every layer and head, measured on data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from rich.console import Console
from torch import Tensor

from phasewise.data import Corpus
from phasewise.encodings import TAPA
from phasewise.encodings.spectral import Spectral
from phasewise.lens.phase import Phase, PhaseMeter
from phasewise.lens.spectrum import Spectrum, SpectrumMeter, Values
from phasewise.model.reading import Layer, Reader, require_count
from phasewise.progress import bars

LONGEST_CONTEXT = 2048
SHORTEST_ROW = 2

AnyLayer = Annotated[Spectrum | Phase, Field(discriminator="kind")]
Meters = dict[int, SpectrumMeter | PhaseMeter]


class Inspection(Values):
    """What was measured, on what, and what is missing.

    layers: those whose scores depend on position through frequencies or a phase, of `model_layers` in all.
    partial: None, or what was left out because the work was interrupted.
    """

    family: str
    parameters: int
    dtype: str
    model_layers: int
    trained_length: int | None
    wanted_length: int | None
    corpus: str
    corpus_sha256: str
    split: str
    tokens: int
    context: int
    queries: int
    partial: str | None
    layers: tuple[AnyLayer, ...]


@dataclass(frozen=True)
class Request:
    """How much to read. context: tokens at once, by default the trained length, at most 2048.

    tokens: how many of the split, from its start. wanted_length: only turns are counted for it.
    queries: how many queries of each row the attention-weighted form samples; 0 leaves it out.
    """

    split: str = "test"
    tokens: int = 16_384
    context: int | None = None
    wanted_length: int | None = None
    queries: int = 8

    def __post_init__(self) -> None:
        least = {"tokens": 2, "context": 2, "wanted_length": 1, "queries": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None:
                require_count(name, value, least=lowest)


def inspect(
    reader: Reader,
    corpus: Corpus,
    request: Request | None = None,
    *,
    console: Console | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Inspection:
    """Read the start of a split, row after row, and measure each layer and head.

    A row is at most `context` tokens of one document. Memory is what the model's own pass over one row takes,
    plus O(context x head_dim) for each head of one layer. `console` shows the progress. `stop` is asked after
    each row: when it says so, what has been read is returned, marked partial.

    Raises ValueError for a model without rates or phases, a corpus with more tokens than the model knows, and
    a context that no document fills.

    >>> from phasewise.data import load
    >>> from phasewise.encodings import RoPEConfig
    >>> from phasewise.model import ModelConfig, Transformer
    >>> from phasewise.model.reading import TransformerReader
    >>> config = ModelConfig(vocab_size=256, width=32, layers=2, heads=2, encoding=RoPEConfig())
    >>> request = Request(tokens=256, context=64)
    >>> found = inspect(TransformerReader(Transformer(config)), load("austen"), request)
    >>> len(found.layers), len(found.layers[0].heads), len(found.layers[0].rates)
    (2, 2, 8)
    """
    request = request or Request()
    facts = reader.facts
    corpus.require_known(facts.vocab_size)
    plan = _plan(reader, corpus, request)
    meters: Meters = {}
    other: set[str] = set()
    rows_read = tokens = 0

    def sink(layer: Layer, q: Tensor, k: Tensor) -> None:
        progress.advance(bar)
        if layer.index not in meters:
            if isinstance(layer.encoding, TAPA):
                meters[layer.index] = PhaseMeter(layer, length=plan.context)
            elif isinstance(layer.encoding, Spectral):
                meters[layer.index] = SpectrumMeter(layer, length=plan.context, queries=request.queries)
            else:
                other.add(layer.encoding.kind)
                return
        meters[layer.index].add(q, k)

    partial = None
    with bars(console) as progress:
        bar = progress.add_task("layers read", total=len(plan.spans) * facts.layers)
        for row in plan.rows():
            if rows_read and stop():
                partial = f"interrupted after {rows_read} of {len(plan.spans)} rows"
                break
            reader.read(row, sink)
            if not meters:
                kinds = ", ".join(sorted(other))
                raise ValueError(
                    f"the model's positions have no frequencies and no phases ({kinds}); "
                    "give one with RoPE, PoPE or TAPA"
                )
            rows_read, tokens = rows_read + 1, tokens + row.shape[1]
    lengths = {"trained": facts.trained_length, "wanted": request.wanted_length}
    return Inspection(
        family=facts.family,
        parameters=facts.parameters,
        dtype=facts.dtype,
        model_layers=facts.layers,
        trained_length=facts.trained_length,
        wanted_length=request.wanted_length,
        corpus=corpus.name,
        corpus_sha256=corpus.sha256,
        split=request.split,
        tokens=tokens,
        context=plan.context,
        queries=request.queries,
        partial=partial,
        layers=tuple(meters[index].result(**lengths) for index in sorted(meters)),
    )


@dataclass(frozen=True)
class _Plan:
    """Rows to read, each (document, first token, one past the last), none longer than the context."""

    corpus: Corpus
    split: str
    context: int
    spans: tuple[tuple[int, int, int], ...]

    def rows(self) -> Iterator[Tensor]:
        """The tokens of each row, int64 [1, T]."""
        documents = self.corpus.split(self.split)
        for document, first, last in self.spans:
            yield torch.from_numpy(documents[document][first:last].astype(np.int64))[None]


def _plan(reader: Reader, corpus: Corpus, request: Request) -> _Plan:
    lengths = corpus.split(request.split).lengths
    longest = int(lengths.max())
    known = reader.facts.trained_length or LONGEST_CONTEXT
    context = min(known, LONGEST_CONTEXT, longest) if request.context is None else request.context
    if longest < max(context, SHORTEST_ROW):
        raise ValueError(
            f"a context of {context} needs a document as long, but the longest in the {request.split} split "
            f"of {corpus.name} has {longest} tokens: ask for at most that, or give longer documents"
        )
    spans, left = [], request.tokens
    for document, length in enumerate(lengths.tolist()):
        for first in range(0, length, context):
            last = min(first + context, length, first + left)
            if last - first >= SHORTEST_ROW:
                spans.append((document, first, last))
                left -= last - first
        if left < SHORTEST_ROW:
            break
    return _Plan(corpus, request.split, context, tuple(spans))
