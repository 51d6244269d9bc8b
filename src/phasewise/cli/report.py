"""What the commands that measure a checkpoint or a corpus do alike: write a report folder, print values or tables."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from phasewise.cli.terminal import FAILED, INTERRUPTED, Left, one_line, print_whole, written


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


def report_options() -> type:
    """The options of a report on a checkpoint; importing torch and tyro, so made when it is asked for."""
    import torch
    import tyro

    @dataclass(kw_only=True)
    class Options:
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to run the model: cpu | cuda | cuda:1."""
        out: Path | None = None
        """Report folder: a new one. None: only the table."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of the table."""

    return Options


def deliver(options: Any, make: Callable[[Callable[[], bool]], Report]) -> Report:
    """Make a report, write it where `options.out` says, and print its JSON or its tables as `options.as_json` says.

    `make` is told how to ask whether Ctrl-C was pressed, or SIGTERM came. The recipe is the options themselves.
    What cannot be written is printed all the same.
    """
    from rich.console import Console
    from rich.table import Table

    from phasewise.interrupt import Interrupted, interruptible
    from phasewise.lens.report import check_folder, json_text, write_report

    out: Path | None = options.out
    device = getattr(options, "device", "cpu")
    if out is not None:
        check_folder(out)
    recipe = {name: _plain(value) for name, value in vars(options).items()}
    unwritten = None
    try:
        with interruptible() as pressed, interruptible(signal.SIGTERM) as told:
            report = make(lambda: pressed() or told())
            about = {"kind": report.kind, "values": report.values, "recipe": recipe, "device": device}
            try:
                if out is not None:
                    write_report(
                        out,
                        title=report.title,
                        charts=report.charts,
                        summary=report.summary,
                        partial=report.partial,
                        **about,
                    )
            except (ValueError, OSError) as error:
                unwritten = f"the report in {out} is not whole ({one_line(error)}); what was found is printed"
    except Interrupted as error:
        raise Left(str(error), INTERRUPTED) from error
    if options.as_json:
        print(json_text(**about), end="")
    else:
        for part in report.shown:
            if isinstance(part, Table):
                print_whole(part)
            else:
                Console(markup=False).print(part, highlight=False, soft_wrap=isinstance(part, str))
    if unwritten is not None:
        raise Left(unwritten, FAILED)
    if out is not None and not options.as_json:
        print(written(out))
    return report


def ended(report: Report, out: Path | None, code: int = 0) -> int:
    """The exit code of a command whose report is delivered: `code`, unless it is partial."""
    if report.partial is None:
        return code
    kept = "" if out is None else f"; what was done is in {out}"
    raise Left(f"{report.partial}{kept}", INTERRUPTED)


def named(checkpoint: Path) -> str:
    """The name of a checkpoint: that of its folder, or of the training whose model it is."""
    from phasewise.model.folder import MODEL

    folder = checkpoint.resolve()
    return folder.parent.name if folder.name == MODEL else folder.name


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
