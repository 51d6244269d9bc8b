"""phasewise inspect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from phasewise.cli.report import Report, deliver, ended, named, report_options

INSPECT = """Measure which frequencies every layer and head of a checkpoint uses, on data.

The checkpoint is a folder: a Hugging Face decoder with rotary positions, or a model of this library.
With --out it also writes a report folder: report.json, report.html, and the figures. Ctrl-C keeps what is done,
marked partial."""


def inspect(arguments: Sequence[str]) -> int:
    """Measure which frequencies every layer and head of a checkpoint uses, on data."""
    import tyro

    from phasewise.data import CORPORA, TOKENIZERS, load_for
    from phasewise.lens.capture import open_checkpoint
    from phasewise.lens.inspect import Request, inspect
    from phasewise.lens.show import figures, summary, table
    from phasewise.model.folder import inside
    from phasewise.progress import stderr

    @dataclass(kw_only=True)
    class Options(report_options()):
        checkpoint: tyro.conf.Positional[Path]
        """Folder of the checkpoint."""
        data: Annotated[str, tyro.conf.arg(help=f"Corpus to read: {CORPORA}.")] = "austen"
        tokenizer: Annotated[
            str | None,
            tyro.conf.arg(help=f"None: the checkpoint's own for text, or else bytes. {TOKENIZERS}"),
        ] = None
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
        """Tokens it was trained at. None: what its config or history.json says."""
        dtype: str | None = None
        """Read in float32 | bfloat16 | float16. None: as stored."""

    options = tyro.cli(Options, prog="phasewise inspect", args=arguments, description=INSPECT)
    request = Request(
        split=options.split,
        tokens=options.tokens,
        context=options.context,
        wanted_length=options.length,
        queries=options.queries,
    )

    def make(stop: Callable[[], bool]) -> Report:
        reader = open_checkpoint(
            options.checkpoint,
            dtype=options.dtype,
            trained_length=options.trained_length,
            device=options.device,
        )
        corpus = load_for(inside(options.checkpoint), options.data, tokenizer=options.tokenizer)
        found = inspect(reader, corpus, request, console=stderr(), stop=stop)
        title = f"Frequencies of {named(options.checkpoint)}"
        return Report("inspect", title, found, figures(found), summary(found), [table(found)], found.partial)

    return ended(deliver(options, make), options.out)
