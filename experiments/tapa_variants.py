"""What makes TAPA train badly, and does its distance matter? Settings at the demo's size, results/demo/tapa.json.

    python -m experiments.tapa_variants runs/tapa-variants [NAME ...]     the variants named, else all

Data, model, steps and evaluation are those of `phasewise compare`, so results/demo/report.json has the marks: RoPE,
PoPE, ALiBi and NoPE. The folder keeps what is done, and a second call goes on from there; the record has every model
that the folder has.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.command import parser
from phasewise.data import Corpus, batch, load, windows
from phasewise.encodings import TAPAConfig
from phasewise.evaluate import measure
from phasewise.lens.phase import PhaseMeter
from phasewise.model import ModelConfig, Transformer
from phasewise.model.folder import save
from phasewise.model.reading import Layer, TransformerReader
from phasewise.record import record, replacing
from phasewise.train.initial import Initial
from phasewise.train.loop import train
from phasewise.train.recipe import TrainRecipe


class Variant(NamedTuple):
    encoding: TAPAConfig
    phases: float = 1.0
    """What the first weights of queries' and keys' phase parts are multiplied by."""
    normed: bool = False
    """Whether queries and keys are normed, which bounds the phases."""


VARIANTS = {
    "paper": Variant(TAPAConfig()),
    "no 2 pi": Variant(TAPAConfig(two_pi=False)),
    "alpha 0": Variant(TAPAConfig(alpha=0.0)),
    "alpha 0, no 2 pi": Variant(TAPAConfig(alpha=0.0, two_pi=False)),
    "alpha 0.5, no 2 pi": Variant(TAPAConfig(alpha=0.5, two_pi=False)),
    "amplitude 0.75": Variant(TAPAConfig(fraction=0.75)),
    "phases / 4": Variant(TAPAConfig(), phases=0.25),
    "alpha 0.5": Variant(TAPAConfig(alpha=0.5)),
    "phases x 4": Variant(TAPAConfig(), phases=4.0),
    "no 2 pi, normed": Variant(TAPAConfig(two_pi=False), normed=True),
    "normed": Variant(TAPAConfig(), normed=True),
    "alpha 0, no 2 pi, normed": Variant(TAPAConfig(alpha=0.0, two_pi=False), normed=True),
}
SEEDS = (0, 1, 2)
LENGTHS, SCORED, BATCH_TOKENS = (128, 256, 512, 1024), 16384, 4096
RESULT = Path("results/demo/tapa.json")
CPU = torch.device("cpu")
Values = dict[str, object]


def main(out: Path, names: list[str]) -> None:
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise SystemExit(f"unknown variant {unknown[0]!r}; choose from {', '.join(map(repr, VARIANTS))}")
    corpus = load("austen")
    for seed in SEEDS:
        for name in names or VARIANTS:
            finished = _folder(out, name, seed) / "measured.json"
            if not finished.exists():
                values = trained(VARIANTS[name], seed, corpus, finished.parent)
                with replacing(finished) as unfinished:
                    unfinished.write_text(json.dumps(values))
                print(name, values, flush=True)
            write(out, corpus)


def trained(variant: Variant, seed: int, corpus: Corpus, folder: Path) -> Values:
    """Train one model and measure it: losses by length, without its distances too, its phases and gradients."""
    recipe = _recipe(variant, corpus, seed)
    if variant.phases != 1:
        first = folder / "first"
        save(with_phases(recipe, variant.phases), first)
        recipe = recipe.model_copy(update={"initial": Initial.of(first)})
    model = train(recipe, corpus, folder, device=CPU).model
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    norms = [json.loads(line)["gradient_norm"] for line in lines]
    alike = recipe.model.model_copy(update={"encoding": variant.encoding.model_copy(update={"alpha": 0.0})})
    blind = Transformer(alike).eval()
    blind.load_state_dict(model.state_dict())
    return {
        "seed": seed,
        "losses": {str(length): _loss(model, corpus, length) for length in LENGTHS},
        "loss_all_distances_alike": _loss(blind, corpus, LENGTHS[0]),
        "argument_turns": turns(model, corpus),
        "gradient_norm": {
            "max": max(norms),
            "step_of_max": norms.index(max(norms)) + 1,
            "last": norms[-1],
            "share_clipped": sum(norm > recipe.clip for norm in norms) / len(norms),
        },
    }


def turns(model: Transformer, corpus: Corpus) -> list[list[float]]:
    """The cosine's argument at distance 1, in turns, root mean square over pairs: of each layer's heads."""
    found: list[list[float]] = []

    def sink(layer: Layer, q: Tensor, k: Tensor) -> None:
        meter = PhaseMeter(layer, length=q.shape[2])
        meter.add(q, k)
        heads = meter.result(trained=None, wanted=None).heads
        found.append([head.rms / (2 * math.pi) for head in heads])

    rows = batch(corpus, "train", step=0, context=LENGTHS[0], batch_size=8, seed=0)
    TransformerReader(model).read(rows.tokens, sink)
    return found


def with_phases(recipe: TrainRecipe, factor: float) -> Transformer:
    """The model that the recipe starts from, with the phase parts of all queries and keys times `factor`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Transformer(recipe.model)
    for name, weight in model.named_parameters():
        if name.endswith(("attention.query.weight", "attention.key.weight")):
            of_heads = weight.data.unflatten(0, (-1, recipe.model.head_dim))
            encoding = recipe.model.encodings[0]
            assert isinstance(encoding, TAPAConfig)
            of_heads[:, round(encoding.fraction * recipe.model.head_dim) :] *= factor
    return model


def write(out: Path, corpus: Corpus) -> None:
    """Record every model that is done."""
    runs = {}
    for name in VARIANTS:
        found = [_folder(out, name, seed) / "measured.json" for seed in SEEDS]
        runs[name] = [json.loads(path.read_text()) for path in found if path.exists()]
    recipe = _recipe(VARIANTS["paper"], corpus, SEEDS[0]).model_dump(mode="json", exclude={"seed"})
    for varied in ("encoding", "qk_norm"):
        recipe["model"].pop(varied)
    variants = {
        name: {
            **variant.encoding.model_dump(mode="json"),
            "first_phase_weights_times": variant.phases,
            "qk_norm": variant.normed,
        }
        for name, variant in VARIANTS.items()
    }
    evaluation = {"split": "test", "lengths": LENGTHS, "tokens": SCORED, "stride": "half of each length"}
    record(
        RESULT,
        recipe={"train": recipe, "variants": variants, "evaluate": evaluation, "seeds": SEEDS},
        values={"unit": "nats per byte", "runs": runs},
    )


def _recipe(variant: Variant, corpus: Corpus, seed: int) -> TrainRecipe:
    model = ModelConfig(
        vocab_size=corpus.vocab_size,
        width=64,
        layers=2,
        heads=2,
        encoding=variant.encoding,
        qk_norm=variant.normed,
    )
    return TrainRecipe(model=model, seed=seed)


def _loss(model: Transformer, corpus: Corpus, length: int) -> float:
    batches = windows(
        corpus,
        "test",
        length=length,
        stride=length // 2,
        limit_tokens=SCORED,
        batch_size=max(1, BATCH_TOKENS // length),
    )
    return measure(model, batches, length=length, stride=batches.stride, device=CPU).loss


def _folder(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-seed{seed}".replace(" ", "-").replace("/", "over").replace(",", "")


if __name__ == "__main__":
    arguments = parser("tapa_variants", __doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("names", nargs="*")
    main(**vars(arguments.parse_args()))
