"""What the commands share: exit codes, options made from a recipe, the ends of a sitting, words and tables."""

import argparse
import errno
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ValidationError

from phasewise.cli.together import speaker
from phasewise.problems import Place, problems

if TYPE_CHECKING:
    from rich.table import Table

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Left(Exception):
    """A command ends here: its last words, and its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def early(arguments: Sequence[str], *more: str) -> argparse.Namespace:
    """`out`, `resume` and `more`, read before the other options, whose defaults the folder of a begun run holds."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    for name in more:
        parser.add_argument(f"--{name}")
    return parser.parse_known_args(arguments)[0]


def run_options() -> type:
    """The options of a run that ends in a table and figures; importing torch and tyro, so made when it is asked for."""
    import torch
    import tyro

    @dataclass(kw_only=True)
    class Options:
        out: Path
        """Run folder: a new one, or with --resume the one to go on with."""
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """Go on with the interrupted run in --out. Its other options need not be repeated."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of tables."""
        figure: bool = True
        """Draw the figures, which needs matplotlib."""
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to run: cpu | cuda | cuda:1."""

    return Options


@contextmanager
def sitting(command: str, out: Path) -> Iterator[None]:
    """A sitting of a run that `--resume` goes on with: however it ends, the user is told what is kept."""
    from phasewise.interrupt import Interrupted, Terminated
    from phasewise.train.folder import Unwritten
    from phasewise.train.loop import Diverged
    from phasewise.train.processes import parted

    remedy = (
        f"everything done so far is kept; go on with: phasewise {command} --out {quote(str(out))} --resume"
    )
    try:
        yield
    except Terminated as error:
        raise Left(f"terminated at {error}; {remedy}", 0) from error
    except Interrupted as error:
        raise Left(f"interrupted at {error}; {remedy}", INTERRUPTED) from error
    except KeyboardInterrupt as error:
        raise Left(f"interrupted{_if_begun(out, remedy)}", INTERRUPTED) from error
    except Unwritten as error:
        raise Left(f"{error}; {remedy}", FAILED) from error
    except Diverged as error:
        raise Left(str(error), FAILED) from error
    except RuntimeError as error:
        if not parted(error):
            raise
        words = "another process has ended before its work was done, and says why itself or its launcher does"
        raise Left(f"{words}{_if_begun(out, remedy)}", FAILED) from error


@contextmanager
def at_once() -> Iterator[Callable[[], bool]]:
    """The writing of a folder that is there whole or not at all: what ends it is said in one line.

    Gives what says whether Ctrl-C was pressed or SIGTERM came, to be asked between its steps.
    """
    from phasewise.interrupt import Interrupted, stoppable
    from phasewise.train.folder import Unwritten

    try:
        with stoppable() as stop:
            yield stop
    except Interrupted as error:
        raise Left(f"interrupted; {error}", INTERRUPTED) from error
    except Unwritten as error:
        raise Left(f"{error}; nothing is left there: make room, or choose another --out", FAILED) from error


def _if_begun(out: Path, remedy: str) -> str:
    return f"; {remedy}" if (out / "recipe.json").exists() else ""


def print_run(out: Path, *, as_json: bool, shown: Iterable["Table | str"]) -> None:
    """Say what a run found: its report.json alone, or what is to be shown and the names of what was written."""
    if as_json:
        print((out / "report.json").read_text(), end="")
        return
    for part in shown:
        print(part) if isinstance(part, str) else print_whole(part)
    print(written(out))


def written(out: Path) -> str:
    """Where a command wrote, and what lies there."""
    return f"Written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}"


def fields(recipe: BaseModel) -> list[tuple[str, Any, Any]]:
    """The fields of a recipe as tyro reads them, without the recipe's checks: those are made in one place.

    A choice among types is read as text: the name of a kind, or its settings in JSON.
    """
    import tyro

    found = []
    for name, info in type(recipe).model_fields.items():
        annotation, default = info.annotation, getattr(recipe, name)
        if isinstance(default, BaseModel):
            annotation, default = str, _as_text(default)
        found.append(
            (name, Annotated[annotation, tyro.conf.arg(help=info.description)], field(default=default))
        )
    return found


def _as_text(settings: Any) -> str:
    return settings.kind if settings == type(settings)() else settings.model_dump_json()


def code_of(error: Exception) -> int:
    """The exit code of a command that an error ended: a run has failed where what it found has no room on the disk."""
    return FAILED if isinstance(error, OSError) and error.errno in NO_ROOM else BAD_INPUT


def one_line(error: Exception) -> str:
    if code_of(error) == FAILED:
        assert isinstance(error, OSError)
        where = f" {error.filename}" if error.filename is not None else ""
        return f"cannot write{where} ({error.strerror}): make room, or choose another place"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read or write {error.filename} ({error.strerror}): choose another path"
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    return "; ".join(_placed(place, words) for place, words in problems(error))


def _placed(place: Place, words: str) -> str:
    """The option, and within it the setting, that a problem is of."""
    inner = ".".join(part for part in place[1:] if isinstance(part, str))
    options = [f"--{place[0]}".replace("_", "-")] if place else []
    return ": ".join([*options, *([inner] if inner else []), words])


def print_whole(table: "Table") -> None:
    """Print a table uncut: a terminal that is narrower wraps its lines, where rich would cut the numbers."""
    from rich.console import Console

    console = Console(markup=False)
    console.width = max(console.width, Console(width=10_000, markup=False).measure(table).maximum)
    console.print(table)


def leave(message: str, code: int) -> int:
    """Say the last words of a command, unless the first of several processes has; its exit code."""
    if (name := speaker(message)) is not None:
        print(f"{name}: {message}", file=sys.stderr)
    return code
