"""AdamW and its learning rate at each step."""

from collections.abc import Iterable

import torch
from torch import nn

from phasewise.encodings import Encoding
from phasewise.model import Transformer
from phasewise.train.recipe import Budget


def learning_rate(recipe: Budget, step: int) -> float:
    """The learning rate of step 0, 1, ..: linear warm-up, then the schedule down to the final rate.

    >>> recipe = Budget(steps=102, warmup=1, learning_rate=1e-3, final_learning_rate=0.0)
    >>> learning_rate(recipe, 0), round(learning_rate(recipe, 51), 6), learning_rate(recipe, 101)
    (0.001, 0.0005, 0.0)
    """
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(recipe.steps - 1 - recipe.warmup, 1)
    share = recipe.schedule.share(done)
    return share * recipe.learning_rate + (1 - share) * recipe.final_learning_rate


def shares(recipe: Budget) -> tuple[float, float, float]:
    """What each of `build_optimizer`'s groups takes of the learning rate."""
    return 1.0, 1.0, recipe.encoding_rate


def matrices(model: Transformer) -> set[nn.Parameter]:
    """The weights of matrix products and the embedding: all but norms and an encoding's own parameters."""
    positional = set(_positional(model))
    return {weight for weight in model.parameters() if weight.ndim >= 2 and weight not in positional}


def build_optimizer(recipe: Budget, model: Transformer) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms and an encoding's own parameters (PoPE's phases) alone.

    The latter have a group of their own, the third, where their rate is another.
    """
    positional, multiplied = set(_positional(model)), matrices(model)
    decayed, kept, phases = [], [], []
    for parameter in model.parameters():
        if parameter in positional:
            (kept if recipe.encoding_rate == 1 else phases).append(parameter)
        else:
            (decayed if parameter in multiplied else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    if phases:
        groups.append({"params": phases, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, recipe.beta2), fused=True)


def _positional(model: Transformer) -> Iterable[nn.Parameter]:
    encodings = (module for module in model.modules() if isinstance(module, Encoding))
    return (parameter for encoding in encodings for parameter in encoding.parameters())
