"""phasewise advise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from phasewise.cli.terminal import INTERRUPTED, leave

ADVISE = """Advise on serving a checkpoint at a longer length, on data; without one, on rates to pretrain with.

Settings are predicted from spectrum and profile, then measured on held-out data. With --out it also writes a
report folder: report.json, report.html, and the figures. Ctrl-C keeps what is done, marked partial."""


def advise(arguments: Sequence[str]) -> int:
    """Advise on serving a checkpoint at a longer length, or on rates to pretrain with."""
    import torch
    import tyro
    from rich.console import Console

    from phasewise.interrupt import Interrupted, interruptible
    from phasewise.lens.advise.advice import RATES_READ
    from phasewise.lens.advise.measured import Trial
    from phasewise.lens.report import check_folder, write_json, write_report

    @dataclass(kw_only=True)
    class Options:
        checkpoint: tyro.conf.Positional[Path | None] = None
        """Folder of the checkpoint. None: advice for pretraining, which needs --head-dim."""
        length: int
        """Tokens to be served."""
        data: str = "austen"
        """Corpus, as `phasewise profile` takes it."""
        tokenizer: str | None = None
        """Of text: bytes | bpe:SIZE | PATH of a tokenizer.json. None: the checkpoint's own, or else bytes."""
        trained_length: int | None = None
        """Tokens that the checkpoint serves well as it is. None: what its config says."""
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
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to run the model: cpu | cuda | cuda:1."""
        seed: int = 0
        """Of the passkeys."""
        out: Path | None = None
        """Report folder: a new one. None: only the table."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of the table."""

    options = tyro.cli(Options, prog="phasewise advise", args=arguments, description=ADVISE)
    if options.out is not None:
        check_folder(options.out)
    recipe = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    report = {"kind": "advise", "recipe": recipe, "device": options.device}
    try:
        with interruptible() as stop:
            made = _pretraining(options, stop) if options.checkpoint is None else _extension(options, stop)
            if options.out is not None:
                write_report(
                    options.out,
                    title=made.title,
                    values=made.values,
                    charts=made.charts,
                    summary=made.summary,
                    partial=made.partial,
                    **report,
                )
    except Interrupted as error:
        return leave(str(error), INTERRUPTED)
    if options.as_json:
        with TemporaryDirectory() as folder:
            path = Path(folder, "report.json")
            write_json(path, values=made.values, **report)
            print(path.read_text(), end="")
    else:
        for part in made.shown:
            Console().print(part, markup=False, highlight=False, soft_wrap=True)
        if options.out is not None:
            written = ", ".join(sorted(path.name for path in options.out.iterdir()))
            print(f"Written to {options.out}: {written}")
    return 0 if made.partial is None else leave(made.partial, INTERRUPTED)


@dataclass(frozen=True)
class _Made:
    """What the command says and writes."""

    title: str
    values: Any
    shown: tuple[Any, ...]
    charts: Sequence[Any]
    summary: dict[str, str]
    partial: str | None


def _pretraining(options: Any, stop: Callable[[], bool]) -> _Made:
    from rich.console import Console

    from phasewise.data import load
    from phasewise.lens.advise.pretraining import described, plan

    if options.head_dim is None:
        raise ValueError("give a checkpoint, or --head-dim for advice on pretraining")
    corpus = load(options.data, tokenizer=options.tokenizer or "bytes")
    found = plan(
        corpus, length=options.length, head_dim=options.head_dim, console=Console(stderr=True), stop=stop
    )
    said = described(found)
    return _Made(f"Rates for {corpus.name}", found, (said,), (), {"advice": said}, None)


def _extension(options: Any, stop: Callable[[], bool]) -> _Made:
    from rich.console import Console

    from phasewise.data import load, tokenizer_of
    from phasewise.lens.advise.advice import Wanted, advise
    from phasewise.lens.advise.measured import Trial
    from phasewise.lens.advise.show import figures, summary, table, words

    if options.head_dim is not None:
        raise ValueError("a checkpoint has its head_dim; leave --head-dim out")
    tokenizer = options.tokenizer or tokenizer_of(options.checkpoint, options.data)
    trial = Trial(tokens=options.tokens, examples=options.examples, seed=options.seed)
    found = advise(
        options.checkpoint,
        load(options.data, tokenizer=tokenizer),
        Wanted(
            length=options.length,
            trained_length=options.trained_length,
            measure=trial if options.measure else None,
            tokens=options.read,
        ),
        dtype=options.dtype,
        device=options.device,
        console=Console(stderr=True),
        stop=stop,
    )
    folder = options.checkpoint.resolve()
    name = folder.parent.name if folder.name == "model" else folder.name
    title = f"{name} at {options.length} tokens"
    shown = (table(found), words(found))
    return _Made(title, found, shown, figures(found), summary(found), found.partial)
