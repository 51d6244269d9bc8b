"""What a training step minimises, and how the model computes it: precision, compilation, recomputation."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phasewise.model import Transformer
from phasewise.positions import Positions
from phasewise.train.recipe import TrainRecipe

if TYPE_CHECKING:
    from phasewise.model.parallel import Sharding


class Objective(nn.Module):
    """The summed loss of a model's predictions over a divisor, nats.

    Blocks are compiled one by one: all share one compilation, which takes seconds where that of a whole model
    takes a minute, and sharding and recomputation stay outside of it. In bfloat16 autocast narrows matrix
    products; weights, positions, norms and the loss are float32.
    """

    def __init__(
        self, model: Transformer, recipe: TrainRecipe, *, sharding: "Sharding | None" = None
    ) -> None:
        super().__init__()
        self.model = model
        self.sharding = sharding
        self.narrow = recipe.precision == "bfloat16"
        self.loss = compiled(summed_loss) if recipe.compile else summed_loss
        for block in model.blocks:
            forward = block.forward
            if recipe.compile:
                # What processes say to each other is left out of the graph.
                forward = compiled(forward, whole=sharding is None)
            if recipe.recompute:
                forward = partial(checkpoint, forward, use_reentrant=False)
            block.forward = forward

    def forward(self, tokens: Tensor, targets: Tensor, at: Positions | None, divisor: Tensor) -> Tensor:
        with autocast(tokens.device, self.narrow):
            logits = self.model(tokens, at=at, sharding=self.sharding)
        return self.loss(logits, targets) / divisor


class Served(nn.Module):
    """The model in the precision it is trained in, asked for logits alone."""

    def __init__(self, model: Transformer, recipe: TrainRecipe) -> None:
        super().__init__()
        self.model = model
        self.narrow = recipe.precision == "bfloat16"

    def forward(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor:
        with autocast(tokens.device, self.narrow):
            return self.model(tokens, at=at)


def compiled(function: Callable[..., Tensor], *, whole: bool = True) -> Callable[..., Tensor]:
    """The function compiled for the shapes it is given; whole: as one graph.

    DDP would have graphs cut where its buckets end, but a block is small enough for its gradients to be ready at
    once.
    """
    from torch._dynamo import config

    return config.patch(optimize_ddp=False)(torch.compile(function, dynamic=False, fullgraph=whole))


def autocast(device: torch.device, narrow: bool) -> torch.autocast:
    """The context in which the model's matrix products are bfloat16 if `narrow`."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The negative log-likelihood, float32, of the targets that are scored, added up."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
