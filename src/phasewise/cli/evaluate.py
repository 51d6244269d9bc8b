"""phasewise evaluate."""

from collections.abc import Sequence
from dataclasses import make_dataclass

from phasewise.cli.terminal import early, fields, print_run, run_options, sitting

EVALUATE = """Measure checkpoints: loss by length and position, passkeys, answers, zero-shot tasks.

Writes a run folder: recipe.json, parts/, report.json, figure.svg and .png, and of passkeys needles.svg and .png.
Ctrl-C keeps what is measured; --resume goes on."""


def evaluate(arguments: Sequence[str]) -> int:
    """Measure checkpoints: loss by length and position, passkeys, answers, zero-shot tasks."""
    import tyro

    from phasewise.progress import stderr
    from phasewise.train.evaluation import evaluate
    from phasewise.train.evaluation_recipe import EvaluateRecipe, read_begun
    from phasewise.train.evaluation_report import tables

    known = early(arguments)
    resumed = known.resume and known.out
    default = read_begun(known.out).recipe if resumed else EvaluateRecipe.model_construct(checkpoints=())
    shown = [
        (name, tyro.conf.Positional[kind] if name == "checkpoints" else kind, value)
        for name, kind, value in fields(default)
    ]
    parsed = make_dataclass("Evaluate", shown, bases=(run_options(),), kw_only=True)
    options = tyro.cli(parsed, prog="phasewise evaluate", args=arguments, description=EVALUATE)
    if not options.checkpoints:
        raise ValueError("give at least one checkpoint, as runs/mine/runs/rope-seed0")
    recipe = EvaluateRecipe(**{name: getattr(options, name) for name in EvaluateRecipe.model_fields})
    with sitting("evaluate", options.out):
        evaluation = evaluate(
            recipe,
            options.out,
            resume=options.resume,
            figure=options.figure,
            device=options.device,
            console=stderr(),
        )
    print_run(options.out, as_json=options.as_json, shown=tables(evaluation))
    return 0
