"""Tasks that may crash or never end, each in a process that can be lost: a GPU that met an illegal access serves no
other task of the same process.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from phasewise.interrupt import unheard

MOST_PROCESSES = 16
PATIENCE = 300.0  # seconds for a task, compilation and waiting for the GPU included


def keep_kernels() -> None:
    """Before flash-attn-4 is imported, here or in others: have its own kernels kept on disk too, and a process compile
    by itself.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


@dataclass(frozen=True)
class Lost:
    """A task without a result, and why."""

    reason: str


@dataclass
class _Worker:
    connection: Connection
    process: Any
    task: Any = None
    deadline: float = field(default=0.0)

    def give(self, task: Any, seconds: float) -> None:
        self.task, self.deadline = task, monotonic() + seconds
        self.connection.send(task)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def outcomes(
    work: Callable[[Any], Any],
    tasks: deque[Any],
    *,
    processes: int,
    seconds: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[tuple[Any, Any]]:
    """Each task with what `work` made of it, or `Lost`, as they are done; the caller may add tasks meanwhile.

    work, tasks and results must pickle. A task that raises, takes more than `seconds`, or ends its process is lost,
    and the process with it; the others go on. meanwhile: done here, once, while the first tasks are.

    >>> from operator import neg
    >>> sorted(outcomes(neg, deque([1, 2]), processes=1, seconds=60))
    [(1, -1), (2, -2)]
    """
    context = multiprocessing.get_context("spawn")
    free: list[_Worker] = []
    busy: list[_Worker] = []

    def give() -> None:
        while tasks and len(busy) < processes:
            worker = _alive(free) or _started(context, work)
            worker.give(tasks.popleft(), seconds)
            busy.append(worker)

    try:
        give()
        meanwhile()
        while tasks or busy:
            give()
            first = min(worker.deadline for worker in busy)
            ready = wait([worker.connection for worker in busy], max(0.0, first - monotonic()))
            for worker in [w for w in busy if w.connection in ready or w.deadline <= monotonic()]:
                busy.remove(worker)
                outcome = (
                    _received(worker) if worker.connection in ready else Lost(f"no end in {seconds:.0f} s")
                )
                if isinstance(outcome, Lost):
                    worker.end()
                else:
                    free.append(worker)
                yield worker.task, outcome
    finally:
        for worker in [*free, *busy]:
            worker.process.kill()
        for worker in [*free, *busy]:
            worker.end()


def _alive(free: list[_Worker]) -> _Worker | None:
    """The last that still runs; those that ended without a task go."""
    while free:
        worker = free.pop()
        if worker.process.is_alive():
            return worker
        worker.end()
    return None


def _started(context: Any, work: Callable[[Any], Any]) -> _Worker:
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, work), daemon=True)
    with unheard():
        process.start()
    there.close()
    return _Worker(here, process)


def _received(worker: _Worker) -> Any:
    try:
        return worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return Lost(f"its process ended with {worker.process.exitcode}")


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    while True:
        try:
            connection.send(work(connection.recv()))
        except EOFError:
            return
        except Exception as error:
            connection.send(Lost(f"{type(error).__name__}: {error}".splitlines()[0]))
            return
