"""phasewise compare."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated

from phasewise.cli.terminal import early, fields, print_run, sitting

COMPARE = """Train several encodings under one budget and evaluate each beyond the trained length.

Writes a run folder: recipe.json, report.json, figure.svg, figure.png, and the metrics, checkpoints and
evaluation of every training. Ctrl-C and SIGTERM keep what is done; --resume goes on."""


def compare(arguments: Sequence[str]) -> int:
    """Train several encodings under one budget and evaluate each beyond the trained length."""
    import torch
    import tyro
    from rich.console import Console

    from phasewise.train.compare import compare, read_begun
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

    known = early(arguments)
    default = read_begun(known.out).recipe if known.resume and known.out else CompareRecipe()
    parsed = make_dataclass("Compare", fields(default), bases=(Options,), kw_only=True)
    options = tyro.cli(parsed, prog="phasewise compare", args=arguments, description=COMPARE)
    recipe = CompareRecipe(**{name: getattr(options, name) for name in CompareRecipe.model_fields})
    with sitting("compare", options.out):
        comparison = compare(
            recipe,
            options.out,
            resume=options.resume,
            figure=options.figure,
            device=options.device,
            console=Console(stderr=True),
        )
    print_run(options.out, as_json=options.as_json, shown=[table(comparison)])
    return 0
