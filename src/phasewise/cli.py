"""The command line: parsing only. What a command needs is imported when that command is given."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from rich.table import Table

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
COMPARE = """Train several encodings under one budget and evaluate each beyond the trained length.

Writes a run folder: recipe.json, report.json, figure.svg, figure.png, and the metrics, checkpoints and
evaluation of every training. Ctrl-C keeps what is done; --resume goes on."""

PROFILE = """Measure how far back the tokens of corpora depend on each other, at several granularities.

Writes a report folder: report.json, report.html, and the figures. Ctrl-C keeps what is done, marked partial."""

INSPECT = """Measure which frequencies every layer and head of a checkpoint uses, on data.

The checkpoint is a folder: a Hugging Face decoder with rotary positions, or a model of this library. With
--out it also writes a report folder: report.json, report.html, and the figures. Ctrl-C keeps what is done,
marked partial."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0; 1 when its run failed; 2 for bad input; 130 when Ctrl-C stopped it."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has gone: what is still buffered goes nowhere, so that leaving is silent.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(arguments: Sequence[str] | None) -> int:
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: phasewise COMMAND [OPTIONS]\n")
        for command, function in COMMANDS.items():
            print(f"  {command:10}{(function.__doc__ or '').splitlines()[0]}")
        print("\nphasewise COMMAND --help lists a command's options.")
        return 0
    if name not in COMMANDS:
        return _stop(f"unknown command {name!r}; choose from {', '.join(COMMANDS)}", BAD_INPUT)
    try:
        return COMMANDS[name](rest)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return _stop(_one_line(error), BAD_INPUT)
    except KeyboardInterrupt:
        return _stop("interrupted", INTERRUPTED)


def compare(arguments: Sequence[str]) -> int:
    """Train several encodings under one budget and evaluate each beyond the trained length."""
    import torch
    import tyro
    from rich.console import Console

    from phasewise.interrupt import Interrupted
    from phasewise.train.compare import compare
    from phasewise.train.folder import Unwritten, read_begun
    from phasewise.train.loop import Diverged
    from phasewise.train.recipe import CompareRecipe
    from phasewise.train.report import table

    @dataclass(kw_only=True)
    class Options:
        out: Path
        """Run folder: a new one, or with --resume the one to go on with."""
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """Go on with the interrupted run in --out. Its other options need not be repeated."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of the table."""
        figure: bool = True
        """Draw figure.svg and figure.png, which needs matplotlib."""
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to train and evaluate: cpu | cuda | cuda:1."""

    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--out", type=Path)
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(arguments)
    default = read_begun(known.out).recipe if known.resume and known.out else CompareRecipe()
    parsed = make_dataclass("Compare", _fields(default), bases=(Options,), kw_only=True)
    options = tyro.cli(parsed, prog="phasewise compare", args=arguments, description=COMPARE)
    recipe = CompareRecipe(**{name: getattr(options, name) for name in CompareRecipe.model_fields})
    remedy = f"everything done so far is kept; go on with: phasewise compare --out {options.out} --resume"
    try:
        comparison = compare(
            recipe,
            options.out,
            resume=options.resume,
            figure=options.figure,
            device=options.device,
            console=Console(stderr=True),
        )
    except Interrupted as error:
        return _stop(f"interrupted at {error}; {remedy}", INTERRUPTED)
    except KeyboardInterrupt:
        return _stop(
            f"interrupted; {remedy}" if (options.out / "recipe.json").exists() else "interrupted", INTERRUPTED
        )
    except Unwritten as error:
        return _stop(f"{error}; {remedy}", FAILED)
    except Diverged as error:
        return _stop(str(error), FAILED)
    if options.as_json:
        print((options.out / "report.json").read_text(), end="")
    else:
        _print_whole(table(comparison))
        print(f"Written to {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    return 0


def profile(arguments: Sequence[str]) -> int:
    """Measure how far back the tokens of corpora depend on each other, at several granularities."""
    import tyro
    from rich.console import Console

    from phasewise.interrupt import Interrupted, interruptible
    from phasewise.lens.dependency import Shuffle
    from phasewise.lens.profile import ModelView, profile
    from phasewise.lens.profile_report import figures, summary, table
    from phasewise.lens.report import check_folder, write_report

    @dataclass(kw_only=True)
    class Options:
        data: tyro.conf.Positional[tuple[str, ...]]
        """Corpora: austen | chorales | jsb:PATH | text:PATH | genome:PATH | indirect-indexing."""
        out: Path
        """Report folder: a new one."""
        granularities: tuple[str, ...] = ()
        """Of text bytes words bpe:SIZE, of music notes steps, of genomes bases kmers:K; none given: several."""
        split: str = "train"
        """Part of each corpus: train | validation | test."""
        longest: int | None = None
        """Longest distance, in characters, notes or bases; None: as far as half of the pairs go, 16384 at most."""
        shuffle: Shuffle = "document"
        """Baseline: tokens shuffled within each document, or over the whole corpus."""
        checkpoint: Path | None = None
        """Folder of a model whose use of each distance to measure too."""
        tokenizer: str = "bytes"
        """Tokens of the checkpoint: bytes | bpe:SIZE | PATH of a tokenizer.json."""
        context: int = 256
        """Tokens the checkpoint is shown."""
        seed: int = 0
        """Of shuffling, and of places replaced for the checkpoint."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of the table."""

    options = tyro.cli(Options, prog="phasewise profile", args=arguments, description=PROFILE)
    check_folder(options.out)
    view = None
    if options.checkpoint is not None:
        view = ModelView(str(options.checkpoint), tokenizer=options.tokenizer, context=options.context)
    recipe = {
        name: value for name, value in vars(options).items() if name not in ("out", "as_json", "checkpoint")
    }
    try:
        with interruptible() as stop:
            found = profile(
                options.data,
                granularities=options.granularities,
                split=options.split,
                longest=options.longest,
                shuffle=options.shuffle,
                model=view,
                seed=options.seed,
                console=Console(stderr=True),
                stop=stop,
            )
            write_report(
                options.out,
                kind="profile",
                title="Dependency against distance",
                values=found,
                charts=figures(found),
                recipe={**recipe, "checkpoint": view and view.checkpoint},
                summary=summary(found),
                partial=found.partial,
            )
    except Interrupted as error:
        return _stop(str(error), INTERRUPTED)
    if options.as_json:
        print((options.out / "report.json").read_text(), end="")
    else:
        Console().print(table(found))
        print(f"Written to {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    if found.partial:
        return _stop(f"{found.partial}; what was done is in {options.out}", INTERRUPTED)
    return 0


def inspect(arguments: Sequence[str]) -> int:
    """Measure which frequencies every layer and head of a checkpoint uses, on data."""
    import torch
    import tyro
    from rich.console import Console

    from phasewise.data import load
    from phasewise.interrupt import Interrupted, interruptible
    from phasewise.lens.capture import open_checkpoint, tokenizer_of
    from phasewise.lens.inspect import Request, inspect
    from phasewise.lens.report import check_folder, write_json, write_report
    from phasewise.lens.show import figures, summary, table

    @dataclass(kw_only=True)
    class Options:
        checkpoint: tyro.conf.Positional[Path]
        """Folder of the checkpoint."""
        data: str = "austen"
        """Corpus to read: austen | chorales | jsb:PATH | text:PATH | genome:PATH | indirect-indexing."""
        tokenizer: str | None = None
        """Of text: bytes | bpe:SIZE | PATH of a tokenizer.json. None: the checkpoint's own, or else bytes."""
        split: str = Request.split
        """Part of the corpus: train | validation | test."""
        tokens: int = Request.tokens
        """How many tokens to read, from the start of the split."""
        context: int | None = Request.context
        """Tokens at a time. None: the trained length, at most 2048."""
        length: int | None = Request.wanted_length
        """Length wanted: turns of each frequency within it are reported beside those in the trained one."""
        queries: int = Request.queries
        """Queries of each row whose attention weights a third form of the energy; 0 leaves it out."""
        trained_length: int | None = None
        """Tokens a model of this library was trained at; its folder does not say."""
        dtype: str | None = None
        """Read in float32 | bfloat16 | float16. None: as stored."""
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to run the model: cpu | cuda | cuda:1."""
        out: Path | None = None
        """Report folder: a new one. None: only the table."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of the table."""

    options = tyro.cli(Options, prog="phasewise inspect", args=arguments, description=INSPECT)
    if options.out is not None:
        check_folder(options.out)
    request = Request(
        split=options.split,
        tokens=options.tokens,
        context=options.context,
        wanted_length=options.length,
        queries=options.queries,
    )
    reader = open_checkpoint(
        options.checkpoint,
        dtype=options.dtype,
        trained_length=options.trained_length,
        device=options.device,
    )
    tokenizer = options.tokenizer or tokenizer_of(options.checkpoint, options.data)
    corpus = load(options.data, tokenizer=tokenizer)
    recipe = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    try:
        with interruptible() as stop:
            found = inspect(reader, corpus, request, console=Console(stderr=True), stop=stop)
            if options.out is not None:
                write_report(
                    options.out,
                    kind="inspect",
                    title=f"Frequencies of {options.checkpoint.resolve().name}",
                    values=found,
                    charts=figures(found),
                    recipe=recipe,
                    summary=summary(found),
                    partial=found.partial,
                    device=options.device,
                )
    except Interrupted as error:
        return _stop(str(error), INTERRUPTED)
    if options.as_json:
        with TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            write_json(path, kind="inspect", values=found, recipe=recipe, device=options.device)
            print(path.read_text(), end="")
    else:
        Console().print(table(found))
    if options.out is not None and not options.as_json:
        print(f"Written to {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    return 0 if found.partial is None else _stop(found.partial, INTERRUPTED)


COMMANDS = {"compare": compare, "profile": profile, "inspect": inspect}


def _fields(recipe: BaseModel) -> list[tuple[str, Any, Any]]:
    """The fields of a recipe as tyro reads them, without the recipe's checks: those are made in one place."""
    import tyro

    return [
        (
            name,
            Annotated[info.annotation, tyro.conf.arg(help=info.description)],
            field(default=getattr(recipe, name)),
        )
        for name, info in type(recipe).model_fields.items()
    ]


def _one_line(error: Exception) -> str:
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


def _print_whole(table: "Table") -> None:
    """Print a table uncut: a terminal that is narrower wraps its lines, where rich would cut the numbers."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, Console(width=10_000).measure(table).maximum)
    console.print(table)


def _stop(message: str, code: int) -> int:
    print(f"phasewise: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
