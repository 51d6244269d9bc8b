"""lm-eval's tasks, on the documents of a hub or of local files, scored for a model of ours."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any, cast

from datasets import Dataset, DatasetDict
from datasets.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled
from lm_eval import evaluate
from lm_eval.api import task as lm_eval_task
from lm_eval.tasks import TaskManager

from phasewise.evaluate.cbt import DEFINITIONS
from phasewise.evaluate.documents import Row, local
from phasewise.evaluate.harness import Harness
from phasewise.evaluate.score import TaskScore

UNFILTERED = ",none"
SPLITS = ("train", "validation", "test")
COUNTED = ("ruler", "niah_", "babilong")
"""How the names begin of tasks whose documents lm-eval makes as so many tokens of a checkpoint's tokenizer."""
LEAST_LENGTH = {"ruler_vt": 1024, "ruler": 1024}
"""Where lm-eval makes documents of variable tracking: before each question it puts a worked one of up to 500 tokens,
and tries for ever where a length does not hold both."""


class Tasks:
    """The tasks that lm-eval knows, found once (it takes seconds).

    settings: what some tasks ask of their user, as RULER's `max_seq_lengths` and `tokenizer`.
    """

    def __init__(self, **settings: Any) -> None:
        self.counts = "tokenizer" in settings
        self.shortest = min(settings.get("max_seq_lengths", ()), default=None)
        with _quiet():
            self._manager = TaskManager(metadata=settings)

    def check(self, name: str) -> None:
        """Raise ValueError for a task that lm-eval does not know, local documents that cannot be read, and a length
        too short or a missing tokenizer for a task that makes its documents."""
        self._asked(name, limit=1)
        if not self.counts and name.startswith(COUNTED) and ":" not in name:
            raise ValueError(
                f"{name} makes documents of so many tokens, but no checkpoint has a tokenizer.json that counts them: "
                "evaluate it beside one that has, or give other tasks"
            )
        least = LEAST_LENGTH.get(name, 0)
        if self.shortest is not None and self.shortest < least:
            raise ValueError(
                f"lm-eval cannot make documents of {name} at {self.shortest} tokens: give lengths from {least} on"
            )

    def run(self, model: Harness, name: str, *, limit: int | None = None) -> tuple[TaskScore, ...]:
        """The scores of one task: a name that lm-eval knows, or NAME:PATH for documents in a local file.

        limit: documents of each task, of RULER's at each length. A group gives a score for each of its tasks, and
        last one of its own, the mean over them. Raises ValueError as `check` does, and for data that cannot be had.
        """
        asked = self._asked(name, limit=limit)
        with _quiet():
            try:
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                    loaded = self._manager.load([asked])
            except (ConnectionError, FileNotFoundError, ImportError, AssertionError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise ValueError(
                    f"the data of task {name} cannot be had ({reason}): give a local file, as {name}:PATH"
                ) from error
            for task in loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config("num_fewshot", 0)
            chosen = {
                task: _first(cast(Sequence[Row], each.eval_docs), limit)
                for task, each in loaded["tasks"].items()
            }
            results: Any = evaluate(
                model,
                cast(Any, loaded),
                samples=cast(Any, None if limit is None else chosen),
                bootstrap_iters=0,
                log_samples=False,
            )
        scores = [_score(task, results["results"][task], len(chosen[task])) for task in results["n-samples"]]
        return (*scores, _mean(name.partition(":")[0], scores)) if len(scores) > 1 else tuple(scores)

    def _asked(self, name: str, *, limit: int | None) -> Any:
        """What lm-eval takes for a task: its name, or a group of the tasks whose documents are given."""
        found = local(name)
        for task in (name.partition(":")[0], *(found.documents if found else ())):
            if task not in self._manager.task_index and task not in DEFINITIONS:
                raise ValueError(
                    f"lm-eval has no task {task!r}; `lm-eval ls tasks` lists those it has, and there are "
                    f"{', '.join(DEFINITIONS)}"
                )
        if found is None:
            return DEFINITIONS.get(name, name)
        given = {task: _documents(rows[:limit]) for task, rows in found.documents.items()}
        if found.task in DEFINITIONS:
            return DEFINITIONS[found.task] | given[found.task]
        # Only a group's members take their definition from lm-eval and something else beside it.
        return {"group": f"local {found.task}", "task": [{"task": task} | own for task, own in given.items()]}


def _documents(rows: list[Row]) -> dict[str, Any]:
    """What gives a task these documents, in whatever split it looks for them."""
    splits = DatasetDict(dict.fromkeys(SPLITS, Dataset.from_list(rows)))
    return {"custom_dataset": lambda **_: splits}


def _first(documents: Sequence[Row], limit: int | None) -> Sequence[int]:
    """Which documents the first `limit` are; of RULER's, of each length they were made to."""
    if limit is None:
        return range(len(documents))
    seen: dict[object, int] = {}
    chosen = []
    for number, document in enumerate(documents):
        length = document.get("max_length")
        seen[length] = seen.get(length, 0) + 1
        if seen[length] <= limit:
            chosen.append(number)
    return chosen


def _score(task: str, found: dict, examples: int) -> TaskScore:
    """The metrics of lm-eval's "none" filter, which is every one of a task without filters.

    RULER's tasks give -1 at lengths that were not asked for.
    """
    metrics = {
        name.removesuffix(UNFILTERED): float(value)
        for name, value in found.items()
        if name.endswith(UNFILTERED) and "stderr" not in name and value != -1
    }
    return TaskScore(task=task, examples=examples, metrics=metrics)


def _mean(group: str, scores: Sequence[TaskScore]) -> TaskScore:
    shared = set.intersection(*(set(score.metrics) for score in scores))
    means = {
        name: math.fsum(score.metrics[name] for score in scores) / len(scores) for name in sorted(shared)
    }
    return TaskScore(task=group, examples=sum(score.examples for score in scores), metrics=means)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's log lines and bars, which would break through the caller's own bar."""
    loggers = {name: logging.getLogger(name) for name in ("lm_eval", "huggingface_hub")}
    levels = {name: logger.level for name, logger in loggers.items()}
    bar, bars = lm_eval_task.tqdm, is_progress_bar_enabled()
    for logger in loggers.values():
        logger.setLevel(logging.ERROR)
    setattr(lm_eval_task, "tqdm", lambda rows, **_: rows)  # noqa: B010
    disable_progress_bar()
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
        setattr(lm_eval_task, "tqdm", bar)  # noqa: B010
        if bars:
            enable_progress_bar()
