"""A trained model on disk, with what it was trained at."""

from pathlib import Path

from phasewise.data import Corpus
from phasewise.data.sources import TOKENIZER
from phasewise.model import Transformer
from phasewise.model.folder import save
from phasewise.model.history import Stage, read_history, write_history
from phasewise.record import replacing
from phasewise.train.recipe import TrainRecipe

SETTINGS = "tokenizer_config.json"
"""What lets transformers open a folder's tokenizer.json, which is asked for by RULER's tasks among others."""


def keep(model: Transformer, folder: Path, recipe: TrainRecipe, corpus: Corpus) -> None:
    """Write a model that `recipe` has trained on `corpus`; its history goes on from that of its first weights.

    Raises ValueError where `phasewise.model.folder.save` would.
    """
    earlier = () if recipe.initial is None else read_history(recipe.initial.folder)
    stage = Stage(
        length=recipe.context,
        tokens=recipe.trained_tokens,
        corpus=corpus.name,
        corpus_sha256=corpus.sha256,
        encoding=recipe.model.encoding,
    )
    save(model, folder)
    keep_tokenizer(folder, corpus)
    write_history(folder, (*earlier, stage))


def keep_tokenizer(folder: Path, corpus: Corpus) -> None:
    """Write the tokenizer of a model's text beside it, unless that is bytes: whoever reads the model needs it."""
    if corpus.tokenizer is not None:
        write_tokenizer(folder, corpus.tokenizer)


def write_tokenizer(folder: Path, definition: str) -> None:
    """Write what a tokenizer.json holds, so that transformers opens it too."""
    with replacing(folder / TOKENIZER) as path:
        path.write_text(definition, encoding="utf-8")
    with replacing(folder / SETTINGS) as path:
        path.write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n', encoding="utf-8")
