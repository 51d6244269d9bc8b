"""phasewise doctor."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phasewise.cli.report import Report, deliver, ended, named, report_options
from phasewise.cli.terminal import FAILED

DOCTOR = """Find what is silently wrong with the positions of a checkpoint, or of a config.json alone.

The checkpoint is a folder: a Hugging Face decoder with rotary positions, or a model of this library; of a
config.json alone, only what needs no weights is checked. Exit code 1 when something is wrong. With --out it also
writes a report folder; with --fix, the config with the corrections that need no guess."""


def doctor(arguments: Sequence[str]) -> int:
    """Find what is silently wrong with the positions of a checkpoint; exit code 1 when something is."""
    import tyro

    from phasewise.lens.doctor.examine import doctor
    from phasewise.lens.doctor.opening import is_hugging_face
    from phasewise.lens.doctor.repair import destination, repair, write
    from phasewise.lens.doctor.show import figures, repaired, summary, table
    from phasewise.lens.report import require_writable
    from phasewise.model.folder import CONFIG, inside, read_settings
    from phasewise.progress import stderr

    @dataclass(kw_only=True)
    class Options(report_options()):
        checkpoint: tyro.conf.Positional[Path]
        """Folder of the checkpoint, or a config.json."""
        length: int | None = None
        """Tokens it is to serve. None: what its config states, or 4096."""
        trained_length: int | None = None
        """Tokens it was trained at. None: what its config or history.json says."""
        dtype: str | None = None
        """Serve in float32 | bfloat16 | float16. None: as stored."""
        fix: Path | None = None
        """Where to write the corrected config: a new file, or a folder for its config.json. Never in place."""

    options = tyro.cli(Options, prog="phasewise doctor", args=arguments, description=DOCTOR)
    folder = inside(options.checkpoint)
    source = folder / CONFIG if folder.is_dir() else folder
    fixed_at = None if options.fix is None else destination(options.fix, source)
    if fixed_at is not None:
        require_writable(fixed_at.parent)
        if not is_hugging_face(read_settings(source)):
            raise ValueError(
                f"{source} is a config of this library, which cannot contradict itself; leave --fix out"
            )

    def make(stop: Callable[[], bool]) -> Report:
        found = doctor(
            options.checkpoint,
            length=options.length,
            trained_length=options.trained_length,
            dtype=options.dtype,
            device=options.device,
            console=stderr(),
            stop=stop,
        )
        title = f"Positions of {named(options.checkpoint)}"
        shown = [table(found)]
        if fixed_at is not None:
            content, done = repair(read_settings(source), found)
            write(content, fixed_at)
            shown.append(f"Written to {fixed_at}.\n{repaired(done)}")
        return Report("doctor", title, found, figures(found), summary(found), shown, found.partial)

    report = deliver(options, make)
    if options.as_json:
        print(*report.shown[1:], sep="\n", end="", file=sys.stderr)
    return ended(report, options.out, FAILED if report.values.wrong else 0)
