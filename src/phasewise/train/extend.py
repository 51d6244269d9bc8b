"""Continuing a checkpoint at longer lengths: its rates changed, trained on, measured before and after."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter
from rich.console import Console
from rich.progress import Progress, TaskID

from phasewise.data import Batch, Corpus, Windows, batch, load, require_tokenizer_of, tokenizer_of, windows
from phasewise.device import usable
from phasewise.encodings.spectral import Spectral
from phasewise.evaluate import Measurement, measure
from phasewise.figures import require_matplotlib
from phasewise.frequencies import AnyFrequencies, LongRoPE
from phasewise.interrupt import Interrupted, stoppable
from phasewise.model import ModelConfig, Transformer, rescaled
from phasewise.model import folder as on_disk
from phasewise.model.folder import CONFIG, MODEL
from phasewise.model.history import Stage, read_history, write_history
from phasewise.progress import bars
from phasewise.record import record, replacing
from phasewise.train.continuation import Begun, Continuation, ExtendRecipe, read_begun
from phasewise.train.extension import Continued, Extension, Measured, Report, draw
from phasewise.train.folder import REPORT, begin, held, read, require_free, require_same, writing
from phasewise.train.initial import Initial
from phasewise.train.kept import keep, keep_tokenizer
from phasewise.train.loop import Diverged, cpu_threads, train
from phasewise.train.processes import Processes
from phasewise.train.recipe import PLACEMENT, TrainRecipe
from phasewise.train.report import CorpusFacts
from phasewise.train.rules import Present, Search
from phasewise.train.search import search

SPLIT = "test"
BATCH_TOKENS = 4096
FIGURES = ("figure.svg", "figure.png")
STAGE = "stage.json"


def extend(
    recipe: ExtendRecipe,
    out: Path,
    *,
    resume: bool = False,
    figure: bool = True,
    device: torch.device | str | Processes = "cpu",
    console: Console | None = None,
) -> Extension:
    """Continue a checkpoint of this library as the recipe says, into the run folder `out`.

    device: where; or, called in each of several processes, this one's place among them (`processes.join`):
    all train, and the first one searches, measures and writes.

    The folder gets recipe.json at once, a folder for each length (metrics.jsonl, checkpoints, its model), and at
    the end `model`, whose config has the changed rates and whose history.json the lengths, figure.svg,
    figure.png and report.json. Ctrl-C raises Interrupted, SIGTERM Terminated, with everything done so far on
    the disk; `resume` goes on from there and ends with the same numbers.

    Raises ValueError before anything is written for a folder that holds something else, a checkpoint that is
    no whole model or does not say its length, a length not above it, a rule that does not start from its
    rates, and lengths beyond the corpus; Unwritten when something cannot be written, as on a full disk.
    """
    on_disk.require_safetensors()
    if figure:
        require_matplotlib()
    processes = device if isinstance(device, Processes) else Processes(0, 1, usable(device))
    with ExitStack() as stack:
        if resume:
            begun = read_begun(out)
            require_same(out, begun.recipe, recipe, free=PLACEMENT)
            if (out / REPORT).exists():
                return _finished(out)
            processes.once(lambda: stack.enter_context(held(out)))
            work = _prepare(recipe, out, processes)
            if (work.begun.initial, work.begun.corpus_sha256) != (begun.initial, begun.corpus_sha256):
                raise ValueError(
                    f"the checkpoint or the corpus has changed since {out} was begun: restore it"
                )
        else:
            processes.once(partial(require_free, out))
            work = _prepare(recipe, out, processes)
            processes.once(lambda: stack.enter_context(begin(out, work.begun)))
        return work.finish(figure=figure, console=console)


def _finished(out: Path) -> Extension:
    remedy = "delete it to have it made again from the evaluations"
    return read(out / REPORT, TypeAdapter(Report), "a report of extend", remedy).values


def _prepare(recipe: ExtendRecipe, out: Path, processes: Processes) -> "_Work":
    """Check everything that can be checked before anything is written."""
    folder = on_disk.inside(recipe.checkpoint)
    initial, model, history = (
        Initial.of(folder),
        on_disk.load(folder, device=processes.device),
        read_history(folder),
    )
    settings = model.config
    present = Present(settings.frequencies, _trained_length(recipe, folder, history), settings.bound)
    if recipe.length[0] <= present.length:
        raise ValueError(
            f"length {recipe.length[0]} is not above {present.length}, at which {folder} was trained: "
            "choose a longer one"
        )
    tokenizer = tokenizer_of(folder, recipe.data) if recipe.tokenizer is None else recipe.tokenizer
    corpus = load(recipe.data, tokenizer=tokenizer)
    if corpus.task is not None:
        raise ValueError(f"{corpus.name} has examples of one length: choose a corpus of documents")
    require_tokenizer_of(folder, corpus)
    corpus.require_known(model.config.vocab_size)
    work = _Work(
        recipe,
        out,
        processes,
        model,
        present,
        history,
        tokenizer,
        corpus,
        Begun(recipe=recipe, initial=initial, corpus_sha256=corpus.sha256),
    )
    for length, steps in zip(recipe.length, recipe.steps, strict=True):
        if isinstance(recipe.rule, Search):
            recipe.rule.start(present)
            _require_fits(corpus, "validation", length, recipe.rule.tokens, "tokens of the rule's search")
        else:
            work.turned(model, recipe.rule.at(present, length))
        if steps:
            work.training(length, steps, model.config, initial).divide(processes.size)
            batch(corpus, "train", step=0, context=length, batch_size=recipe.batch_size, seed=0)
    _require_fits(corpus, SPLIT, recipe.length[-1], recipe.evaluate_tokens, "evaluate_tokens")
    return work


def _require_fits(corpus: Corpus, split: str, length: int, tokens: int, name: str) -> None:
    if tokens < length:
        raise ValueError(f"{name} {tokens} do not fill one window of {length}: ask for more tokens")
    windows(corpus, split, length=length, limit_tokens=tokens)


def _trained_length(recipe: ExtendRecipe, folder: Path, history: tuple[Stage, ...]) -> int:
    told = history[-1].length if history else None
    if told is None and recipe.trained_length is None:
        raise ValueError(f"{folder} does not say the length it was trained at: give --trained-length")
    if told is not None and recipe.trained_length not in (None, told):
        raise ValueError(
            f"trained_length is {recipe.trained_length}, but {folder} was trained at {told}: leave it out"
        )
    length = told or recipe.trained_length
    assert length is not None
    return length


@dataclass(frozen=True)
class _Work:
    """A recipe that fits its checkpoint, its corpus and the device, and the folder it is done in."""

    recipe: ExtendRecipe
    out: Path
    processes: Processes
    model: Transformer
    present: Present
    history: tuple[Stage, ...]
    tokenizer: str
    corpus: Corpus
    begun: Begun

    def finish(self, *, figure: bool, console: Console | None) -> Extension:
        """Do what is left to do."""
        progress = bars(console if self.processes.first else None, noted=True)
        with ExitStack() as stack:
            stop = stack.enter_context(stoppable(self.processes.any))
            for context in (writing(self.out), cpu_threads(self.recipe.threads), progress):
                stack.enter_context(context)
            bar = progress.add_task("extend", total=sum(self.recipe.steps) or None, note="")
            extension = self._extended(_Sitting(self, stop, progress, bar))
            self.processes.once(lambda: self._report(extension, figure=figure))
        return extension

    def _extended(self, sitting: "_Sitting") -> Extension:
        rows = [sitting.measured("before", lambda: self.model)]
        stages = sitting.continued()
        rule, kind = stages[-1].rule, self.recipe.rule.kind
        if rule is not None:
            rows.append(sitting.measured(kind, lambda: self.turned(self.model, rule)))
        if steps := sum(stage.steps for stage in stages):
            final = self.out / MODEL
            rows.append(sitting.measured(f"{kind}, {steps} steps", lambda: self.opened(final)))
        return Extension(
            checkpoint=self.begun.initial.folder,
            trained_length=self.present.length,
            corpus=CorpusFacts.of(self.corpus, SPLIT),
            split=SPLIT,
            stages=stages,
            rows=tuple(rows),
        )

    def _report(self, extension: Extension, *, figure: bool) -> None:
        if figure:
            for name in FIGURES:
                draw(extension, self.out / name)
        # Last: a folder with a report is a finished run.
        record(
            self.out / REPORT,
            recipe=self.begun.model_dump(mode="json"),
            values=extension.model_dump(mode="json"),
            device=self.processes.device,
        )

    def opened(self, folder: Path) -> Transformer:
        """The model in a folder, on this process's device."""
        return on_disk.load(folder, device=self.processes.device)

    def turned(self, model: Transformer, rule: AnyFrequencies | None) -> Transformer:
        """The model with these rates; itself for none."""
        return model if rule is None else rescaled(model, rule)

    def training(self, length: int, steps: int, config: ModelConfig, initial: Initial) -> TrainRecipe:
        """The recipe of the training at one length."""
        shared = set(Continuation.model_fields) & set(TrainRecipe.model_fields)
        settings: dict[str, Any] = {name: getattr(self.recipe, name) for name in shared}
        settings["tokenizer"] = self.tokenizer
        return TrainRecipe(**settings, context=length, steps=steps, model=config, initial=initial)

    def plan(self, split: str, length: int, tokens: int) -> Windows:
        """Windows of one length over the first `tokens` of a split."""
        return windows(
            self.corpus,
            split,
            length=length,
            stride=self.recipe.evaluate_stride or length // 2,
            limit_tokens=tokens,
            batch_size=max(1, BATCH_TOKENS // length),
        )

    def lengths(self) -> list[int]:
        """The lengths to measure at: the trained one, its doublings, and the last one."""
        last, found = self.recipe.length[-1], [self.present.length]
        while 2 * found[-1] < last:
            found.append(2 * found[-1])
        return [*found, last]


@dataclass(frozen=True)
class _Sitting:
    """One sitting's work, which asks between steps and batches whether to stop."""

    work: _Work
    stop: Callable[[], bool]
    progress: Progress
    bar: TaskID

    def continued(self) -> tuple[Continued, ...]:
        """Every length of the schedule, one after another; what an earlier sitting finished is read."""
        work, done, stages = self.work, 0, []
        model, initial = work.model, work.begun.initial
        for length, steps in zip(work.recipe.length, work.recipe.steps, strict=True):
            folder = work.out / "stages" / str(length)
            to = work.out / MODEL if length == work.recipe.length[-1] else folder / MODEL
            finished = all(path.exists() for path in (folder / STAGE, to / CONFIG))
            if not work.processes.gather(finished)[0]:
                self._continue(model, initial, folder, to, length, steps, done)
            remedy = f"delete {folder} to have it trained again"
            stages.append(read(folder / STAGE, TypeAdapter(Continued), "a stage of extend", remedy))
            done += steps
            self.progress.update(self.bar, completed=done)
            model, initial = work.opened(to), Initial.of(to)
        return tuple(stages)

    def _continue(
        self,
        model: Transformer,
        initial: Initial,
        folder: Path,
        to: Path,
        length: int,
        steps: int,
        done: int,
    ) -> None:
        work, corpus = self.work, self.work.corpus
        rule, candidates = self._rule(model, folder, length)
        model = work.turned(model, rule)
        loss, seconds = None, 0.0
        if steps:
            training = work.training(length, steps, model.config, initial)

            def on_step(step: int, loss: float) -> None:
                self.progress.update(self.bar, completed=done + step, note=f"loss {loss:.3f} at {length}")

            try:
                trained = train(
                    training, corpus, folder, device=work.processes, on_step=on_step, stop=self.stop
                )
            except (Interrupted, Diverged) as error:
                raise type(error)(f"length {length}: {error}") from error
            loss, seconds = trained.loss, trained.seconds
            work.processes.once(lambda: keep(trained.model, to, training, corpus))
        else:
            work.processes.once(lambda: self._unchanged(model, to))
        stage = Continued(
            length=length,
            steps=steps,
            tokens=steps * work.recipe.batch_size * length,
            rule=rule,
            train_loss=loss,
            train_seconds=seconds,
            candidates=candidates,
        )
        work.processes.once(lambda: _write(folder / STAGE, stage))

    def _unchanged(self, model: Transformer, to: Path) -> None:
        on_disk.save(model, to)
        keep_tokenizer(to, self.work.corpus)
        write_history(to, self.work.history)

    def _rule(self, model: Transformer, folder: Path, length: int) -> tuple[AnyFrequencies | None, int]:
        """What the rates become at a length, and how many candidates were measured for it."""
        work, way = self.work, self.work.recipe.rule
        if not isinstance(way, Search):
            return way.at(work.present, length), 0
        channels = next(module.channels for module in model.modules() if isinstance(module, Spectral))
        batches = work.plan("validation", length, way.tokens)

        def loss_of(rule: LongRoPE) -> float:
            self.progress.update(self.bar, note=f"searching rates for {length}")
            return self._measure(work.turned(model, rule), batches).loss

        look = partial(
            search,
            way,
            work.present,
            length,
            channels=channels,
            loss_of=loss_of,
            seed=work.recipe.seed,
            path=folder / "search.json",
        )
        work.processes.once(look)
        rule, tried = look()  # which measures nothing: all losses are on the disk
        return rule, len(tried)

    def measured(self, name: str, model: Callable[[], Transformer]) -> Measured:
        """A model's losses at every length, read where an earlier sitting measured them."""
        path = self.work.out / "evaluations" / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        self.work.processes.once(lambda: path.exists() or self._write_measured(path, name, model()))
        return read(path, TypeAdapter(Measured), "an evaluation of extend", "delete it to measure again")

    def _write_measured(self, path: Path, name: str, model: Transformer) -> None:
        tokens = self.work.recipe.evaluate_tokens
        plans = [self.work.plan(SPLIT, length, tokens) for length in self.work.lengths()]
        _write(path, Measured(name=name, measurements=tuple(self._measure(model, plan) for plan in plans)))

    def _measure(self, model: Transformer, batches: Windows) -> Measurement:
        self.progress.update(self.bar, note=f"measuring at {batches.length}")
        return measure(
            model,
            _until(self.stop, batches),
            length=batches.length,
            stride=batches.stride,
            device=self.work.processes.device,
        )


def _write(path: Path, value: BaseModel) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(value.model_dump_json(indent=2))


def _until(stop: Callable[[], bool], batches: Iterable[Batch]) -> Iterator[Batch]:
    for rows in batches:
        if stop():
            raise Interrupted("measuring")
        yield rows
