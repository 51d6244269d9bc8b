"""What the commands that measure a checkpoint or a corpus do alike: write a report folder, print values or tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phasewise.cli.terminal import INTERRUPTED, Left, written


@dataclass(frozen=True)
class Report:
    """What a command found, and how it is to be shown."""

    kind: str
    title: str
    values: Any
    charts: Sequence[Any]
    summary: Any
    shown: Sequence[Any]
    partial: str | None


def deliver(options: Any, make: Callable[[Callable[[], bool]], Report]) -> Report:
    """Make a report, write it where `options.out` says, and print its JSON or its tables as `options.as_json` says.

    `make` is told how to ask whether Ctrl-C was pressed. The recipe is the options themselves.
    """
    from rich.console import Console

    from phasewise.interrupt import Interrupted, interruptible
    from phasewise.lens.report import check_folder, write_json, write_report

    out: Path | None = options.out
    device = getattr(options, "device", "cpu")
    if out is not None:
        check_folder(out)
    recipe = {name: _plain(value) for name, value in vars(options).items()}
    try:
        with interruptible() as stop:
            report = make(stop)
            about = {"kind": report.kind, "values": report.values, "recipe": recipe, "device": device}
            if out is not None:
                write_report(
                    out,
                    title=report.title,
                    charts=report.charts,
                    summary=report.summary,
                    partial=report.partial,
                    **about,
                )
    except Interrupted as error:
        raise Left(str(error), INTERRUPTED) from error
    if options.as_json:
        with TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            write_json(path, **about)
            print(path.read_text(), end="")
        return report
    for part in report.shown:
        Console().print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    if out is not None:
        print(written(out))
    return report


def ended(report: Report, out: Path | None, code: int = 0) -> int:
    """The exit code of a command whose report is delivered: `code`, unless it is partial."""
    if report.partial is None:
        return code
    kept = "" if out is None else f"; what was done is in {out}"
    raise Left(f"{report.partial}{kept}", INTERRUPTED)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
