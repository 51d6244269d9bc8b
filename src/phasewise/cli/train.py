"""phasewise train."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated

from phasewise.cli.terminal import early, fields, print_run, sitting
from phasewise.cli.together import is_first

TRAIN = """Train one model, in one process or in those that `accelerate launch` or torchrun started.

Writes a run folder: recipe.json, metrics.jsonl, checkpoints, and at the end model and report.json. Ctrl-C and
SIGTERM keep what is done; --resume goes on, in as many processes as there then are."""


def train(arguments: Sequence[str]) -> int:
    """Train one model with any encoding, on one device or many."""
    import torch
    import tyro

    from phasewise.progress import stderr
    from phasewise.train.processes import join
    from phasewise.train.processes import leave as part
    from phasewise.train.recipe import RunRecipe
    from phasewise.train.run import read_begun, read_recipe, run

    @dataclass(kw_only=True)
    class Options:
        out: Path
        """Run folder: a new one, or with --resume the one to go on with."""
        recipe: str | None = None
        """A recipe to start from: a JSON file, or the name of one that comes with the package."""
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """Go on with the interrupted run in --out. Its other options need not be repeated."""
        tracker: tuple[str, ...] = ()
        """Trackers that are told of every step: tensorboard, wandb, trackio. metrics.jsonl is written always."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of a summary."""
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to train: cpu | cuda | cuda:1; with a launcher: cpu | cuda."""

    known = early(arguments, "recipe")
    if known.resume and known.recipe is not None:
        raise ValueError(f"{known.out} has its recipe already: leave out --recipe, or --resume")
    if known.resume and known.out:
        default = read_begun(known.out).recipe
    else:
        default = RunRecipe() if known.recipe is None else read_recipe(known.recipe)
    parsed = make_dataclass("Train", fields(default), bases=(Options,), kw_only=True)
    options = tyro.cli(
        parsed, prog="phasewise train", args=arguments, description=TRAIN, console_outputs=is_first()
    )
    recipe = RunRecipe(**{name: getattr(options, name) for name in RunRecipe.model_fields})
    here = join(options.device)
    try:
        with sitting("train", options.out):
            result = run(
                recipe,
                options.out,
                resume=options.resume,
                processes=here,
                trackers=options.tracker,
                console=stderr(),
            )
    finally:
        part()
    if here.first:
        validation = "" if result.validation_loss is None else f", validation {result.validation_loss:.4f}"
        mfu = "" if result.mfu is None else f", MFU {result.mfu:.1%}"
        words = (
            f"{result.parameters:,} parameters, {result.tokens:,} tokens in {result.seconds:.0f} s: "
            f"loss {result.loss:.4f}{validation}, {result.tokens_per_second:,.0f} tokens/s{mfu}"
        )
        print_run(options.out, as_json=options.as_json, shown=[words])
    return 0
