"""phasewise tokenize."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from shlex import quote
from typing import Annotated

from phasewise.cli.terminal import INTERRUPTED, code_of, fields, leave, print_whole

TOKENIZE = """Tokenise text, genomes or MIDI into a folder of memory-mapped shards: --data shards:FOLDER.

Splits are those of folders or files named train, validation and test, or else by a hash of each document.
Ctrl-C and SIGTERM keep what is done; the same command goes on. On a finished folder it verifies source and shards."""


def tokenize(arguments: Sequence[str]) -> int:
    """Tokenise text, genomes or MIDI, however large, into shards on the disk."""
    from time import perf_counter

    import tyro
    from rich.table import Table

    from phasewise.data.kinds import MUSIC, Origin
    from phasewise.data.tokenization import tokenize
    from phasewise.interrupt import Interrupted, stoppable
    from phasewise.progress import stderr

    @dataclass(kw_only=True)
    class Options:
        data: Annotated[
            tyro.conf.Positional[str], tyro.conf.arg(help=Origin.model_fields["data"].description)
        ]
        out: Path
        """Folder of shards: a new one, or one to go on with or to verify."""
        shard_tokens: int = 2**27
        """Tokens after which a shard is closed."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print index.json on stdout instead of the table."""

    known = [field for field in fields(Origin(data="")) if field[0] != "data"]
    parsed = make_dataclass("Tokenize", known, bases=(Options,), kw_only=True)
    options = tyro.cli(parsed, prog="phasewise tokenize", args=arguments, description=TOKENIZE)
    origin = Origin(**{name: getattr(options, name) for name in Origin.model_fields})
    started = perf_counter()
    with stoppable() as stop:
        try:
            index = tokenize(
                origin,
                options.out,
                shard_tokens=options.shard_tokens,
                console=stderr(),
                stop=stop,
            )
        except Interrupted as error:
            return leave(f"interrupted after {error}; the same command goes on from there", INTERRUPTED)
        except OSError as error:
            path, reason = error.filename or options.out, error.strerror or error
            return leave(
                f"cannot read or write {path} ({reason}): what was saved is kept; with that mended, or room made, "
                "the same command goes on",
                code_of(error),
            )
    seconds = perf_counter() - started
    if options.as_json:
        print(index.model_dump_json(indent=1))
        return 0
    table = Table("split", "documents", "tokens", "bytes per token", "shards")
    for split, part in index.splits.items():
        size = f"{part.text_bytes / part.tokens:.3f}" if part.text_bytes else ""
        table.add_row(split, f"{part.documents:,}", f"{part.tokens:,}", size, str(len(part.shards)))
    print_whole(table)
    if (learned := index.learned) is not None:
        print(
            f"{origin.tokenizer} learned from {learned.documents:,} of {learned.of_documents:,} training documents, "
            f"{learned.text_bytes:,} of {learned.of_text_bytes:,} bytes"
        )
    made = "REMI" if origin.kind in MUSIC else origin.tokenizer
    print(f"{index.source}, {made}, in {seconds:.0f} s: give --data {quote(f'shards:{options.out}')}")
    return 0
