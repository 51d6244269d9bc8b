"""Rows laid end to end against padded rows through the ordinary objective and torch's AdamW."""

from dataclasses import replace

import pytest
import torch

from phasewise.data import Task, batch, load
from phasewise.encodings.pope import PoPEConfig
from phasewise.encodings.rope import RoPEConfig
from phasewise.frequencies import YaRN
from phasewise.model import ModelConfig
from phasewise.train.processes import Processes
from phasewise.train.recipe import TrainRecipe
from phasewise.train.short import ShortRows, obstacle
from phasewise.train.side_by_side import Padded, _put_on_device
from phasewise.train.trainer import Trainer

CPU = torch.device("cpu")
CORPUS = load("indirect-indexing")
CONFIGS = {
    "rope": {"encoding": RoPEConfig()},
    "pope, clamped, normed": {
        "encoding": PoPEConfig(phase_init="uniform", phase_bound="clamp"),
        "qk_norm": True,
    },
    "yarn, tied, gelu": {
        "encoding": RoPEConfig(frequencies=YaRN(base=1e4, factor=4.0, original_length=16)),
        "tied": True,
        "activation": "gelu",
    },
}


def recipe(**changes):
    sizes = {"vocab_size": CORPUS.vocab_size, "width": 64, "heads": 2, "layers": 2}
    model = ModelConfig(**{**sizes, "encoding": RoPEConfig(), **changes})
    budget = {"data": "indirect-indexing", "context": 50, "batch_size": 3, "steps": 4, "warmup": 0}
    return TrainRecipe(**budget, seed=0, clip=0.1, learning_rate=1e-2, final_learning_rate=1e-2, model=model)


def steps(kind, given, count=2):
    """Losses, gradient norms and the weights after some steps."""
    trainer = Trainer(given, Processes(rank=0, size=1, device=CPU))
    _put_on_device(trainer.optimizer, CPU)
    task = (
        Padded(trainer, CORPUS)
        if kind is Padded
        else ShortRows(trainer.model, trainer.optimizer, given, CORPUS)
    )
    drawn = [
        batch(CORPUS, "train", step=n, context=50, batch_size=given.batch_size, seed=0) for n in range(count)
    ]
    rate, metrics = torch.tensor(given.learning_rate), []
    for inputs in zip(*task.stack(drawn), strict=True):
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate.item()
        loss = task.loss(*inputs)
        loss.backward()
        metrics.append((loss.item(), task.update(rate).item()))
    return metrics, dict(trainer.model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_laid_end_to_end_take_the_steps_of_padded_rows(name):
    (found, weights), (expected, wanted) = (
        steps(kind, recipe(**CONFIGS[name])) for kind in (ShortRows, Padded)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    start = dict(
        Trainer(recipe(**CONFIGS[name]), Processes(rank=0, size=1, device=CPU)).model.named_parameters()
    )
    for key, weight in wanted.items():
        # Of gradients near zero AdamW keeps little but the sign, so single weights may differ.
        assert (weights[key] - weight).norm() < 1e-3 * (weight - start[key]).norm(), key


def test_a_batch_further_from_the_mean_than_the_room_allows_is_refused():
    given = recipe()
    trainer = Trainer(given, Processes(rank=0, size=1, device=CPU))
    task = ShortRows(trainer.model, trainer.optimizer, given, CORPUS)
    drawn = batch(CORPUS, "train", step=0, context=50, batch_size=3, seed=0)
    task.room = 64
    with pytest.raises(ValueError, match="use padded rows"):
        task.stack([drawn])


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({}, "cpu", "CUDA alone"),
        ({"dropout": 0.1}, "cuda", "without dropout"),
        ({"kv_heads": 1}, "cuda", "each with its keys"),
        ({"window": 8}, "cuda", "without windows"),
        ({"encoding": RoPEConfig(fraction=0.5)}, "cuda", "on all channels"),
        ({}, "cuda", None),
        ({"encoding": PoPEConfig()}, "cuda", None),
    ],
)
def test_what_the_step_cannot_serve_is_said(changes, device, words):
    said = obstacle(recipe(**changes), CORPUS, torch.device(device))
    assert (said is None) if words is None else (words in said)


@pytest.mark.parametrize(
    "task", [None, Task(row_length=65), Task(row_length=50, answer_length=None, answer_after=3)]
)
def test_tasks_that_the_step_cannot_serve_take_padded_rows(task):
    said = obstacle(recipe(), replace(CORPUS, task=task), torch.device("cuda"))
    assert said == "it takes tasks with answers of one length, in rows of at most 64 tokens"
