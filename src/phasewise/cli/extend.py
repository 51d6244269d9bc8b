"""phasewise extend."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass

from phasewise.cli.terminal import at_once, early, fields, print_run, run_options, sitting
from phasewise.cli.together import is_first

EXTEND = """Continue a checkpoint at a longer length, its rates changed; measure before and after.

The checkpoint is a folder of this library's (a run, or its model). Writes a run folder: recipe.json, report.json,
figure.svg, figure.png, model, and the metrics and checkpoints of every length. Ctrl-C and SIGTERM keep what is
done; --resume goes on. Of a Hugging Face folder, with --steps 0, the config alone is rewritten: its weights are
linked, and nothing is trained or measured."""


def extend(arguments: Sequence[str]) -> int:
    """Continue a checkpoint at a longer length, its rates changed; measure before and after."""
    import tyro

    from phasewise.hf.language_model import is_hugging_face
    from phasewise.model.folder import inside
    from phasewise.progress import stderr
    from phasewise.train.continuation import Continuation, ExtendRecipe, read_begun
    from phasewise.train.extend import extend
    from phasewise.train.extend_hf import rewrite
    from phasewise.train.extension import table
    from phasewise.train.processes import join
    from phasewise.train.processes import leave as part

    known = early(arguments)
    begun = read_begun(known.out).recipe if known.resume and known.out else None

    @dataclass(kw_only=True)
    class Options(run_options()):
        checkpoint: tyro.conf.Positional[str] = begun.checkpoint if begun else tyro.MISSING
        """Folder of the checkpoint: a run, or a model."""
        length: tuple[int, ...] = begun.length if begun else tyro.MISSING
        """Length in tokens; several: one after another, rising."""
        steps: tuple[int, ...] = begun.steps if begun else tyro.MISSING
        """Training steps at each length; 0, of one length: only the rates change."""
        rule: str = begun.rule.model_dump_json() if begun else tyro.MISSING
        """none | pi | ntk | yarn | llama3 | abf | abf:BASE | longrope | grid:FILE, or its settings as JSON."""

    settings = {name: getattr(begun, name) for name in Continuation.model_fields} if begun else {}
    parsed = make_dataclass("Extend", fields(Continuation(**settings)), bases=(Options,), kw_only=True)
    options = tyro.cli(
        parsed, prog="phasewise extend", args=arguments, description=EXTEND, console_outputs=is_first()
    )
    recipe = ExtendRecipe(**{name: getattr(options, name) for name in ExtendRecipe.model_fields})
    if is_hugging_face(inside(recipe.checkpoint)):
        with at_once() as stop:
            rule = rewrite(recipe, options.out, stop=stop)
        print(
            f"{options.out} is {recipe.checkpoint} with the rule {rule.model_dump_json()}: its weights are linked, "
            "and nothing was trained or measured. Fine-tune it with your own trainer, which should save elsewhere "
            "than over linked weights; `phasewise evaluate` measures it."
        )
        return 0
    here = join(options.device)
    try:
        with sitting("extend", options.out):
            extension = extend(
                recipe,
                options.out,
                resume=options.resume,
                figure=options.figure,
                device=here,
                console=stderr(),
            )
    finally:
        part()
    if here.first:
        print_run(options.out, as_json=options.as_json, shown=[table(extension)])
    return 0
