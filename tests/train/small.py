"""A corpus and recipes small enough to train in a moment."""

import numpy as np
import torch

from phasewise.data import Corpus, Documents
from phasewise.encodings import named
from phasewise.model import ModelConfig
from phasewise.train.recipe import TrainRecipe

CPU = torch.device("cpu")
VOCAB = 16


def corpus(seed: int = 0) -> Corpus:
    """Documents in which each token is the one before plus one or two."""
    random = np.random.default_rng(seed)
    splits = {
        name: Documents.join(
            [np.cumsum(random.integers(1, 3, size=400)) % VOCAB for _ in range(3)], vocab_size=VOCAB
        )
        for name in ("train", "validation", "test")
    }
    return Corpus(
        name="small",
        source="made",
        licence="none needed",
        unit="token",
        vocab_size=VOCAB,
        sha256=f"made from seed {seed}",
        splits=splits,
        decode=lambda tokens: " ".join(map(str, tokens)),
    )


def recipe(encoding: str = "rope", **changes) -> TrainRecipe:
    model = ModelConfig(
        vocab_size=VOCAB,
        width=16,
        layers=2,
        heads=2,
        dropout=changes.pop("dropout", 0.0),
        encoding=named(encoding),
    )
    budget = {
        "context": 12,
        "batch_size": 3,
        "steps": 8,
        "warmup": 2,
        "learning_rate": 1e-2,
        "final_learning_rate": 1e-3,
        "checkpoint_every": 3,
        "seed": 0,
    }
    return TrainRecipe(**{**budget, **changes}, model=model)
