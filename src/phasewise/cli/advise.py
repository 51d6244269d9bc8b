"""phasewise advise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from phasewise.cli.report import Report, deliver, ended, named, report_options

ADVISE = """Advise on serving a checkpoint at a longer length, on data; without one, on rates to pretrain with.

Settings are predicted from spectrum and profile, then measured on held-out data. With --out it also writes a
report folder: report.json, report.html, and the figures. Ctrl-C keeps what is done, marked partial."""


def advise(arguments: Sequence[str]) -> int:
    """Advise on serving a checkpoint at a longer length, or on rates to pretrain with."""
    import tyro

    from phasewise.data import CORPORA, TOKENIZERS
    from phasewise.lens.advise.advice import RATES_READ
    from phasewise.lens.advise.measured import Trial

    @dataclass(kw_only=True)
    class Options(report_options()):
        checkpoint: tyro.conf.Positional[Path | None] = None
        """Folder of the checkpoint. None: advice for pretraining, which needs --head-dim."""
        length: int
        """Tokens to be served."""
        data: Annotated[str, tyro.conf.arg(help=f"Corpus: {CORPORA}.")] = "austen"
        tokenizer: Annotated[
            str | None,
            tyro.conf.arg(help=f"None: the checkpoint's own for text, or else bytes. {TOKENIZERS}"),
        ] = None
        trained_length: int | None = None
        """Tokens that it serves well as it is. None: what its config or history.json says."""
        head_dim: int | None = None
        """Channels of a head, for pretraining."""
        measure: bool = True
        """Measure every setting on held-out data, not only predict."""
        tokens: int | None = None
        """Tokens scored at each length. None: as many as the length, at least 16384."""
        examples: int = Trial.examples
        """Passkeys at each length and depth; 0 leaves retrieval out."""
        read: int = RATES_READ
        """Tokens on which the use of each frequency is measured."""
        dtype: str | None = None
        """Run the model in float32 | bfloat16 | float16. None: as stored."""
        seed: int = 0
        """Of the passkeys."""

    options = tyro.cli(Options, prog="phasewise advise", args=arguments, description=ADVISE)
    make = _pretraining if options.checkpoint is None else _extension
    return ended(deliver(options, partial(make, options)), options.out)


def _pretraining(options: Any, stop: Callable[[], bool]) -> Report:
    from phasewise.data import load
    from phasewise.lens.advise.pretraining import described, plan
    from phasewise.progress import stderr

    if options.head_dim is None:
        raise ValueError("give a checkpoint, or --head-dim for advice on pretraining")
    corpus = load(options.data, tokenizer="bytes" if options.tokenizer is None else options.tokenizer)
    found = plan(
        corpus,
        length=options.length,
        head_dim=options.head_dim,
        console=stderr(),
        stop=stop,
    )
    said = described(found)
    return Report("advise", f"Rates for {corpus.name}", found, (), {"advice": said}, [said], None)


def _extension(options: Any, stop: Callable[[], bool]) -> Report:
    from phasewise.data import load_for
    from phasewise.lens.advise.advice import Wanted, advise
    from phasewise.lens.advise.measured import Trial
    from phasewise.lens.advise.show import figures, summary, table, words
    from phasewise.model.folder import inside
    from phasewise.progress import stderr

    if options.head_dim is not None:
        raise ValueError("a checkpoint has its head_dim; leave --head-dim out")
    trial = Trial(tokens=options.tokens, examples=options.examples, seed=options.seed)
    found = advise(
        options.checkpoint,
        load_for(inside(options.checkpoint), options.data, tokenizer=options.tokenizer),
        Wanted(
            length=options.length,
            trained_length=options.trained_length,
            measure=trial if options.measure else None,
            read=options.read,
        ),
        dtype=options.dtype,
        device=options.device,
        console=stderr(),
        stop=stop,
    )
    title = f"{named(options.checkpoint)} at {options.length} tokens"
    shown = [table(found), words(found)]
    return Report("advise", title, found, figures(found), summary(found), shown, found.partial)
