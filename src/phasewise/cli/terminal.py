"""What the commands share: exit codes, options made from a recipe, errors in one line, tables uncut."""

import sys
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from rich.table import Table

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


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


def one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read or write {error.filename} ({error.strerror}): choose another path"
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    problems = []
    for problem in error.errors():
        option = "--" + str(problem["loc"][0]).replace("_", "-") + ": " if problem["loc"] else ""
        given = "" if problem["type"] == "value_error" else f", but is {problem['input']}"
        problems.append(option + problem["msg"].removeprefix("Value error, ") + given)
    return "; ".join(problems)


def print_whole(table: "Table") -> None:
    """Print a table uncut: a terminal that is narrower wraps its lines, where rich would cut the numbers."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, Console(width=10_000).measure(table).maximum)
    console.print(table)


def leave(message: str, code: int) -> int:
    print(f"phasewise: {message}", file=sys.stderr)
    return code
