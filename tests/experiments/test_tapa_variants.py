"""TAPA's variants differ in what they say, and in nothing else."""

import torch

from experiments.tapa_variants import VARIANTS, with_phases
from phasewise.encodings import TAPAConfig
from phasewise.model import ModelConfig, Transformer
from phasewise.train.recipe import TrainRecipe


def test_scaled_phases_are_the_last_channels_of_every_head_of_queries_and_keys():
    encoding = TAPAConfig(fraction=0.75)
    model = ModelConfig(vocab_size=11, width=16, layers=2, heads=2, encoding=encoding)
    recipe = TrainRecipe(model=model, seed=3)
    torch.manual_seed(3)
    plain = dict(Transformer(model).named_parameters())
    for name, weight in with_phases(recipe, 0.25).named_parameters():
        expected = plain[name].detach().clone()
        if "attention.query" in name or "attention.key" in name:
            for row in (6, 7, 14, 15):
                expected[row] /= 4
        assert torch.equal(weight, expected), name


def test_every_variant_differs_from_the_paper_s_setting():
    assert VARIANTS["paper"].encoding == TAPAConfig()
    assert len(set(VARIANTS.values())) == len(VARIANTS)
