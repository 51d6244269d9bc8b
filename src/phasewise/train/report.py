"""The outcome of a comparison: its values, its table and its figure."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from phasewise.data import Corpus
from phasewise.evaluate import Measurement
from phasewise.figures import figure

COLOURS = {
    "rope": "#d1495b",
    "rope + linear": "#f0a3a9",
    "rope + ntk": "#8c2f39",
    "rope + yarn": "#e07a3f",
    "pope": "#00798c",
    "tapa": "#c9971c",
    "nope": "#6c757d",
    "alibi": "#7b5ea7",
}


class Run(BaseModel):
    """One encoding trained from one seed, and what it was measured to lose."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    parameters: int
    frozen_phases: float | None
    """Share of PoPE's phases that a clamp holds, and so get no gradient; None for other encodings."""
    train_loss: float
    """Mean training loss of the last tenth of the steps."""
    train_seconds: float
    evaluate_seconds: float
    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1)]


class Row(BaseModel):
    """One line of the table: an encoding, and the scaling applied after its training if any."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    encoding: str
    scaling: str | None
    runs: Annotated[tuple[Run, ...], Field(min_length=1)]

    @property
    def name(self) -> str:
        return self.encoding if self.scaling is None else f"{self.encoding} + {self.scaling}"


class CorpusFacts(BaseModel):
    """What was trained on and measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    licence: str
    unit: str
    vocab_size: int
    sha256: str
    bytes_per_token: float | None
    """UTF-8 bytes per token of the split measured; None where the data are not text."""

    @classmethod
    def of(cls, corpus: Corpus, split: str) -> "CorpusFacts":
        """What there is to say of a corpus whose `split` is measured."""
        return cls(
            name=corpus.name,
            source=corpus.source,
            licence=corpus.licence,
            unit=corpus.unit,
            vocab_size=corpus.vocab_size,
            sha256=corpus.sha256,
            bytes_per_token=None if corpus.bytes_per_token is None else corpus.bytes_per_token[split],
        )


class Score(BaseModel):
    """What the table and the figure show of a row at one length, over its seeds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int
    mean: float
    seeds: tuple[float, ...]


class Comparison(BaseModel):
    """Every number of a comparison and what is needed to read it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: CorpusFacts
    split: str
    context: int
    trained_tokens: int
    """Tokens each model saw in training."""
    answers_only: bool
    """Whether the corpus is a task, whose accuracy is then what is compared."""
    seconds: float
    """Training and evaluation of everything, over all sittings."""
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]

    @property
    def quantity(self) -> str:
        """What `scores` gives, with its unit."""
        return "accuracy" if self.answers_only else f"loss, nats per {self.corpus.unit}"

    def scores(self, row: Row) -> tuple[Score, ...]:
        """The row's accuracy (of a task) or loss at each length."""
        by_length = zip(*(run.measurements for run in row.runs), strict=True)
        scores = []
        for measured in by_length:
            values = tuple(m.accuracy if self.answers_only else m.loss for m in measured)
            scores.append(
                Score(length=measured[0].length, mean=math.fsum(values) / len(values), seeds=values)
            )
        return tuple(scores)


class Report(BaseModel):
    """What report.json holds of a comparison, beside what `phasewise.record` adds."""

    model_config = ConfigDict(frozen=True)

    values: Comparison


def table(comparison: Comparison) -> Table:
    """The comparison as a rich table: a column a length; of several seeds, the mean and each."""
    first = comparison.rows[0].runs[0].measurements
    scored = sorted({measured.tokens for measured in first})
    strides = ", ".join(str(measured.stride) for measured in first)
    caption = (
        f"{comparison.quantity}; {comparison.corpus.name}, {comparison.split} split, "
        f"{' or '.join(f'{tokens:,}' for tokens in scored)} scored tokens at each length, stride {strides}; "
        f"{comparison.trained_tokens:,} tokens of training at length {comparison.context}"
    )
    shown = Table(caption=caption, caption_justify="left")
    shown.add_column("encoding", no_wrap=True)
    shown.add_column("parameters", justify="right")
    for measured in first:
        shown.add_column(f"{measured.length}\n{measured.length / comparison.context:g}x", justify="right")
    for row in comparison.rows:
        scores = comparison.scores(row)
        shown.add_row(row.name, f"{row.runs[0].parameters:,}", *(f"{score.mean:.3f}" for score in scores))
        if len(row.runs) > 1:
            for number, run in enumerate(row.runs):
                cells = (f"{score.seeds[number]:.3f}" for score in scores)
                shown.add_row(f"  seed {run.seed}", "", *cells, style="dim")
    return shown


def draw(comparison: Comparison, path: Path) -> None:
    """Draw the scores by length, a line a row, the spread of its seeds shaded; the suffix is the format.

    Raises ValueError without matplotlib.
    """
    with figure(path, 7.2, 4.2) as drawn:
        axes = drawn.subplots()
        lengths: list[int] = []
        ends: list[tuple[float, str, str]] = []
        for row in comparison.rows:
            scores = comparison.scores(row)
            lengths = [score.length for score in scores]
            means = [score.mean for score in scores]
            colour = COLOURS[row.name]
            dash = "solid" if row.scaling is None else "dashed"
            axes.plot(lengths, means, color=colour, linestyle=dash, marker="o", markersize=3.5, linewidth=1.6)
            if len(row.runs) > 1:
                low = [min(score.seeds) for score in scores]
                high = [max(score.seeds) for score in scores]
                axes.fill_between(lengths, low, high, color=colour, alpha=0.15, linewidth=0)
            ends.append((means[-1], row.name, colour))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length}\n{length / comparison.context:g}x" for length in lengths])
        axes.minorticks_off()
        axes.axvline(comparison.context, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("length in tokens, and over the trained length")
        axes.set_ylabel(comparison.quantity)
        axes.set_title(
            f"{comparison.corpus.name}: trained at {comparison.context}, evaluated beyond", loc="left"
        )
        _label_ends(axes, ends)


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Name each line at its right end, moved apart vertically where they would overlap."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.05
    at = -math.inf
    for value, name, colour in sorted(ends):
        at = max(value, at + gap)
        axes.annotate(
            name,
            xy=(1.0, at),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )
