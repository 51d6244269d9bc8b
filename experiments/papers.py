"""The papers' recipes as models trained side by side read them, one encoding in the place of another."""

from phasewise.data import Corpus
from phasewise.encodings import PoPEConfig, RoPEConfig
from phasewise.train.recipe import TrainRecipe
from phasewise.train.run import read_recipe

ENCODINGS = {"rope": RoPEConfig(), "pope": PoPEConfig(phase_init="uniform")}


def recipe(name: str, encoding: str, corpus: Corpus, *, seed: int = 0) -> TrainRecipe:
    """The recipe of that name with another encoding, which nothing else differs in; nothing is measured within."""
    changes = {"encoding": ENCODINGS[encoding], "evaluate_every": None, "seed": seed}
    return read_recipe(name).model_copy(update=changes).training(vocab_size=corpus.vocab_size)
