"""Progress of long work on a terminal, where names with brackets stay as they are."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def stderr() -> Console:
    """What is said while a command works, so that standard output holds its result alone."""
    return Console(stderr=True, markup=False)


def bars(console: Console | None, *, noted: bool = False, stays: bool = False) -> Progress:
    """Bars of tasks that are counted; nothing without a console.

    noted: each task has a field `note`, shown behind its bar. stays: the bars are left standing at the end, of which
    a log gets the last state.

    >>> with bars(None) as shown:
    ...     shown.advance(shown.add_task("rows", total=2))
    """
    console = console or Console(quiet=True)
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    ]
    if noted:
        columns.append(TextColumn("{task.fields[note]}", markup=False))
    return Progress(
        *columns, console=console, transient=not stays, disable=not (stays or console.is_terminal)
    )
