"""phasewise doctor."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from phasewise.cli.terminal import FAILED, INTERRUPTED, leave

DOCTOR = """Find what is silently wrong with the positions of a checkpoint, or of a config.json alone.

The checkpoint is a folder: a Hugging Face decoder with rotary positions, or a model of this library; of a
config.json alone, only what needs no weights is checked. Exit code 1 when something is wrong. With --out it also
writes a report folder; with --fix, the config with the corrections that need no guess."""


def doctor(arguments: Sequence[str]) -> int:
    """Find what is silently wrong with the positions of a checkpoint; exit code 1 when something is."""
    import torch
    import tyro
    from rich.console import Console

    from phasewise.interrupt import Interrupted, interruptible
    from phasewise.lens.doctor.examine import doctor
    from phasewise.lens.doctor.opening import is_hugging_face, read_config
    from phasewise.lens.doctor.repair import CONFIG, destination, repair, write
    from phasewise.lens.doctor.show import figures, repaired, summary, table
    from phasewise.lens.report import check_folder, write_json, write_report

    @dataclass(kw_only=True)
    class Options:
        checkpoint: tyro.conf.Positional[Path]
        """Folder of the checkpoint, or a config.json."""
        length: int | None = None
        """Tokens it is to serve. None: what its config states, or 4096."""
        trained_length: int | None = None
        """Tokens a model of this library was trained at; its folder does not say."""
        dtype: str | None = None
        """Serve in float32 | bfloat16 | float16. None: as stored."""
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to run the model: cpu | cuda | cuda:1."""
        out: Path | None = None
        """Report folder: a new one. None: only the table."""
        fix: Path | None = None
        """Where to write the corrected config: a new file, or a folder for its config.json. Never in place."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of the table."""

    options = tyro.cli(Options, prog="phasewise doctor", args=arguments, description=DOCTOR)
    source = options.checkpoint / CONFIG if options.checkpoint.is_dir() else options.checkpoint
    if options.out is not None:
        check_folder(options.out)
    fixed_at = None if options.fix is None else destination(options.fix, source)
    if fixed_at is not None and not is_hugging_face(read_config(source)):
        raise ValueError(
            f"{source} is a config of this library, which cannot contradict itself; leave --fix out"
        )
    recipe = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    try:
        with interruptible() as stop:
            found = doctor(
                options.checkpoint,
                length=options.length,
                trained_length=options.trained_length,
                dtype=options.dtype,
                device=options.device,
                console=Console(stderr=True),
                stop=stop,
            )
            if options.out is not None:
                write_report(
                    options.out,
                    kind="doctor",
                    title=f"Positions of {options.checkpoint.resolve().name}",
                    values=found,
                    charts=figures(found),
                    recipe=recipe,
                    summary=summary(found),
                    partial=found.partial,
                    device=options.device,
                )
    except Interrupted as error:
        return leave(str(error), INTERRUPTED)
    if options.as_json:
        with TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            write_json(path, kind="doctor", values=found, recipe=recipe, device=options.device)
            print(path.read_text(), end="")
    else:
        Console().print(table(found))
    if fixed_at is not None:
        content, done = repair(read_config(source), found)
        write(content, fixed_at)
        print(f"Written to {fixed_at}.\n{repaired(done)}", file=sys.stderr if options.as_json else sys.stdout)
    if options.out is not None and not options.as_json:
        print(f"Written to {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    if found.partial is not None:
        return leave(found.partial, INTERRUPTED)
    return FAILED if found.wrong else 0
