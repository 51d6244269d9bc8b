"""On a GPU too, what is trained twice is the same twice."""

import json

import pytest
import torch

from phasewise.data import load
from phasewise.model.transformer import looked_up
from phasewise.train.loop import train
from phasewise.train.recipe import RunRecipe

pytestmark = pytest.mark.gpu


def test_the_gradient_of_few_rows_looked_up_often_repeats():
    random = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(90, (16, 1024), device="cuda", generator=random)
    weight = torch.randn(128, 384, device="cuda", generator=random, requires_grad=True)
    given = torch.randn(16, 1024, 384, device="cuda", generator=random)
    first, *others = (torch.autograd.grad(looked_up(tokens, weight), weight, given)[0] for _ in range(20))
    assert all(torch.equal(first, other) for other in others)
    exact = torch.zeros(128, 384, dtype=torch.float64, device="cuda")
    exact.index_add_(0, tokens.flatten(), given.flatten(0, 1).double())
    torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_trainings_from_one_seed_have_equal_losses(precision, tmp_path):
    corpus = load("austen")
    recipe = RunRecipe(
        size="10M", layers=2, context=512, batch_size=16, steps=20, warmup=2, precision=precision
    ).training(vocab_size=corpus.vocab_size)
    lines = []
    for name in ("one", "other"):
        train(recipe, corpus, tmp_path / name, device=torch.device("cuda"))
        lines.append(
            [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        )
    assert lines[0] == lines[1]
