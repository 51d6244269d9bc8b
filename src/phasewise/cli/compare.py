"""phasewise compare."""

from collections.abc import Sequence
from dataclasses import make_dataclass

from phasewise.cli.terminal import early, fields, print_run, run_options, sitting

COMPARE = """Train several encodings under one budget and evaluate each beyond the trained length.

Writes a run folder: recipe.json, report.json, figure.svg, figure.png, and the metrics, checkpoints and
evaluation of every training. Ctrl-C and SIGTERM keep what is done; --resume goes on."""


def compare(arguments: Sequence[str]) -> int:
    """Train several encodings under one budget and evaluate each beyond the trained length."""
    import tyro

    from phasewise.progress import stderr
    from phasewise.train.compare import compare, read_begun
    from phasewise.train.recipe import CompareRecipe
    from phasewise.train.report import table

    known = early(arguments)
    default = read_begun(known.out).recipe if known.resume and known.out else CompareRecipe()
    parsed = make_dataclass("Compare", fields(default), bases=(run_options(),), kw_only=True)
    options = tyro.cli(parsed, prog="phasewise compare", args=arguments, description=COMPARE)
    recipe = CompareRecipe(**{name: getattr(options, name) for name in CompareRecipe.model_fields})
    with sitting("compare", options.out):
        comparison = compare(
            recipe,
            options.out,
            resume=options.resume,
            figure=options.figure,
            device=options.device,
            console=stderr(),
        )
    print_run(options.out, as_json=options.as_json, shown=[table(comparison)])
    return 0
