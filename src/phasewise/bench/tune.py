"""The launch table measured on this GPU: `phasewise bench attention --tune`.

Candidates of `tunable` are compiled in processes, as many at a time as there are processors; one at a time has the GPU,
to be held to the reference and timed. The fastest few and the present row are then measured in turns.
"""

import fcntl
import itertools
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch

from phasewise.bench.timing import side_by_side
from phasewise.bench.tunable import HEADS, TOKENS, Meta, Subject, Trial, unique
from phasewise.bench.workers import MOST_PROCESSES, PATIENCE, Lost, outcomes
from phasewise.kernels import table
from phasewise.kernels.table import Row
from phasewise.lock import hold
from phasewise.record import certified, parsed, ready, record, replacing

GAIN = 0.02  # by which another row must be faster than the present one
WORST = 0.01  # relative error of a right result; bf16 operands cost 0.2 to 0.5 %
BEHIND = 0.1  # by which what is slower than the fastest after two rounds is measured no longer
COMPILED = 2048  # tokens a row of the call that compiles a candidate, while others are being timed
KEPT = 2  # metas from which a round goes on to the next one's settings
FINALISTS, FEW = 3, 6  # metas measured in turns beside the present; as many as go there at once
DTYPES = ("bfloat16", "float16")  # measured in the first; instructions of the second take as long
Chains = Callable[[], list[list[list[Subject]]]]


class Task(NamedTuple):
    """Metas of a subject to be timed at each of its lengths, in turns when they are the last ones."""

    subject: str
    metas: tuple[Meta, ...]
    final: bool


class Refused(NamedTuple):
    """Why a candidate has no time."""

    reason: str
    wrong: bool = False


Result = float | Refused
Results = Mapping[int, Sequence[Result]]


@dataclass
class Work:
    """What a process does: tasks of `chains`, the GPU shared by turns; the last subject's inputs are kept."""

    chains: Chains
    turn: str
    kept: tuple[str, dict[int, Trial]] = field(default=("", {}))

    def __call__(self, task: Task) -> Results:
        if not self.kept[0]:
            start_gpu()  # which takes seconds, while the GPU is another's
        table.reread()
        subject = next(
            s for chain in self.chains() for stage in chain for s in stage if s.name == task.subject
        )
        if self.kept[0] != subject.name:
            self.kept = subject.name, {}
        for length in subject.lengths:
            self.trial(subject, length).truth()
        short = min(COMPILED, *subject.lengths)
        refused = [attempt(self.run(subject, meta, short)) for meta in task.metas]
        with self.alone():
            return {length: self.timed(subject, task, refused, length) for length in subject.lengths}

    def timed(
        self, subject: Subject, task: Task, refused: Sequence[Refused | None], length: int
    ) -> list[Result]:
        found = [
            why or attempt(self.run(subject, meta, length, judged=True))
            for meta, why in zip(task.metas, refused, strict=True)
        ]
        calls = {
            str(i): self.run(subject, task.metas[i], length) for i, why in enumerate(found) if why is None
        }
        sampled = {"rounds": 5, "repeats": 3} if task.final else {"rounds": 3, "repeats": 1}
        times = side_by_side(calls, behind=BEHIND, **sampled) if calls else {}
        return [times[str(i)].median if why is None else why for i, why in enumerate(found)]

    def trial(self, subject: Subject, length: int) -> Trial:
        trials = self.kept[1]
        if length not in trials:
            trials[length] = subject.make(length)
        return trials[length]

    def run(self, subject: Subject, meta: Meta, length: int, *, judged: bool = False) -> Callable[[], object]:
        """A call with `meta` in force, which raises Wrong if it is judged and does not give what it has to."""
        trial = self.trial(subject, length)

        def call() -> None:
            with in_force(subject, meta, length):
                if not judged:
                    trial.run()
                elif not (error := trial.error()) < WORST:
                    raise Wrong(f"{error:.1e} from the reference")

        return call

    @contextmanager
    def alone(self) -> Iterator[None]:
        with open(self.turn, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # as many processes share the device's memory


class Wrong(Exception):
    """A result is not what it has to be."""


def attempt(call: Callable[[], object]) -> Refused | None:
    """Why a call cannot be made, if it cannot."""
    try:
        call()
    except Exception as error:  # compilers have many ways to refuse a configuration
        torch.cuda.synchronize()  # raises where the process cannot go on
        return Refused(f"{type(error).__name__}: {error}".splitlines()[0][:200], isinstance(error, Wrong))
    return None


def start_gpu() -> None:
    """Make this process's context, and that of its matrix products."""
    x = torch.ones(16, 16, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    torch.cuda.synchronize()


@contextmanager
def in_force(subject: Subject, meta: Meta, length: int) -> Iterator[None]:
    """Let `meta`, and what brings the call about, win over all rows of the table for as long as the block lasts."""
    rows = table.launch_table()["rows"]
    trial = [
        row_of(subject, name, x, DTYPES[0], length)
        for name, x in {**subject.fixed, subject.kernel: meta}.items()
    ]
    rows[:0] = trial
    table.forget_choices()
    try:
        yield
    finally:
        del rows[: len(trial)]
        table.forget_choices()


def row_of(subject: Subject, kernel: str, meta: Meta, dtype: str, length: int | None) -> Row:
    return {
        "kernel": kernel, "device": torch.cuda.get_device_name(), "dtype": dtype, "qk": subject.qk, "v": subject.v,
        "length": length, "meta": dict(meta),
    }  # fmt: skip


def rows_of(subject: Subject, metas: Mapping[int, Meta]) -> list[Row]:
    """A family of rows, of what a subject takes at each length."""
    return [
        row_of(subject, subject.kernel, meta, dtype, length)
        for dtype in DTYPES
        for length, meta in buckets(metas)
    ]


def present(subject: Subject, length: int) -> Meta:
    """What a subject takes at a length."""
    return present_row(subject, length)["meta"]


def present_row(subject: Subject, length: int) -> Row:
    """The row that serves a subject on this device, or else on any other that the table knows."""
    device, kind = torch.cuda.get_device_name(), getattr(torch, DTYPES[0])
    sizes = {"qk": subject.qk, "v": subject.v, "length": length}
    try:
        return table.row(subject.kernel, device, kind, **sizes)
    except ValueError:
        others = {r["device"] for r in table.launch_table()["rows"] if r["kernel"] == subject.kernel}
        return table.row(subject.kernel, max(others - {"cpu"}), kind, **sizes)


def tune(chains: Chains, journal: Path, *, only: Sequence[str] = ("",)) -> list[Row]:
    """Time the candidates of every subject on this GPU; write the rows that beat the table by 2 %.

    chains: subjects by stages, those of a stage to be decided before those of the next, chain beside chain. only:
    subjects of a stage so called, or whose name, the kernel's and its widths, holds one of these. journal: a record of
    all that was measured, subject by subject. Where it was interrupted on this device, with these versions and at this
    commit, tuning goes on.

    Returns the rows written, of this device alone; each family of rows is written whole, when it is decided. Raises
    ValueError without a CUDA device, for a part of no name, a journal that is none, and beside another tuning.
    """
    if not torch.cuda.is_available():
        raise ValueError("tuning measures a CUDA device and there is none; leave --tune out")
    with sole_writer(), tempfile.TemporaryDirectory() as folder:
        ready(journal)
        planned = chains()
        subjects = [subject for chain in planned for stage in chain for subject in stage]
        decided = Decided.resumed(journal, subjects)
        for part in only:
            if not any(subject.within(part) for subject in subjects):
                stages = ", ".join(dict.fromkeys(subject.stage for subject in subjects))
                names = ", ".join(sorted({subject.name for subject in subjects}))
                raise ValueError(
                    f"no stage is called {part!r} ({stages}), and no row of the launch table: {names}"
                )

        def wanted(subject: Subject) -> bool:
            return not decided.has(subject) and any(subject.within(part) for part in only)

        work = Work(chains, os.path.join(folder, "turn"))
        left = [[list(filter(wanted, stage)) for stage in chain] for chain in planned]
        for subject, metas, results in measured(work, left):
            decided.add(subject, metas, results)
        decided.keep(complete=True)
    return decided.rows


@contextmanager
def sole_writer() -> Iterator[None]:
    """Hold the launch table's folder, and make sure that the table can be replaced.

    Raises ValueError where another tuning holds it, OSError where it is read-only.
    """
    ready(table.PATH)
    folder = os.open(table.PATH.parent, os.O_RDONLY)
    try:
        hold(folder, f"another tuning rewrites {table.PATH}; wait for its end")
        yield
    finally:
        os.close(folder)


@dataclass
class Screening:
    """A subject whose candidates are being timed, one a task, or all in turns when they are few."""

    subject: Subject
    chain: int
    first: list[Meta]
    metas: list[Meta]
    number: int = 0
    left: int = 0
    times: list[tuple[float, Meta]] = field(default_factory=list)

    @classmethod
    def of(cls, subject: Subject, chain: int) -> "Screening":
        first = unique([present(subject, length) for length in subject.lengths])
        return cls(subject, chain, first, subject.candidates(first, 0))

    def tasks(self) -> list[Task]:
        if len(self.metas) <= FEW and len(self.subject.rounds) <= 1:
            return [self.final(self.metas)]
        self.left = len(self.metas)
        return [Task(self.subject.name, (meta,), False) for meta in self.metas]

    def final(self, metas: Sequence[Meta]) -> Task:
        return Task(self.subject.name, tuple(metas), True)

    def take(self, meta: Meta, found: Results) -> list[Task]:
        """A candidate's times; the last one's of a round bring the tasks of the next, or of the finalists."""
        results = [result for (result,) in found.values()]
        timed = [x for x in results if isinstance(x, float)]
        if len(timed) == len(results):
            self.times.append((sum(timed), meta))
        for refused in (x for x in results if isinstance(x, Refused) and x.wrong):
            print(f"{self.subject.name} {meta}: {refused.reason}", flush=True)
        self.left -= 1
        if self.left > 0:
            return []
        fastest = [meta for _, meta in sorted(self.times, key=lambda x: x[0])]
        new: list[Meta] = []
        while not new and self.number < len(self.subject.rounds):
            self.number += 1
            tried = self.subject.candidates(fastest[:KEPT] or self.first, self.number)
            new = [meta for meta in tried if meta not in self.metas]
        self.metas += new
        self.left = len(new)
        if new:
            return [Task(self.subject.name, (meta,), False) for meta in new]
        return [self.final(unique([*self.first, *fastest[:FINALISTS]]))]


def measured(
    work: Work, chains: Sequence[Sequence[Sequence[Subject]]]
) -> Iterator[tuple[Subject, list[Meta], Results]]:
    """Each subject with its finalists, the present rows first, and their times at each length."""
    tasks: deque[Task] = deque()
    waiting = [deque(chain) for chain in chains]
    screened: dict[str, Screening] = {}

    def begin(chain: int) -> None:
        """A chain's next stage, when the one before is decided, of what there is a choice for."""
        while waiting[chain] and not any(screening.chain == chain for screening in screened.values()):
            for screening in (Screening.of(subject, chain) for subject in waiting[chain].popleft()):
                if len(screening.metas) > 1 or len(screening.subject.rounds) > 1:
                    screened[screening.subject.name] = screening
                    tasks.extendleft(screening.tasks())

    for chain in reversed(range(len(chains))):
        begin(chain)
    processes = min(MOST_PROCESSES, os.cpu_count() or 1)
    for task, found in outcomes(work, tasks, processes=processes, seconds=PATIENCE):
        screening = screened[task.subject]
        if isinstance(found, Lost):
            print(f"{task.subject} {task.metas}: {found.reason}", flush=True)
            found = {n: [Refused(found.reason)] * len(task.metas) for n in screening.subject.lengths}
        if task.final:
            yield screening.subject, list(task.metas), found
            del screened[task.subject]
            begin(screening.chain)
        else:
            tasks.extendleft(screening.take(task.metas[0], found))


@dataclass
class Decided:
    """What was measured and written so far, and its record."""

    journal: Path
    subjects: Sequence[Subject]
    values: dict[str, Any]
    rows: list[Row]

    @classmethod
    def resumed(cls, journal: Path, subjects: Sequence[Subject]) -> "Decided":
        """From the record of a tuning that was interrupted here, when there is one."""
        if journal.exists():
            try:
                known = parsed(journal.read_text(encoding="utf-8"))
                values, rows = known["values"]["subjects"], known["values"]["rows"]
                goes_on = not known["values"]["complete"]
                made = [known[name] for name in ("device", "versions", "commit")]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{journal} holds no times of a tuning; move it, or choose another --out"
                ) from error
            now = certified(recipe={}, values={}, device="cuda")
            if goes_on and made == [now[name] for name in ("device", "versions", "commit")]:
                return cls(journal, subjects, values, rows)
        return cls(journal, subjects, {}, [])

    def has(self, subject: Subject) -> bool:
        """Whether a subject was measured at its lengths."""
        times = self.values.get(subject.name, [])
        return {time["length"] for time in times} == set(subject.lengths)

    def add(self, subject: Subject, metas: list[Meta], results: Results) -> None:
        """Decide a subject, write its rows if it changes, and the record."""
        before = {length: present(subject, length) for length in subject.lengths}
        after = {n: decision(metas, results[n], before[n]) for n in subject.lengths}
        self.values[subject.name] = [
            {"length": n, "meta": dict(meta), **({"refused": x.reason} if isinstance(x, Refused) else {"ms": x})}
            for n in subject.lengths
            for meta, x in zip(metas, results[n], strict=True)
        ]  # fmt: skip
        if after != before:
            rows = [*self.pinned(subject), *rows_of(subject, after)]
            write(rows)
            self.rows += rows
        print(line(subject, metas, results, before, after), flush=True)
        self.keep(complete=False)

    def pinned(self, subject: Subject) -> Iterator[Row]:
        """Rows of their own for narrower subjects of the same kernel, so that they keep what serves them."""
        for other in self.subjects:
            within = other.kernel == subject.kernel and other.qk <= subject.qk and other.v <= subject.v
            served = {length: present_row(other, length) for length in other.lengths}
            if (
                within
                and other != subject
                and any((r["qk"], r["v"]) != (other.qk, other.v) for r in served.values())
            ):
                yield from rows_of(other, {length: row["meta"] for length, row in served.items()})

    def keep(self, *, complete: bool) -> None:
        recipe = {
            "what": "the finalists for rows of the launch table, held to the reference in float32, measured in turns",
            "gain": GAIN, "tokens": TOKENS, "heads": HEADS, "seed": 0,
            "samples": "5 rounds of 3 replays of a CUDA graph; 2 rounds for what is further behind the fastest",
            "behind": BEHIND,
        }  # fmt: skip
        values = {"complete": complete, "subjects": self.values, "rows": self.rows}
        record(self.journal, recipe=recipe, values=values, device="cuda")


def decision(metas: Sequence[Meta], results: Sequence[Result], before: Meta) -> Meta:
    """The fastest meta if it beats the present one by 2 %; an order of bodies is put in that of their times.

    >>> decision([{"body": "a"}, {"body": "b"}], [1.0, 0.99], {"body": "a"})
    {'body': 'a'}
    >>> decision([{"order": ["a", "b"]}, {"order": ["b", "a"]}], [1.0, 0.9], {"order": ["a", "b"]})
    {'order': ['b', 'a']}
    """
    timed = [(x, meta) for x, meta in zip(results, metas, strict=True) if isinstance(x, float)]
    if not timed:
        return before
    if "order" in before:
        took = {meta["order"][0]: x for x, meta in timed}
        return {"order": reordered(before["order"], took)}
    took, fastest = min(timed, key=lambda x: x[0])
    known = next((x for x, meta in timed if meta == before), None)
    if known is None and "body" in before:
        return before  # of a package that is not installed here, perhaps
    return fastest if known is None or took < (1 - GAIN) * known else before


def reordered(before: Sequence[str], took: Mapping[str, float]) -> list[str]:
    """Bodies in the order of their times; those without one, as what is not installed here, keep their places.

    >>> reordered(["a", "b", "c"], {"b": 1.0, "c": 0.9})
    ['a', 'c', 'b']
    """
    order: list[str] = []
    for body in filter(took.__contains__, before):
        place = len(order)
        while place > 0 and took[body] < (1 - GAIN) * took[order[place - 1]]:
            place -= 1
        order.insert(place, body)
    measured = iter(order)
    return [next(measured) if body in took else body for body in before]


def buckets(after: Mapping[int, Meta]) -> Iterator[tuple[int | None, Meta]]:
    """The greatest length that each meta serves, halfway (in octaves) between those measured, equal neighbours as one.

    >>> list(buckets({2048: {"body": "a"}, 8192: {"body": "b"}, 32768: {"body": "b"}}))
    [(4096, {'body': 'a'}), (None, {'body': 'b'})]
    """
    lengths = sorted(after)
    for length, following in itertools.zip_longest(lengths, lengths[1:]):
        if following is None:
            yield None, after[length]
        elif after[length] != after[following]:
            yield isqrt(length * following), after[length]


def line(subject: Subject, metas: Sequence[Meta], results: Results, before: Mapping, after: Mapping) -> str:
    def runs(meta: Meta) -> str:
        return str(meta["order"][0] if "order" in meta else meta)

    parts = []
    for length, found in results.items():
        times = {runs(meta): x for meta, x in zip(metas, found, strict=True) if isinstance(x, float)}
        was, now = (times.get(runs(x[length])) for x in (before, after))
        changed = "stays" if before[length] == after[length] else f"{dict(after[length])}"
        parts.append(f"at {length} {was and round(was, 4)} -> {now and round(now, 4)} ms {changed}")
    return f"{subject.name}: {'; '.join(parts)}"


def write(rows: Sequence[Row]) -> None:
    """Put rows into the launch table in the place of those of the same kernel, device, dtype and widths."""
    document = json.loads(table.PATH.read_text())
    family = ("kernel", "device", "dtype", "qk", "v")
    replaced = {tuple(row[name] for name in family) for row in rows}
    kept = [row for row in document["rows"] if tuple(row[name] for name in family) not in replaced]
    document["rows"] = [*kept, *rows]
    parts = [f'  "{name}": {_lines(value)}' for name, value in document.items()]
    with replacing(table.PATH) as unfinished:
        unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    table.reread()


def _lines(rows: list[Row]) -> str:
    return "[\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n  ]"
