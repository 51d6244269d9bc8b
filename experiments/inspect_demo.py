"""What the models of a `phasewise compare` run learned of position, into results/inspect/demo.json.

Run with the run folder: `python -m experiments.inspect_demo runs/demo`. Each encoding is read as trained and
as it was before training, on the run's own test split. The reports are written into OUT, if a second folder
is given.
"""

import json
from pathlib import Path

import torch

from experiments.command import parser
from phasewise.data import load
from phasewise.lens.inspect import Inspection, Request, inspect
from phasewise.lens.report import write_report
from phasewise.lens.show import figures, summary
from phasewise.lens.spectrum import Spectrum
from phasewise.model import ModelConfig, Transformer
from phasewise.model.reading import TransformerReader
from phasewise.record import record
from phasewise.train import checkpoint

KINDS = ("rope", "pope", "tapa")
TOKENS = 16_384
RESULT = Path("results/inspect/demo.json")


def main(run: Path, out: Path | None) -> None:
    recipe = json.loads((run / "recipe.json").read_text())["recipe"]
    corpus = load(recipe["data"], tokenizer=recipe["tokenizer"])
    context, values = recipe["context"], {}
    request = Request(tokens=TOKENS, context=context, wanted_length=8 * context)
    for kind in KINDS:
        last = checkpoint.saved(run / "runs" / f"{kind}-seed0")[-1]
        held = checkpoint.load(last, device=torch.device("cpu"))
        torch.manual_seed(0)
        model = Transformer(ModelConfig.model_validate(held.recipe["model"])).eval()
        reader = TransformerReader(model, trained_length=context)
        before = inspect(reader, corpus, request)
        model.load_state_dict(held.model)
        after = inspect(reader, corpus, request)
        values[kind] = {"before": described(before), "trained": described(after), "steps": held.step}
        if out is not None:
            said = {"kind": "inspect", "title": f"Frequencies of {kind}, trained on {corpus.name}"}
            write_report(
                out / kind, values=after, charts=figures(after), recipe={}, summary=summary(after), **said
            )
    record(RESULT, recipe={"run": recipe, "tokens": TOKENS}, values=values)


def described(found: Inspection) -> list[dict[str, object]]:
    layers = []
    for layer in found.layers:
        if isinstance(layer, Spectrum):
            use, polar = layer.mean, layer.polar
            said = {"theta_eff": use.theta_eff, "participation": use.participation, "of": len(use.share)}
            said |= {"coherent": layer.coherent, "largest excess": max(layer.excess)}
            if polar is not None:
                phases = torch.tensor(polar.phase)
                said |= {"phase, rms": phases.square().mean().sqrt().item(), "frozen": polar.frozen}
        else:
            heads = layer.heads
            said = {
                name: sum(getattr(head, name)[-1] for head in heads) / len(heads)
                for name in ("gate", "change")
            }
            said |= {"argument, rms": [head.rms for head in heads], "distance": layer.distances[-1]}
        layers.append({"layer": layer.layer, **said})
    return layers


if __name__ == "__main__":
    arguments = parser("inspect_demo", __doc__)
    arguments.add_argument("run", type=Path)
    arguments.add_argument("out", type=Path, nargs="?")
    main(**vars(arguments.parse_args()))
