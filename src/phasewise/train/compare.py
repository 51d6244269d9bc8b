"""Several encodings on one corpus under one budget, each evaluated up to many times the trained length."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from rich.console import Console
from rich.progress import Progress, TaskID

from phasewise.data import Batch, Corpus, Windows, batch, load, windows
from phasewise.device import usable
from phasewise.encodings import PoPE, RoPEConfig
from phasewise.evaluate import Measurement, measure
from phasewise.figures import require_matplotlib
from phasewise.frequencies import Geometric
from phasewise.interrupt import Interrupted, stoppable
from phasewise.model import Transformer, rescaled
from phasewise.model.folder import require_safetensors
from phasewise.progress import bars
from phasewise.record import record, replacing
from phasewise.train.folder import (
    EVALUATION,
    REPORT,
    begin,
    begun_in,
    held,
    read,
    require_free,
    require_same,
    writing,
)
from phasewise.train.kept import keep
from phasewise.train.loop import Diverged, cpu_threads, train
from phasewise.train.recipe import SCALINGS, CompareRecipe, TrainRecipe
from phasewise.train.report import Comparison, CorpusFacts, Report, Row, Run, draw

SPLIT = "test"
BATCH_TOKENS = 4096
FIGURES = ("figure.svg", "figure.png")


class Begun(BaseModel):
    """What a comparison was begun with: the content of recipe.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: CompareRecipe
    corpus_sha256: str


_ROWS = TypeAdapter(Annotated[list[Row], Field(min_length=1)])


def read_begun(out: Path) -> Begun:
    """What the comparison in `out` was begun with; ValueError when there is none, or one that cannot be read."""
    return begun_in(out, Begun, "compare")


def compare(
    recipe: CompareRecipe,
    out: Path,
    *,
    resume: bool = False,
    figure: bool = True,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> Comparison:
    """Train and evaluate what the recipe says into the run folder `out`, telling `console` of the progress.

    The folder gets recipe.json at once, a folder for each training (metrics.jsonl, checkpoints, the model,
    evaluation.json), and at the end figure.svg, figure.png and report.json. Ctrl-C raises Interrupted, SIGTERM
    Terminated, with everything done so far on the disk; `resume` goes on from there and ends with the same numbers.

    Raises ValueError before anything is trained or written for a folder that holds something else or that
    another process works on, a recipe or corpus other than the one resumed, lengths beyond the corpus, and
    sizes that do not fit; Unwritten when something cannot be written, as on a full disk.
    """
    require_safetensors()
    if figure:
        require_matplotlib()
    if not resume:
        require_free(out)
        prepared = _prepare(recipe, device)
        with begin(out, Begun(recipe=recipe, corpus_sha256=prepared.corpus.sha256)):
            return _finish(prepared, out, figure=figure, console=console)
    begun = read_begun(out)
    require_same(out, begun.recipe, recipe)
    if (out / REPORT).exists():
        return _finished(out, figure=figure)
    with held(out):
        prepared = _prepare(recipe, device)
        if begun.corpus_sha256 != prepared.corpus.sha256:
            raise ValueError(
                f"the corpus {prepared.corpus.name} has changed since {out} was begun: choose another folder"
            )
        return _finish(prepared, out, figure=figure, console=console)


@dataclass(frozen=True)
class _Prepared:
    """A recipe that fits its corpus, the windows to evaluate and the device."""

    recipe: CompareRecipe
    corpus: Corpus
    plan: tuple[Windows, ...]
    trainings: dict[tuple[str, int], TrainRecipe]
    device: torch.device


def _prepare(recipe: CompareRecipe, device: torch.device | str) -> _Prepared:
    """Check everything that can be checked before anything is written."""
    found = usable(device)
    corpus = load(recipe.data, tokenizer=recipe.tokenizer)
    plan = _plan(recipe, corpus)
    trainings = {
        (encoding, seed): recipe.training(encoding, seed, vocab_size=corpus.vocab_size)
        for seed in recipe.seeds
        for encoding in recipe.encodings
    }
    for encoding in recipe.encodings:
        with torch.device("meta"):
            Transformer(trainings[encoding, recipe.seeds[0]].model)
    batch(corpus, "train", step=0, context=recipe.context, batch_size=recipe.batch_size, seed=0)
    return _Prepared(recipe, corpus, plan, trainings, found)


def _finish(prepared: _Prepared, out: Path, *, figure: bool, console: Console | None) -> Comparison:
    """Do what is left to do in a run folder that this process holds."""
    recipe, corpus = prepared.recipe, prepared.corpus
    rows: list[Row] = []
    progress = bars(console, noted=True)
    with writing(out), cpu_threads(recipe.threads), stoppable() as stop, progress:
        sitting = _Sitting(recipe, corpus, prepared.plan, prepared.device, stop, progress)
        for (encoding, seed), training in prepared.trainings.items():
            try:
                rows += sitting.run(training, out / "runs" / f"{encoding}-seed{seed}")
            except (Interrupted, Diverged) as error:
                raise type(error)(f"{encoding}, seed {seed}: {error}") from error
        comparison = Comparison(
            corpus=CorpusFacts.of(corpus, SPLIT),
            split=SPLIT,
            context=recipe.context,
            trained_tokens=recipe.trained_tokens,
            answers_only=corpus.task is not None,
            seconds=math.fsum(row.runs[0].train_seconds + row.runs[0].evaluate_seconds for row in rows),
            rows=_merged(rows),
        )
        if figure:
            _draw(comparison, out)
        # Last: a folder with a report is a finished run.
        record(
            out / REPORT,
            recipe=recipe.model_dump(mode="json"),
            values=comparison.model_dump(mode="json"),
            device=prepared.device,
        )
    return comparison


def _finished(out: Path, *, figure: bool) -> Comparison:
    """The report of a finished run, which gets the figure if it was finished without."""
    remedy = "delete it to have it made again from the evaluations"
    comparison = read(out / REPORT, TypeAdapter(Report), "a report of compare", remedy).values
    if figure and not all((out / name).exists() for name in FIGURES):
        with writing(out):
            _draw(comparison, out)
    return comparison


def _draw(comparison: Comparison, out: Path) -> None:
    for name in FIGURES:
        draw(comparison, out / name)


def _plan(recipe: CompareRecipe, corpus: Corpus) -> tuple[Windows, ...]:
    """The windows of each length, all scoring the same tokens."""
    task = corpus.task is not None
    lengths = recipe.lengths(task=task)
    if not task and recipe.evaluate_tokens < lengths[-1]:
        raise ValueError(
            f"evaluate_tokens {recipe.evaluate_tokens} do not fill one window of {lengths[-1]}: "
            "ask for more tokens, or shorter evaluate_lengths"
        )
    return tuple(
        windows(
            corpus,
            SPLIT,
            length=length,
            stride=recipe.evaluate_stride or (None if task else length // 2),
            limit_tokens=recipe.evaluate_tokens,
            batch_size=max(1, BATCH_TOKENS // length),
        )
        for length in lengths
    )


@dataclass(frozen=True)
class _Sitting:
    """What all trainings of a comparison share."""

    recipe: CompareRecipe
    corpus: Corpus
    plan: tuple[Windows, ...]
    device: torch.device
    stop: Callable[[], bool]
    progress: Progress

    def run(self, training: TrainRecipe, folder: Path) -> list[Row]:
        """Train and measure one model, or read what an earlier sitting measured: its row, its scalings'."""
        finished = folder / EVALUATION
        if finished.exists():
            return read(finished, _ROWS, "an evaluation of compare", "delete it to have it measured again")
        encoding = training.model.encodings[0]
        name = f"{encoding.kind}, seed {training.seed}"
        bar = self.progress.add_task(name, total=training.steps, note="")

        def on_step(steps: int, loss: float) -> None:
            self.progress.update(bar, completed=steps, note=f"loss {loss:.3f}")

        trained = train(training, self.corpus, folder, device=self.device, on_step=on_step, stop=self.stop)
        keep(trained.model, folder / "model", training, self.corpus)
        pope = [module for module in trained.model.modules() if isinstance(module, PoPE)]
        frozen = math.fsum(module.frozen_fraction() for module in pope) / len(pope) if pope else None
        beyond = self.plan[-1].length > training.context
        rows = []
        for scaling in (None, *(self.recipe.scalings if isinstance(encoding, RoPEConfig) and beyond else ())):
            started = perf_counter()
            measurements = tuple(self._measure(trained.model, scaling, batches, bar) for batches in self.plan)
            run = Run(
                seed=training.seed,
                parameters=trained.model.parameter_count,
                frozen_phases=frozen,
                train_loss=trained.loss,
                train_seconds=trained.seconds if scaling is None else 0.0,
                evaluate_seconds=perf_counter() - started,
                measurements=measurements,
            )
            rows.append(Row(encoding=encoding.kind, scaling=scaling, runs=(run,)))
        with replacing(finished) as unfinished:
            unfinished.write_bytes(_ROWS.dump_json(rows, indent=2))
        self.progress.remove_task(bar)
        seconds = math.fsum(row.runs[0].evaluate_seconds for row in rows)
        self.progress.console.print(
            f"{name}: loss {trained.loss:.3f} in {trained.seconds:.0f} s, evaluated in {seconds:.0f} s"
        )
        return rows

    def _measure(self, model: Transformer, scaling: str | None, batches: Windows, bar: TaskID) -> Measurement:
        """Measure at one length; a scaling gets the factor that stretches the trained length to it."""
        self.progress.update(bar, note=f"evaluating {scaling or ''} at {batches.length}")
        if scaling is not None:
            encoding = model.config.encodings[0]
            assert isinstance(encoding, RoPEConfig)
            assert isinstance(encoding.frequencies, Geometric)
            factor = max(1.0, batches.length / self.recipe.context)
            rule = SCALINGS[scaling](encoding.frequencies.base, self.recipe.context, factor)
            model = rescaled(model, rule)
        return measure(
            model,
            _until(self.stop, batches),
            length=batches.length,
            stride=batches.stride,
            device=self.device,
        )


def _until(stop: Callable[[], bool], batches: Iterable[Batch]) -> Iterator[Batch]:
    for rows in batches:
        if stop():
            raise Interrupted("evaluating")
        yield rows


def _merged(rows: list[Row]) -> tuple[Row, ...]:
    """One row for each encoding and scaling, with the runs of all seeds."""
    runs: dict[tuple[str, str | None], tuple[Run, ...]] = {}
    for row in rows:
        key = row.encoding, row.scaling
        runs[key] = runs.get(key, ()) + row.runs
    return tuple(Row(encoding=encoding, scaling=scaling, runs=of) for (encoding, scaling), of in runs.items())
