"""What an evaluation of checkpoints found: its values, its tables and its figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from phasewise.evaluate import Measurement, PositionLoss, RetrievalCell, TaskScore
from phasewise.figures import figure
from phasewise.train.report import CorpusFacts

PALETTE = ("#00798c", "#d1495b", "#c9971c", "#7b5ea7", "#6c757d", "#2e933c", "#e07a3f", "#1f4e79")
STYLE = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
SHOWN = ("acc", "acc_norm", "exact_match", "perplexity", "word_perplexity")


class Checkpoint(BaseModel):
    """What was evaluated, and how its text became tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    folder: str
    family: str
    parameters: int
    vocab_size: int
    dtype: str
    trained_length: int | None
    """Tokens; None where the checkpoint does not say."""
    tokenizer: str
    prefix: tuple[int, ...]
    """Tokens read before every row: its tokenizer's beginning of text, if it has one."""


class CorpusLoss(BaseModel):
    """A checkpoint's losses on one corpus, by length."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: CorpusFacts
    task: bool
    """Whether the corpus is questions, of which only answers are scored."""
    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1)]
    bits_per_byte: tuple[float, ...] | None
    """For each measurement, bits per UTF-8 byte of the scored tokens' text; None where the data are not text."""

    @property
    def quantity(self) -> str:
        """What `scores` gives, with its unit."""
        if self.task:
            return "exact match"
        return f"loss, nats per {self.corpus.unit}" if self.bits_per_byte is None else "bits per byte"

    @property
    def scores(self) -> tuple[float, ...]:
        """One number for each measurement: what the table and the figure show."""
        if self.task:
            return tuple(measured.exact or 0.0 for measured in self.measurements)
        return self.bits_per_byte or tuple(measured.loss for measured in self.measurements)


class NeedleTable(BaseModel):
    """Passkeys retrieved by a checkpoint, of some number of needles, by length and depth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: str
    """Whose text the needles are hidden in."""
    needles: int
    cells: Annotated[tuple[RetrievalCell, ...], Field(min_length=1)]


class Evaluated(BaseModel):
    """Everything measured of one checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: Checkpoint
    losses: tuple[CorpusLoss, ...]
    retrieval: tuple[NeedleTable, ...]
    tasks: tuple[TaskScore, ...]


class Evaluation(BaseModel):
    """Every number of an evaluation and what is needed to read it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: str
    seconds: float
    """Of all measurements, over all sittings."""
    rows: Annotated[tuple[Evaluated, ...], Field(min_length=1)]

    @property
    def curves(self) -> tuple[int, ...]:
        """Which of the corpora have losses at several lengths to draw."""
        return tuple(number for number, loss in enumerate(self.rows[0].losses) if not loss.task)


class Report(BaseModel):
    """What report.json holds of an evaluation, beside what `phasewise.record` adds."""

    model_config = ConfigDict(frozen=True)

    values: Evaluation


def tables(evaluation: Evaluation) -> list[Table]:
    """A table for each corpus, number of needles, and the tasks; a line each checkpoint."""
    rows = evaluation.rows
    shown = [_losses(evaluation, number) for number in range(len(rows[0].losses))]
    shown += [_needles(rows, number) for number in range(len(rows[0].retrieval))]
    return [*shown, _tasks(rows)] if rows[0].tasks else shown


def _losses(evaluation: Evaluation, number: int) -> Table:
    found = [row.losses[number] for row in evaluation.rows]
    first = found[0]
    tokens = sorted({measured.tokens for loss in found for measured in loss.measurements})
    strides = ", ".join(str(measured.stride) for measured in first.measurements)
    counted = " or ".join(f"{count:,}" for count in tokens)
    caption = f"{first.quantity}; {first.corpus.name.partition(',')[0]}, {evaluation.split} split, "
    caption += (
        f"{counted} answer tokens"
        if first.task
        else f"{counted} scored tokens at each length, stride {strides}"
    )
    table = _table(caption)
    for measured in first.measurements:
        table.add_column(f"{measured.length}", justify="right")
    for row, loss in zip(evaluation.rows, found, strict=True):
        table.add_row(*_named(row), *(f"{score:.3f}" for score in loss.scores))
    return table


def _needles(rows: Sequence[Evaluated], number: int) -> Table:
    found = [row.retrieval[number] for row in rows]
    depths = sorted({cell.depth for cell in found[0].cells})
    caption = (
        f"share of passkeys retrieved, {_counted(found[0].needles)}, mean over depths "
        f"{', '.join(f'{depth:g}' for depth in depths)}, {found[0].cells[0].examples} each"
    )
    table = _table(caption)
    lengths = sorted({cell.length for cell in found[0].cells})
    for length in lengths:
        table.add_column(f"{length}", justify="right")
    for row, needles in zip(rows, found, strict=True):
        by_length = ([cell.exact for cell in needles.cells if cell.length == length] for length in lengths)
        table.add_row(*_named(row), *(f"{sum(exact) / len(exact):.2f}" for exact in by_length))
    return table


def _tasks(rows: Sequence[Evaluated]) -> Table:
    table = _table("zero-shot, as lm-eval defines the tasks; of a group, the mean of its tasks")
    columns = [
        (number, metric)
        for number, score in enumerate(rows[0].tasks)
        for metric in [name for name in SHOWN if name in score.metrics] or score.metrics
        if not _in_group(rows[0].tasks, number)
    ]
    for number, metric in columns:
        score = rows[0].tasks[number]
        table.add_column(f"{score.task}\n{metric}, {score.examples}", justify="right")
    for row in rows:
        table.add_row(
            *_named(row), *(f"{row.tasks[number].metrics[metric]:.4g}" for number, metric in columns)
        )
    return table


def _in_group(scores: Sequence[TaskScore], number: int) -> bool:
    """Whether a later score is that of the group this task is in, which lm-eval names by the same beginning."""
    return any(scores[number].task.startswith(f"{later.task}_") for later in scores[number + 1 :])


def _counted(needles: int) -> str:
    return "1 needle" if needles == 1 else f"{needles} needles"


def _table(caption: str) -> Table:
    table = Table(caption=caption, caption_justify="left")
    table.add_column("checkpoint", no_wrap=True)
    table.add_column("trained at", justify="right")
    return table


def _named(row: Evaluated) -> tuple[str, str]:
    length = row.checkpoint.trained_length
    return row.checkpoint.name, "" if length is None else f"{length}"


def draw(evaluation: Evaluation, path: Path) -> None:
    """Draw each corpus's scores by length and, at the longest, by position; the suffix is the format.

    Raises ValueError without matplotlib.
    """
    curves = evaluation.curves
    with figure(path, 7.2, 3.4 * len(curves), style=STYLE) as drawn:
        panels = drawn.subplots(len(curves), 2, squeeze=False)
        for (by_length, by_position), number in zip(panels, curves, strict=True):
            for row, colour in zip(evaluation.rows, PALETTE * len(evaluation.rows), strict=False):
                loss = row.losses[number]
                lengths = [measured.length for measured in loss.measurements]
                name = row.checkpoint.name
                by_length.plot(lengths, loss.scores, color=colour, marker="o", markersize=3.5, label=name)
                bands = _evenly_scored(loss.measurements[-1])
                per_nat = loss.scores[-1] / loss.measurements[-1].loss
                middles = [(band.first + band.last) / 2 for band in bands]
                by_position.plot(middles, [band.loss * per_nat for band in bands], color=colour, label=name)
            for length in {row.checkpoint.trained_length for row in evaluation.rows} - {None}:
                by_length.axvline(length, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
            first = evaluation.rows[0].losses[number]
            by_length.set_xscale("log", base=2)
            ticks = [measured.length for measured in first.measurements]
            by_length.set_xticks(ticks, [f"{length}" for length in ticks])
            by_length.minorticks_off()
            by_length.set_xlabel("length, tokens")
            by_length.set_ylabel(first.quantity)
            by_length.set_title(first.corpus.name.partition(",")[0], loc="left")
            by_length.legend(frameon=False)
            by_position.set_xlabel(f"place in windows of {ticks[-1]} tokens")


def _evenly_scored(measured: Measurement) -> list[PositionLoss]:
    """The bands that every window scores; places before them are scored by a document's first window alone."""
    return [band for band in measured.by_position if band.first >= measured.length - measured.stride]


def draw_needles(evaluation: Evaluation, path: Path) -> None:
    """Draw a heat map of passkeys retrieved by length and depth for each checkpoint and number of needles.

    Raises ValueError without matplotlib.
    """
    counts = [needles.needles for needles in evaluation.rows[0].retrieval]
    width, height = 1.2 + 3.0 * len(counts), 0.8 + 2.2 * len(evaluation.rows)
    with figure(path, width, height, style=STYLE) as drawn:
        panels = drawn.subplots(len(evaluation.rows), len(counts), squeeze=False)
        for row, across in zip(evaluation.rows, panels, strict=True):
            for needles, axes in zip(row.retrieval, across, strict=True):
                lengths = sorted({cell.length for cell in needles.cells})
                depths = sorted({cell.depth for cell in needles.cells})
                exact = {(cell.depth, cell.length): cell.exact for cell in needles.cells}
                grid = [[exact[depth, length] for length in lengths] for depth in depths]
                axes.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
                axes.set_xticks(range(len(lengths)), [f"{length}" for length in lengths])
                axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
                axes.set_title(f"{row.checkpoint.name}, {_counted(needles.needles)}", loc="left")
                for y, line in enumerate(grid):
                    for x, share in enumerate(line):
                        dark = share < 0.6
                        axes.text(x, y, f"{share:.2g}", ha="center", va="center", color="w" if dark else "k")
                axes.set_xlabel("length, tokens")
                axes.set_ylabel("depth")
        drawn.colorbar(panels[0][0].images[0], ax=panels, label="share retrieved")
