"""Several checkpoints measured on the same corpora, passkeys and tasks, into a run folder that resumes."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter
from rich.console import Console
from rich.progress import Progress

from phasewise.data import Batch, Corpus, Windows
from phasewise.device import usable
from phasewise.evaluate import Measurement, Retrieval, TaskScore, measure, retrieve
from phasewise.figures import require_matplotlib
from phasewise.interrupt import Interrupted, stoppable
from phasewise.memory import shortage
from phasewise.progress import bars
from phasewise.record import record, replacing
from phasewise.train.evaluation_plan import Plan, Subject
from phasewise.train.evaluation_recipe import Begun, EvaluateRecipe, read_begun
from phasewise.train.evaluation_report import (
    CorpusLoss,
    Evaluated,
    Evaluation,
    NeedleTable,
    Report,
    draw,
    draw_needles,
)
from phasewise.train.folder import REPORT, begin, held, read, require_free, require_same, writing
from phasewise.train.report import CorpusFacts

PARTS = "parts"
SUFFIXES = (".svg", ".png")
Value = TypeVar("Value", Measurement, Retrieval, tuple[TaskScore, ...])


def evaluate(
    recipe: EvaluateRecipe,
    out: Path,
    *,
    resume: bool = False,
    figure: bool = True,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> Evaluation:
    """Measure what the recipe says into the run folder `out`, telling `console` of the progress.

    The folder gets recipe.json at once, a file in parts/ for everything measured, and at the end report.json
    and the figures. Ctrl-C raises Interrupted with all finished parts on the disk; `resume` goes on from there.

    Raises ValueError before anything is measured or written for a folder that holds something else, lengths
    beyond the corpus, a checkpoint that is not whole or has another vocabulary than its tokenizer, an unknown
    task and a missing package; Unwritten when something cannot be written, as on a full disk.
    """
    if figure:
        require_matplotlib()
    if not resume:
        require_free(out)
        plan = Plan(recipe, usable(device))
        with begin(out, Begun(recipe=recipe, corpora=plan.hashes)):
            return _finish(plan, out, figure=figure, console=console)
    begun = read_begun(out)
    require_same(out, begun.recipe, recipe)
    if (out / REPORT).exists():
        remedy = "delete it to have it made again from the parts"
        return read(out / REPORT, TypeAdapter(Report), "a report of evaluate", remedy).values
    with held(out):
        plan = Plan(recipe, usable(device))
        other = [name for name, sha256 in plan.hashes.items() if begun.corpora.get(name) != sha256]
        if other:
            raise ValueError(
                f"the corpus {other[0]} has changed since {out} was begun: choose another folder"
            )
        return _finish(plan, out, figure=figure, console=console)


def _finish(plan: Plan, out: Path, *, figure: bool, console: Console | None) -> Evaluation:
    """Measure what is left to measure in a run folder that this process holds."""
    progress = bars(console)
    with writing(out):
        (out / PARTS).mkdir(exist_ok=True)
        with stoppable() as stop, progress:
            sitting = _Sitting(plan, out / PARTS, stop, progress)
            rows = tuple(sitting.evaluated(number) for number in range(len(plan.subjects)))
        evaluation = Evaluation(split=plan.recipe.split, seconds=math.fsum(sitting.seconds), rows=rows)
        if figure:
            for suffix in SUFFIXES:
                if evaluation.curves:
                    draw(evaluation, out / f"figure{suffix}")
                if plan.recipe.needles:
                    draw_needles(evaluation, out / f"needles{suffix}")
        # Last: a folder with a report is a finished run.
        record(
            out / REPORT,
            recipe=plan.recipe.model_dump(mode="json"),
            values=evaluation.model_dump(mode="json"),
            device=plan.device,
        )
    return evaluation


class _Part(BaseModel):
    """What a file in parts/ holds: one thing measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    value: Measurement | Retrieval | tuple[TaskScore, ...]


class _Sitting:
    """One sitting of an evaluation: parts that are on the disk are read, the others measured and written."""

    def __init__(self, plan: Plan, folder: Path, stop: Callable[[], bool], progress: Progress) -> None:
        self.plan, self.folder, self.stop, self.progress = plan, folder, stop, progress
        self.seconds: list[float] = []

    def evaluated(self, number: int) -> Evaluated:
        """Everything of one checkpoint."""
        subject, recipe = self.plan.subjects[number], self.plan.recipe
        losses = []
        for place, (corpus, over) in enumerate(zip(subject.corpora, subject.windows, strict=True)):
            found = [self._loss(f"{number}-{place}-{each.length}", subject, each) for each in over]
            if found:
                losses.append(_corpus_loss(corpus, over, tuple(found)))
        retrieval = tuple(
            NeedleTable(
                corpus=subject.text.name if subject.text else "",
                needles=count,
                cells=tuple(
                    cell
                    for length in sorted(recipe.lengths)
                    for cell in self._needles(
                        f"{number}-needles-{count}-{length}", subject, count, length
                    ).cells
                ),
            )
            for count in recipe.needles
        )
        tasks = [
            score
            for place, task in enumerate(recipe.tasks)
            for score in self._task(f"{number}-task-{place}", subject, task)
        ]
        return Evaluated(
            checkpoint=subject.facts, losses=tuple(losses), retrieval=retrieval, tasks=tuple(tasks)
        )

    def _loss(self, name: str, subject: Subject, over: Windows) -> Measurement:
        def work(advance: Callable[[int], None]) -> Measurement:
            return measure(
                self.plan.model(subject),
                _told(over, advance),
                length=over.length,
                stride=over.stride,
                device=self.plan.device,
                answers=over.corpus.task is not None,
            )

        title = f"{subject.facts.name}: {over.corpus.name.partition(',')[0]} at {over.length}"
        return self._part(name, Measurement, title, len(over), work)

    def _needles(self, name: str, subject: Subject, count: int, length: int) -> Retrieval:
        recipe = self.plan.recipe

        def work(advance: Callable[[int], None]) -> Retrieval:
            return retrieve(
                self.plan.model(subject),
                self.plan.needles(subject, count, length, examples=recipe.examples),
                device=self.plan.device,
                batch_size=max(1, recipe.batch_tokens // length),
                on_rows=advance,
            )

        title = f"{subject.facts.name}: needles ({count}) at {length}"
        return self._part(name, Retrieval, title, recipe.examples * len(recipe.depths), work)

    def _task(self, name: str, subject: Subject, task: str) -> tuple[TaskScore, ...]:
        def work(advance: Callable[[int], None]) -> tuple[TaskScore, ...]:
            from phasewise.evaluate.harness import Harness

            assert self.plan.tasks is not None
            harness = Harness(
                self.plan.bare(subject.facts.folder),
                self.plan.text(subject),
                device=self.plan.device,
                batch_tokens=self.plan.recipe.batch_tokens,
                on_rows=advance,
            )
            return self.plan.tasks.run(harness, task, limit=self.plan.recipe.task_limit)

        return self._part(name, tuple, f"{subject.facts.name}: {task.partition(':')[0]}", None, work)

    def _part(
        self,
        name: str,
        kind: type,
        title: str,
        total: int | None,
        work: Callable[[Callable[[int], None]], Value],
    ) -> Value:
        """The part of that name: read, or measured by `work` and written; a bar counts its rows or batches."""
        path = self.folder / f"{name}.json"
        if path.exists():
            part = read(path, TypeAdapter(_Part), "a part of evaluate", "delete it to have it measured again")
            assert isinstance(part.value, kind)
            self.seconds.append(part.seconds)
            return part.value  # type: ignore[return-value]
        bar = self.progress.add_task(title, total=total)

        def advance(rows: int) -> None:
            self.progress.advance(bar, rows)
            if self.stop():
                raise Interrupted(title)

        started = perf_counter()
        try:
            value = work(advance)
        except (MemoryError, RuntimeError) as error:
            if shortage(error) is None:
                raise
            raise ValueError(
                f"{title} does not fit into the memory of {self.plan.device}: lower batch_tokens or lengths, or "
                "give dtype bfloat16"
            ) from None
        part = _Part(seconds=perf_counter() - started, value=value)
        with replacing(path) as unfinished:
            unfinished.write_text(part.model_dump_json(indent=2) + "\n", encoding="utf-8")
        self.seconds.append(part.seconds)
        self.progress.remove_task(bar)
        self.progress.console.print(f"{title}: {part.seconds:.1f} s")
        return value


def _told(over: Windows, advance: Callable[[int], None]) -> Iterator[Batch]:
    for batch in over:
        yield batch
        advance(1)


def _corpus_loss(corpus: Corpus, over: tuple[Windows, ...], found: tuple[Measurement, ...]) -> CorpusLoss:
    return CorpusLoss(
        corpus=CorpusFacts.of(corpus, over[0].split),
        task=corpus.task is not None,
        measurements=found,
        bits_per_byte=None if corpus.bytes_per_token is None else _bits_per_byte(found, _bytes(over[0])),
    )


def _bits_per_byte(found: tuple[Measurement, ...], size: int) -> tuple[float, ...]:
    """Of every length: all score the same tokens, whose text has `size` bytes."""
    return tuple(measured.bits * measured.tokens / size for measured in found)


def _bytes(over: Windows) -> int:
    """UTF-8 bytes of the text of the scored tokens.

    Less those of the first, as some tokenizers leave out the space before whatever token is the first to be decoded.
    """
    if over.corpus.unit == "byte":
        return over.scored
    split, decode = over.corpus.split(over.split), over.corpus.decode
    texts = (
        (decode(split[number][: 1 + targets]), decode(split[number][:1])) for number, targets in over.spans
    )
    return sum(len(whole.encode()) - len(first.encode()) for whole, first in texts)
