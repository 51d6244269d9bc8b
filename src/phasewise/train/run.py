"""One training as a run folder: begun, watched, stopped, resumed, and its model kept."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import TaskID

from phasewise.data import Corpus, batch, load
from phasewise.interrupt import stoppable
from phasewise.model import Transformer
from phasewise.model.folder import MODEL, require_safetensors
from phasewise.problems import first
from phasewise.progress import bars
from phasewise.record import record
from phasewise.train.folder import (
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
from phasewise.train.loop import Record, train, validation
from phasewise.train.processes import Processes
from phasewise.train.recipe import PLACEMENT, RunRecipe, TrainRecipe
from phasewise.train.speed import utilisation
from phasewise.train.trackers import Trackers, require_trackers

RECIPES = Path(__file__).parent / "recipes"


class Begun(BaseModel):
    """What a run was begun with: the content of recipe.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: RunRecipe
    training: TrainRecipe
    """The recipe with the vocabulary of its data."""
    corpus_sha256: str


class Result(BaseModel):
    """What a training came to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: int
    tokens: int
    """Trained on."""
    loss: float
    """Mean training loss of the last tenth of the steps, nats per scored token."""
    validation_loss: float | None
    """The last measured one."""
    best_validation_loss: float | None
    seconds: float
    """In training steps, over all sittings."""
    tokens_per_second: float
    mfu: float | None
    """Share of the devices' bfloat16 peak; None where that is not known."""
    processes: int


class Report(BaseModel):
    """What report.json holds of a training, beside what `phasewise.record` adds."""

    model_config = ConfigDict(frozen=True)

    values: Result


Metrics = Annotated[list[dict[str, float]], Field(min_length=1)]


def read_recipe(name: str) -> RunRecipe:
    """The recipe in a JSON file, or the one of that name that comes with the package.

    Raises ValueError for one that is not there, and for fields that are unknown or do not fit.

    >>> read_recipe("pope-owt-124m").encoding.kind
    'pope'
    """
    path = Path(name) if name.endswith(".json") else RECIPES / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in RECIPES.glob("*.json")))
        raise ValueError(f"no recipe {name!r}: give a file, whose name ends in .json, or one of {known}")
    try:
        return RunRecipe.model_validate_json(path.read_bytes())
    except ValidationError as error:
        unknown = [str(one["loc"][0]) for one in error.errors() if one["type"] == "extra_forbidden"]
        if unknown:
            fields = ", ".join(sorted(RunRecipe.model_fields))
            raise ValueError(f"{path} has unknown fields {', '.join(unknown)}; there are {fields}") from error
        raise ValueError(f"{path} is not a recipe: {first(error)}") from error


def read_begun(out: Path) -> Begun:
    """What the run in `out` was begun with; ValueError when there is none, or one that cannot be read."""
    return begun_in(out, Begun, "train")


def run(
    recipe: RunRecipe,
    out: Path,
    *,
    resume: bool = False,
    processes: Processes,
    trackers: Sequence[str] = (),
    console: Console | None = None,
) -> Result:
    """Train what the recipe says into the run folder `out`; called in every process of the training.

    The folder gets recipe.json at once, metrics.jsonl, checkpoints, and at the end model/ and report.json.
    Ctrl-C raises Interrupted, SIGTERM Terminated, once a checkpoint is written; `resume` goes on from there,
    in as many processes as there then are, and ends with the same numbers.

    Raises ValueError before anything is trained or written for a folder that holds something else or that
    another run works on, a recipe or corpus other than the one resumed, sizes that do not fit and a tracker
    that is missing; Unwritten when something cannot be written; Diverged when the loss is no number.
    """
    require_safetensors()
    require_trackers(trackers)
    corpus = load(recipe.data, tokenizer=recipe.tokenizer)
    training = _prepare(recipe, corpus, processes)
    with ExitStack() as stack:
        if resume:
            begun = read_begun(out)
            require_same(out, begun.recipe, recipe, free=PLACEMENT)
            if begun.corpus_sha256 != corpus.sha256:
                raise ValueError(
                    f"the corpus {corpus.name} has changed since {out} was begun: "
                    "choose another folder, or the data as it was"
                )
            if (out / REPORT).exists():
                remedy = "delete it to have it made again"
                return read(out / REPORT, TypeAdapter(Report), "a report of train", remedy).values
            processes.once(lambda: stack.enter_context(held(out)))
        else:
            processes.once(partial(require_free, out))
            begun = Begun(recipe=recipe, training=training, corpus_sha256=corpus.sha256)
            processes.once(lambda: stack.enter_context(begin(out, begun)))
        stack.enter_context(writing(out))
        watch = _Watch(training, out, processes, trackers if processes.first else (), console)
        stack.enter_context(watch.shown())
        stop = stack.enter_context(stoppable(processes.any))
        trained = train(training, corpus, out, device=processes, on_record=watch.note, stop=stop)
        return _finish(trained.model, trained.loss, trained.seconds, watch, corpus)


def _prepare(recipe: RunRecipe, corpus: Corpus, processes: Processes) -> TrainRecipe:
    """Check everything that can be checked before anything is written."""
    training = recipe.training(vocab_size=corpus.vocab_size)
    training.divide(processes.size)
    with torch.device("meta"):
        Transformer(training.model)
    batch(corpus, "train", step=0, context=recipe.context, batch_size=1, seed=0, packed=recipe.packed)
    if recipe.evaluate_every:
        validation(corpus, training)
    return training


class _Watch:
    """What is shown and told of a training while it goes."""

    def __init__(
        self,
        recipe: TrainRecipe,
        out: Path,
        processes: Processes,
        trackers: Sequence[str],
        console: Console | None,
    ) -> None:
        self.recipe, self.out, self.processes = recipe, out, processes
        self.trackers = Trackers(trackers, out, recipe.model_dump(mode="json"))
        self.progress = bars(console if processes.first else None, noted=True, stays=True)
        self.bar: TaskID = self.progress.add_task("steps", total=recipe.steps, note="")
        self.before: tuple[int, float] | None = None
        self.validation = ""

    @contextmanager
    def shown(self) -> Iterator[None]:
        try:
            with self.progress:
                yield
        finally:
            self.trackers.finish()

    def note(self, metrics: Record, seconds: float) -> None:
        """Take note of a step, and of the time that it and those before took."""
        step = int(metrics["step"])
        note = f"loss {metrics['loss']:.4f}"
        told = dict(metrics)
        if self.before is not None and seconds > self.before[1]:
            speed = self.speed(step - self.before[0], seconds - self.before[1])
            told["tokens_per_second"] = speed
            note += f"  {speed:,.0f} tokens/s"
            if (mfu := self.mfu(speed)) is not None:
                told["mfu"] = mfu
                note += f"  MFU {mfu:.1%}"
        self.before = (step, seconds)
        if "validation_loss" in metrics:
            self.validation = f"  validation {metrics['validation_loss']:.4f}"
            self.progress.console.print(f"step {step}: {note}{self.validation}")
        self.progress.update(self.bar, completed=step, note=note + self.validation)
        self.trackers.log(told, step)

    def speed(self, steps: int, seconds: float) -> float:
        """Tokens a second, of all processes."""
        return steps * self.recipe.batch_size * self.recipe.context / seconds

    def mfu(self, speed: float) -> float | None:
        """The share of all devices' peak."""
        each = speed / self.processes.size
        return utilisation(self.recipe.model, self.recipe.context, each, self.processes.device)


def _finish(model: Transformer, loss: float, seconds: float, watch: _Watch, corpus: Corpus) -> Result:
    out, recipe, processes = watch.out, watch.recipe, watch.processes
    lines = (out / "metrics.jsonl").read_text().splitlines()
    metrics = TypeAdapter(Metrics).validate_json(f"[{','.join(lines)}]")
    measured = [line["validation_loss"] for line in metrics if "validation_loss" in line]
    speed = watch.speed(recipe.steps, seconds)
    result = Result(
        parameters=model.parameter_count,
        tokens=recipe.trained_tokens,
        loss=loss,
        validation_loss=measured[-1] if measured else None,
        best_validation_loss=min(measured, default=None),
        seconds=seconds,
        tokens_per_second=speed,
        mfu=watch.mfu(speed),
        processes=processes.size,
    )

    def write() -> None:
        keep(model, out / MODEL, recipe, corpus)
        # Last: a folder with a report is a finished run.
        record(
            out / REPORT,
            recipe=recipe.model_dump(mode="json"),
            values=result.model_dump(mode="json"),
            device=processes.device,
        )

    processes.once(write)
    return result
