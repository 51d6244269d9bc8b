"""phasewise profile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from phasewise.cli.report import Report, deliver, ended

PROFILE = """Measure how far back the tokens of corpora depend on each other, at several granularities.

Writes a report folder: report.json, report.html, and the figures. Ctrl-C keeps what is done, marked partial."""


def profile(arguments: Sequence[str]) -> int:
    """Measure how far back the tokens of corpora depend on each other, at several granularities."""
    import tyro

    from phasewise.data import CORPORA, TOKENIZERS
    from phasewise.lens.dependency import Shuffle
    from phasewise.lens.profile import ModelView, profile
    from phasewise.lens.profile_report import figures, summary, table
    from phasewise.progress import stderr

    @dataclass(kw_only=True)
    class Options:
        data: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(help=f"Corpora: {CORPORA}.")]
        out: Path
        """Report folder: a new one."""
        granularities: tuple[str, ...] = ()
        """Of text bytes words gpt2 bpe:SIZE, of music notes steps, of genomes bases kmers:K; none given: several."""
        split: str = "train"
        """Part of each corpus: train | validation | test."""
        longest: int | None = None
        """Longest distance, in characters, notes or bases; None: as far as half of the pairs go, 16384 at most."""
        shuffle: Shuffle = "document"
        """Baseline: tokens shuffled within each document, or over the whole corpus."""
        checkpoint: Path | None = None
        """Folder of a model whose use of each distance to measure too."""
        tokenizer: Annotated[
            str | None, tyro.conf.arg(help=f"Of the checkpoint; None: its own, or else bytes. {TOKENIZERS}")
        ] = None
        context: int | None = None
        """Tokens the checkpoint is shown. None: 256."""
        seed: int = 0
        """Of shuffling, and of places replaced for the checkpoint."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of the table."""

    options = tyro.cli(Options, prog="phasewise profile", args=arguments, description=PROFILE)
    view = None
    shown = {name: getattr(options, name) for name in ("tokenizer", "context")}
    given = {name: value for name, value in shown.items() if value is not None}
    if options.checkpoint is not None:
        view = ModelView(str(options.checkpoint), **given)
    elif given:
        raise ValueError(f"--{' and --'.join(given)} is of a checkpoint: give one with --checkpoint")

    def make(stop: Callable[[], bool]) -> Report:
        found = profile(
            options.data,
            granularities=options.granularities,
            split=options.split,
            longest=options.longest,
            shuffle=options.shuffle,
            model=view,
            seed=options.seed,
            console=stderr(),
            stop=stop,
        )
        title = "Dependency against distance"
        return Report("profile", title, found, figures(found), summary(found), [table(found)], found.partial)

    return ended(deliver(options, make), options.out)
