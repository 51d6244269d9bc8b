"""phasewise train."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated

from phasewise.cli.terminal import FAILED, INTERRUPTED, fields, leave

TRAIN = """Train one model, in one process or in those that `accelerate launch` or torchrun started.

Writes a run folder: recipe.json, metrics.jsonl, checkpoints, and at the end model and report.json. Ctrl-C and
SIGTERM keep what is done; --resume goes on, in as many processes as there then are."""


def train(arguments: Sequence[str]) -> int:
    """Train one model with any encoding, on one device or many."""
    import torch
    import tyro
    from rich.console import Console

    from phasewise.interrupt import Interrupted, Terminated
    from phasewise.train.folder import Unwritten
    from phasewise.train.loop import Diverged
    from phasewise.train.processes import join
    from phasewise.train.processes import leave as part
    from phasewise.train.recipe import RunRecipe
    from phasewise.train.run import read_begun, read_recipe, run

    @dataclass(kw_only=True)
    class Options:
        out: Path
        """Run folder: a new one, or with --resume the one to go on with."""
        recipe: str | None = None
        """A recipe to start from: a JSON file, or the name of one in experiments/recipes."""
        resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """Go on with the interrupted run in --out. Its other options need not be repeated."""
        tracker: tuple[str, ...] = ()
        """Trackers that are told of every step: tensorboard, wandb, trackio. metrics.jsonl is written always."""
        as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False
        """Print report.json on stdout instead of a summary."""
        device: str = "cuda" if torch.cuda.is_available() else "cpu"
        """Where to train: cpu | cuda | cuda:1; with a launcher: cpu | cuda."""

    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--out", type=Path)
    early.add_argument("--recipe")
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(arguments)
    if known.resume and known.recipe is not None:
        raise ValueError(f"{known.out} has its recipe already: leave out --recipe, or --resume")
    if known.resume and known.out:
        default = read_begun(known.out).recipe
    else:
        default = RunRecipe() if known.recipe is None else read_recipe(known.recipe)
    parsed = make_dataclass("Train", fields(default), bases=(Options,), kw_only=True)
    options = tyro.cli(parsed, prog="phasewise train", args=arguments, description=TRAIN)
    recipe = RunRecipe(**{name: getattr(options, name) for name in RunRecipe.model_fields})
    here = join(options.device)
    remedy = f"everything done so far is kept; go on with: phasewise train --out {options.out} --resume"
    try:
        result = run(
            recipe,
            options.out,
            resume=options.resume,
            processes=here,
            trackers=options.tracker,
            console=Console(stderr=True),
        )
    except Terminated as error:
        return leave(f"terminated at {error}; {remedy}", 0)
    except Interrupted as error:
        return leave(f"interrupted at {error}; {remedy}", INTERRUPTED)
    except KeyboardInterrupt:
        begun = (options.out / "recipe.json").exists()
        return leave(f"interrupted; {remedy}" if begun else "interrupted", INTERRUPTED)
    except Unwritten as error:
        return leave(f"{error}; {remedy}", FAILED)
    except Diverged as error:
        return leave(str(error), FAILED)
    finally:
        part()
    if not here.first:
        return 0
    if options.as_json:
        print((options.out / "report.json").read_text(), end="")
    else:
        validation = "" if result.validation_loss is None else f", validation {result.validation_loss:.4f}"
        mfu = "" if result.mfu is None else f", MFU {result.mfu:.1%}"
        print(
            f"{result.parameters:,} parameters, {result.tokens:,} tokens in {result.seconds:.0f} s: "
            f"loss {result.loss:.4f}{validation}, {result.tokens_per_second:,.0f} tokens/s{mfu}"
        )
        print(f"Written to {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    return 0
