"""The papers' recipes as models trained side by side read them, one encoding in the place of another."""

from phasewise.data import Corpus
from phasewise.encodings import PoPEConfig, RoPEConfig
from phasewise.train.recipe import TrainRecipe
from phasewise.train.run import read_recipe

ENCODINGS = {"rope": RoPEConfig(), "pope": PoPEConfig(phase_init="uniform")}


def recipe(name: str, encoding: str, corpus: Corpus, **changes: object) -> TrainRecipe:
    """The recipe of that name with another encoding and other changes; nothing is measured within."""
    given = {"encoding": ENCODINGS[encoding], "evaluate_every": None, **changes}
    return read_recipe(name).model_copy(update=given).training(vocab_size=corpus.vocab_size)
