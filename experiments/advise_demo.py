"""Advice for the demo's RoPE and PoPE at four times their length, measured, into results/advise/demo.json.

Needs the folder of a finished `phasewise compare --encodings rope pope --steps 300`, on the novels that are shipped:
`python -m experiments.advise_demo FOLDER`.
"""

import json
from pathlib import Path

from experiments.command import parser
from phasewise.data import load
from phasewise.lens.advise.advice import Advice, Wanted, advise
from phasewise.lens.advise.measured import Trial
from phasewise.record import record

RESULT = Path("results/advise/demo.json")
STRETCH = 4


def main(folder: Path) -> None:
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["recipe"]
    trained = recipe["context"]
    corpus = load(recipe["data"], tokenizer=recipe["tokenizer"])
    values = {}
    for encoding in ("rope", "pope"):
        wanted = Wanted(length=STRETCH * trained, trained_length=trained, measure=Trial(examples=0))
        values[encoding] = tabled(advise(folder / "runs" / f"{encoding}-seed0" / "model", corpus, wanted))
    record(RESULT, recipe={**recipe, "wanted": STRETCH * trained}, values=values)


def tabled(found: Advice) -> dict[str, object]:
    """What each setting was predicted and found to do, without rates and bands."""
    assert found.evidence is not None
    settings = {}
    for one in found.options:
        option, measured = one.option, one.measured
        settings[option.kind] = {
            "rank": option.rank,
            "unseen": option.unseen,
            "coarsened": option.coarsened,
            "losses": measured and {str(loss.length): loss.loss for loss in measured.losses},
            "found": measured and measured.found(found.wanted),
        }
    return {
        "verdict": found.verdict.kind,
        "disagreements": found.disagreements,
        "beyond": found.evidence.beyond,
        "theta_eff": found.evidence.theta_eff,
        "settings": settings,
    }


if __name__ == "__main__":
    arguments = parser("advise_demo", __doc__)
    arguments.add_argument("folder", type=Path)
    main(arguments.parse_args().folder)
