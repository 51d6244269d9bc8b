"""The outcome of an extension: its values, its table and its figure."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

from phasewise.evaluate import Measurement
from phasewise.figures import figure
from phasewise.frequencies import AnyFrequencies
from phasewise.train.report import CorpusFacts


class Continued(BaseModel):
    """One length of the schedule, and what was done at it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int
    steps: int
    tokens: int
    rule: AnyFrequencies | None
    """What the rates became; None where they stayed."""
    train_loss: float | None
    """Mean training loss of the last tenth of the steps; None without steps."""
    train_seconds: float
    candidates: int
    """Rules that were measured to find this one; 0 where it is a formula."""


class Measured(BaseModel):
    """A model at every length."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1)]


class Extension(BaseModel):
    """Every number of an extension and what is needed to read it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str
    trained_length: int
    corpus: CorpusFacts
    split: str
    stages: tuple[Continued, ...]
    rows: Annotated[tuple[Measured, ...], Field(min_length=1)]


class Report(BaseModel):
    """What report.json holds of an extension, beside what `phasewise.record` adds."""

    model_config = ConfigDict(frozen=True)

    values: Extension


def table(extension: Extension) -> Table:
    """Losses before and after, a column a length."""
    first = extension.rows[0].measurements
    strides = ", ".join(str(measured.stride) for measured in first)
    trained = ", then ".join(
        f"{stage.tokens:,} tokens at {stage.length}" for stage in extension.stages if stage.steps
    )
    shown = Table(
        caption=(
            f"loss, nats per {extension.corpus.unit}; {extension.corpus.name}, {extension.split} split, "
            f"{first[0].tokens:,} scored tokens at each length, stride {strides}; trained at "
            f"{extension.trained_length}, continued on {trained or 'nothing'}"
        ),
        caption_justify="left",
    )
    shown.add_column("model", no_wrap=True)
    for measured in first:
        shown.add_column(
            f"{measured.length}\n{measured.length / extension.trained_length:g}x", justify="right"
        )
    for row in extension.rows:
        shown.add_row(row.name, *(f"{measured.loss:.3f}" for measured in row.measurements))
    return shown


def draw(extension: Extension, path: Path) -> None:
    """Draw the losses by length, a line a model; the suffix is the format. ValueError without matplotlib."""
    with figure(path, 6.4, 3.8) as drawn:
        axes = drawn.subplots()
        lengths = [measured.length for measured in extension.rows[0].measurements]
        for row, colour in zip(extension.rows, ("#6c757d", "#e07a3f", "#00798c"), strict=False):
            losses = [measured.loss for measured in row.measurements]
            axes.plot(
                lengths, losses, color=colour, marker="o", markersize=3.5, linewidth=1.6, label=row.name
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length}\n{length / extension.trained_length:g}x" for length in lengths])
        axes.minorticks_off()
        axes.axvline(extension.trained_length, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("length in tokens, and over the trained length")
        axes.set_ylabel(f"loss, nats per {extension.corpus.unit}")
        axes.set_title(
            f"{extension.corpus.name}: trained at {extension.trained_length}, extended", loc="left"
        )
        axes.legend(frameon=False)
