"""A run folder: begun once, held by one process at a time, and read back with a remedy for what is damaged."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from phasewise.interrupt import Interrupted
from phasewise.lock import hold
from phasewise.problems import first

Value = TypeVar("Value")
Begun = TypeVar("Begun", bound=BaseModel)
RECIPE, REPORT, EVALUATION = "recipe.json", "report.json", "evaluation.json"


class Unwritten(Exception):
    """A run stopped because something could not be written; everything before it is on the disk."""


def begun_in(out: Path, kind: type[Begun], command: str) -> Begun:
    """What the run in `out` was begun with; ValueError when there is none, or one that cannot be read."""
    if not (out / RECIPE).exists():
        raise ValueError(f"{out} holds no run to resume: leave out --resume to start one there")
    remedy = f"choose another folder, or delete {out} to start again"
    return read(out / RECIPE, TypeAdapter(kind), f"a recipe of {command}", remedy)


def read(path: Path, kind: TypeAdapter[Value], name: str, remedy: str) -> Value:
    """What a JSON file holds; ValueError, with the remedy, when that is not of the kind of that name."""
    try:
        return kind.validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is not {name} ({first(error)}): {remedy}") from error


def require_free(out: Path, *, resumed: bool = True) -> None:
    """Raise ValueError for a place where no folder can be made. resumed: whether --resume goes on with one."""
    with _writable(out):
        free = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not free:
        raise _occupied(out, resumed=resumed)


def require_same(out: Path, begun: BaseModel, now: BaseModel, *, free: tuple[str, ...] = ()) -> None:
    """Raise ValueError naming what differs between two recipes, the fields in `free` aside."""
    before, after = begun.model_dump(), now.model_dump()
    differing = [
        f"{name} ({before[name]}, now {after[name]})"
        for name in after
        if name not in free and before[name] != after[name]
    ]
    if differing:
        raise ValueError(
            f"{out} was begun with another {', '.join(differing)}: "
            "resume it as begun, or choose another folder"
        )


@contextmanager
def begin(out: Path, begun: BaseModel) -> Iterator[None]:
    """Make the run folder and its recipe.json, and hold it; ValueError when another process was quicker."""
    with _writable(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
            file = (out / RECIPE).open("x")
        except FileExistsError as error:
            raise _occupied(out) from error
    with file:
        with _writable(out):
            try:
                _lock(file, out)
                (out / RECIPE).write_text(begun.model_dump_json(indent=2) + "\n")
            except (OSError, ValueError):
                (out / RECIPE).unlink()
                raise
        yield


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Hold a run folder that was begun; ValueError when another process does, or it cannot be written to."""
    with _writable(out, "make it writable, or resume a copy of it elsewhere"):
        file = (out / RECIPE).open("r+")
    with file:
        with _writable(out):
            _lock(file, out)
        yield


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """What the disk refuses within the block comes out as Unwritten."""
    try:
        yield
    except OSError as error:
        raise Unwritten(f"{out} cannot be written to ({error})") from error


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` if the block succeeds, and else goes away.

    It lies beside `out`, or within where that is an empty folder, which may be a mount or the shell's own: that is
    filled, the last name first, and never replaced. Raises ValueError where no folder can be made; what the disk
    refuses within the block comes out as Unwritten.
    """
    require_free(out, resumed=False)
    with _writable(out):
        whole = Path(
            os.path.realpath(out)
        )  # which takes a loop of links too, over which nothing can be moved then
        filled = whole.is_dir()
    unfinished = (whole if filled else whole.parent) / f".{whole.name}.{os.getpid()}"
    lacking = [parent for parent in unfinished.parents if not parent.exists()]
    try:
        with _writable(out):
            shutil.rmtree(unfinished, ignore_errors=True)  # left by one of this number that was killed
            unfinished.mkdir(parents=True)
        with writing(out):
            yield unfinished
            if filled:
                for path in sorted(unfinished.iterdir(), reverse=True):
                    os.replace(path, whole / path.name)
            else:
                os.replace(unfinished, whole)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # of one that holds what was asked for, or another's
            for parent in lacking:
                parent.rmdir()


def ask(stop: Callable[[], bool]) -> None:
    """Raise Interrupted, as between two steps of what is written within `appearing`, when `stop` says so."""
    if stop():
        raise Interrupted("nothing was written")


@contextmanager
def _writable(out: Path, remedy: str = "choose another --out") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}): {remedy}") from error


def _lock(file: IO[str], out: Path) -> None:
    hold(file.fileno(), f"another process is working on {out}: wait until it ends, or choose another --out")


def _occupied(out: Path, *, resumed: bool = True) -> ValueError:
    remedy = "choose another folder" + ", or --resume if it holds this run" * resumed
    return ValueError(f"{out} already exists: {remedy}")
