"""Several encodings on one corpus under one budget, each evaluated up to many times the trained length."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from phasewise.data import Batch, Corpus, Windows, batch, load, windows
from phasewise.encodings import PoPE, RoPEConfig
from phasewise.evaluate import Measurement, measure
from phasewise.frequencies import Geometric
from phasewise.model import Transformer, rescaled
from phasewise.model.folder import require_safetensors, save
from phasewise.record import record, replacing
from phasewise.train.interrupt import Interrupted, interruptible
from phasewise.train.loop import Diverged, cpu_threads, train
from phasewise.train.recipe import SCALINGS, CompareRecipe, TrainRecipe
from phasewise.train.report import Comparison, CorpusFacts, Row, Run, draw, require_matplotlib

SPLIT = "test"
BATCH_TOKENS = 4096

_ROWS = TypeAdapter(list[Row])


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
    evaluation.json), and at the end figure.svg, figure.png and report.json. Ctrl-C raises Interrupted with
    everything done so far on the disk; `resume` goes on from there and ends with the same numbers.

    Raises ValueError before anything is trained or written for a folder that holds something else, a recipe
    or corpus other than the one resumed, lengths beyond the corpus, and sizes that do not fit.
    """
    require_safetensors()
    if figure:
        require_matplotlib()
    if resume:
        _same_recipe(out, recipe)
    elif out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} already exists: choose another folder, or --resume if it holds this run")
    if (out / "report.json").exists():
        return Comparison.model_validate(json.loads((out / "report.json").read_text())["values"])
    device = _usable(device)
    corpus = load(recipe.data, tokenizer=recipe.tokenizer)
    plan = _plan(recipe, corpus)
    trainings = {
        (encoding, seed): recipe.training(encoding, seed, vocab_size=corpus.vocab_size)
        for seed in recipe.seeds
        for encoding in recipe.encodings
    }
    for training in trainings.values():
        with torch.device("meta"):
            Transformer(training.model)
    batch(corpus, "train", step=0, context=recipe.context, batch_size=recipe.batch_size, seed=0)
    _write_recipe(out, recipe, corpus)

    finished: list[Row] = []
    progress = _progress(console or Console(quiet=True))
    with cpu_threads(recipe.threads), interruptible() as stop, progress:
        sitting = _Sitting(recipe, corpus, plan, device, stop, progress)
        for (encoding, seed), training in trainings.items():
            try:
                finished += sitting.run(training, out / "runs" / f"{encoding}-seed{seed}")
            except (Interrupted, Diverged) as error:
                raise type(error)(f"{encoding}, seed {seed}: {error}") from error
    comparison = Comparison(
        corpus=_described(corpus),
        split=SPLIT,
        context=recipe.context,
        trained_tokens=recipe.trained_tokens,
        answers_only=corpus.task is not None,
        seconds=math.fsum(row.runs[0].train_seconds + row.runs[0].evaluate_seconds for row in finished),
        rows=_merged(finished),
    )
    if figure:
        draw(comparison, out / "figure.svg")
        draw(comparison, out / "figure.png")
    # Last: a folder with a report is a finished run.
    record(
        out / "report.json",
        recipe=recipe.model_dump(mode="json"),
        values=comparison.model_dump(mode="json"),
        device=device,
    )
    return comparison


def read_recipe(out: Path) -> CompareRecipe:
    """The recipe of the run folder `out`; ValueError when there is none, or one that cannot be read."""
    try:
        return CompareRecipe.model_validate(json.loads((out / "recipe.json").read_text())["recipe"])
    except FileNotFoundError as error:
        raise ValueError(f"{out} holds no run to resume: leave out --resume to start one there") from error
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{out / 'recipe.json'} is not a recipe of compare: choose another folder"
        ) from error


def _same_recipe(out: Path, recipe: CompareRecipe) -> None:
    begun, now = read_recipe(out).model_dump(), recipe.model_dump()
    differing = [f"{name} ({begun[name]}, now {now[name]})" for name in now if begun[name] != now[name]]
    if differing:
        raise ValueError(
            f"{out} was begun with another {', '.join(differing)}: "
            "resume it as begun, or choose another folder"
        )


def _write_recipe(out: Path, recipe: CompareRecipe, corpus: Corpus) -> None:
    path = out / "recipe.json"
    if path.exists() and json.loads(path.read_text())["corpus_sha256"] != corpus.sha256:
        raise ValueError(f"the corpus {corpus.name} has changed since {out} was begun: choose another folder")
    content = {"recipe": recipe.model_dump(mode="json"), "corpus_sha256": corpus.sha256}
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n")


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
        finished = folder / "evaluation.json"
        if finished.exists():
            return _ROWS.validate_json(finished.read_bytes())
        encoding = training.model.encodings[0]
        name = f"{encoding.kind}, seed {training.seed}"
        bar = self.progress.add_task(name, total=training.steps, note="")

        def on_step(steps: int, loss: float) -> None:
            self.progress.update(bar, completed=steps, note=f"loss {loss:.3f}")

        trained = train(training, self.corpus, folder, device=self.device, on_step=on_step, stop=self.stop)
        save(trained.model, folder / "model")
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


def _usable(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device {str(device)!r} cannot be used here ({reason}): use cpu, or one there is"
        ) from error


def _described(corpus: Corpus) -> CorpusFacts:
    return CorpusFacts(
        name=corpus.name,
        source=corpus.source,
        licence=corpus.licence,
        unit=corpus.unit,
        vocab_size=corpus.vocab_size,
        sha256=corpus.sha256,
        bytes_per_token=None if corpus.bytes_per_token is None else corpus.bytes_per_token[SPLIT],
    )


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console, transient=True)
