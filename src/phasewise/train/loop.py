"""The training loop: each step is a function of the recipe, the corpus and the step before."""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TextIO

import torch
from torch import Tensor

from phasewise.data import Corpus, Windows, windows
from phasewise.interrupt import Interrupted
from phasewise.model import Transformer
from phasewise.train.checkpoint import Checkpoint, load, require_same_run, save, saved
from phasewise.train.metrics import cut, losses_until
from phasewise.train.optimizer import learning_rate
from phasewise.train.prefetch import ahead
from phasewise.train.processes import Processes
from phasewise.train.recipe import TrainRecipe
from phasewise.train.trainer import Trainer

VALIDATION_TOKENS = 8192
Record = dict[str, float]


class Diverged(Exception):
    """The loss or its gradient is no longer a number."""


@dataclass(frozen=True)
class Trained:
    """A model at the end of its recipe."""

    model: Transformer
    loss: float
    """Mean training loss of the last tenth of the steps, nats per scored token."""
    seconds: float
    """Time spent in training steps, over all sittings."""


def train(
    recipe: TrainRecipe,
    corpus: Corpus,
    folder: Path,
    *,
    device: torch.device | Processes,
    on_step: Callable[[int, float], None] = lambda _step, _loss: None,
    on_record: Callable[[Record, float], None] = lambda _record, _seconds: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train to the recipe's last step, from the furthest checkpoint in the folder if there is one.

    device: where; or, called in each of several processes, this one's place among them (`processes.join`).

    Writes `metrics.jsonl`, a line a step, and checkpoints. `on_step(steps_done, loss)` is told of each step,
    `on_record(metrics, seconds)` of its line and the time spent in steps so far. On a GPU both hear of a step
    when the next one has begun, so that the device never waits. When `stop()` says so a checkpoint is written
    and Interrupted raised. A run in several sittings equals the run in one, dropout included. The caller's
    random state is left as it was.

    Raises ValueError for a damaged checkpoint or one of another recipe or corpus, Diverged when the loss
    is no longer a number (the last checkpoint stays).
    """
    with sitting(
        recipe, corpus, folder, device=device, on_step=on_step, on_record=on_record, stop=stop
    ) as this:
        for _ in this.steps():
            pass
        tail = this.losses[-max(recipe.steps // 10, 1) :]
        return Trained(this.trainer.whole(), math.fsum(tail) / len(tail), this.seconds)


@contextmanager
def sitting(
    recipe: TrainRecipe,
    corpus: Corpus,
    folder: Path,
    *,
    device: torch.device | Processes,
    on_step: Callable[[int, float], None] = lambda _step, _loss: None,
    on_record: Callable[[Record, float], None] = lambda _record, _seconds: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator["Sitting"]:
    """What `train` does, one step at a time: the sitting's `steps()`."""
    processes = device if isinstance(device, Processes) else Processes(rank=0, size=1, device=device)
    recipe.divide(processes.size)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(cpu_threads(recipe.threads))
        cuda = [processes.device] if processes.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        if recipe.compile:
            torch.compiler.reset()  # a process compiles a function for so many models and no more
        checkpoints = saved(folder)
        trainer = Trainer(recipe, processes, blank=bool(checkpoints))
        done, seconds = _restore(trainer, corpus, checkpoints[-1]) if checkpoints else (0, 0.0)
        path = folder / "metrics.jsonl"
        losses = losses_until(path, done)
        if processes.first:
            cut(path, done)
        metrics = stack.enter_context((path if processes.first else Path(os.devnull)).open("a", buffering=1))
        yield Sitting(trainer, corpus, folder, metrics, losses, done, seconds, on_step, on_record, stop)


def validation(corpus: Corpus, recipe: TrainRecipe) -> Windows:
    """The windows that a training measures its validation loss on; ValueError when the corpus has none."""
    return windows(
        corpus,
        "validation",
        length=recipe.context,
        limit_tokens=recipe.evaluate_tokens,
        batch_size=max(1, VALIDATION_TOKENS // recipe.context),
    )


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch use this many CPU threads, for as long as the block lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Reading:
    """A few numbers on their way from the device, which does not wait for them."""

    def __init__(self, values: Tensor) -> None:
        self.host, self.arrived = values, None
        if values.device.type == "cuda":
            self.host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.host.copy_(values, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def values(self) -> list[float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host.tolist()


@dataclass
class Sitting:
    """The steps of one sitting, and what is written of them."""

    trainer: Trainer
    corpus: Corpus
    folder: Path
    metrics: TextIO
    losses: list[float]
    """Of every step from the first."""
    done: int
    """Steps that earlier sittings took."""
    seconds: float
    """Time spent in training steps, over all sittings."""
    on_step: Callable[[int, float], None]
    on_record: Callable[[Record, float], None]
    stop: Callable[[], bool]
    pending: deque[tuple[int, _Reading]] = field(default_factory=deque)
    stopping: bool = False
    elsewhere: float = 0.0
    """Seconds of the present step that were not training."""

    def steps(self) -> Iterator[int]:
        """Take the steps that are left; each is yielded when the device has been given it."""
        recipe, processes = self.trainer.recipe, self.trainer.processes
        behind = 1 if processes.device.type == "cuda" else 0
        with ahead(recipe, self.corpus, processes, start=self.done) as batches:
            started = perf_counter()
            for step, parts in enumerate(batches, start=self.done):
                values = self.trainer.step(step, parts)
                asked = processes.sum(torch.full_like(values[:1], float(self.stop())))
                self.pending.append((step, _Reading(torch.cat([values, asked]))))
                self._read(0 if _is_due(step, recipe.evaluate_every) else behind)
                last = step + 1 == recipe.steps
                stopping = self.stopping and not last
                saving = stopping or last or _is_due(step, recipe.checkpoint_every)
                if saving:
                    self._read(0)
                self.seconds += perf_counter() - started - self.elsewhere
                self.elsewhere = 0.0
                if saving:
                    self._save(step + 1)
                if stopping:
                    raise Interrupted(f"step {step + 1} of {recipe.steps}")
                yield step
                started = perf_counter()

    def _read(self, keep: int) -> None:
        """Take note of the steps taken, all but the last `keep`."""
        while len(self.pending) > keep:
            step, reading = self.pending.popleft()
            loss, norm, asked = reading.values()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._diverged(step, loss, norm)
            rate = learning_rate(self.trainer.recipe, step)
            record = {"step": step + 1, "loss": loss, "learning_rate": rate, "gradient_norm": norm}
            if _is_due(step, self.trainer.recipe.evaluate_every):
                record["validation_loss"] = self._validate()
            self.losses.append(loss)
            self.metrics.write(json.dumps(record) + "\n")
            self.on_step(step + 1, loss)
            self.on_record(record, self.seconds)
            self.stopping = self.stopping or asked > 0

    def _validate(self) -> float:
        started = perf_counter()
        loss = self.trainer.measure(validation(self.corpus, self.trainer.recipe)).loss
        self.elsewhere += perf_counter() - started
        return loss

    def _save(self, done: int) -> None:
        if self.trainer.processes.first:
            os.fsync(self.metrics.fileno())
        checkpoint = Checkpoint(
            step=done,
            seconds=self.seconds,
            recipe=self.trainer.recipe.model_dump(mode="json"),
            corpus=self.corpus.sha256,
            state=self.trainer.state(),
        )
        save(self.folder, checkpoint, processes=self.trainer.processes)

    def _diverged(self, step: int, loss: float, norm: float) -> Diverged:
        kept = saved(self.folder)
        where = f"; {kept[-1]} is from before" if kept else ""
        return Diverged(
            f"training diverged at step {step + 1}: loss {loss}, gradient norm {norm}{where}. "
            "Lower the learning rate or lengthen the warm-up"
        )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and (step + 1) % every == 0


def _restore(trainer: Trainer, corpus: Corpus, path: Path) -> tuple[int, float]:
    """Bring the trainer to a checkpoint; the steps done and the seconds they took."""
    require_same_run(path, trainer.recipe, corpus)
    state = trainer.state()
    known = load(path, state, processes=trainer.processes)
    trainer.restore(state)
    return known.step, known.seconds
