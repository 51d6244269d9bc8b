"""phasewise evaluate."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated

from phasewise.cli.terminal import early, fields, print_run, sitting

EVALUATE = """Measure checkpoints: loss by length and position, passkeys, answers, zero-shot tasks.

Writes a run folder: recipe.json, parts/, report.json, figure.svg and .png, and of passkeys needles.svg and .png.
Ctrl-C keeps what is measured; --resume goes on."""


def evaluate(arguments: Sequence[str]) -> int:
    """Measure checkpoints: loss by length and position, passkeys, answers, zero-shot tasks."""
    import torch
    import tyro
    from rich.console import Console

    from phasewise.train.evaluation import evaluate
    from phasewise.train.evaluation_recipe import EvaluateRecipe, read_begun
    from phasewise.train.evaluation_report import tables

    @dataclass(kw_only=True)
    class Options:
        out: Path
        """Run folder: a new one, or with --resume the one to go on with."""
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """Go on with the interrupted run in --out. Its other options need not be repeated."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of the tables."""
        figure: bool = True
        """Draw the figures, which needs matplotlib."""
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to run the models: cpu | cuda | cuda:1."""

    known = early(arguments)
    resumed = known.resume and known.out
    default = read_begun(known.out).recipe if resumed else EvaluateRecipe.model_construct(checkpoints=())
    shown = [
        (name, tyro.conf.Positional[kind] if name == "checkpoints" else kind, value)
        for name, kind, value in fields(default)
    ]
    parsed = make_dataclass("Evaluate", shown, bases=(Options,), kw_only=True)
    options = tyro.cli(parsed, prog="phasewise evaluate", args=arguments, description=EVALUATE)
    recipe = EvaluateRecipe(**{name: getattr(options, name) for name in EvaluateRecipe.model_fields})
    with sitting("evaluate", options.out):
        evaluation = evaluate(
            recipe,
            options.out,
            resume=options.resume,
            figure=options.figure,
            device=options.device,
            console=Console(stderr=True),
        )
    print_run(options.out, as_json=options.as_json, shown=tables(evaluation))
    return 0
