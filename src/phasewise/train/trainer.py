"""One training step after another: the model, its optimizer and its random state, in any number of processes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from phasewise.data import Windows
from phasewise.evaluate import Measurement, measure
from phasewise.model import Transformer
from phasewise.train.objective import Objective, Served
from phasewise.train.optimizer import build_optimizer, learning_rate, shares
from phasewise.train.prefetch import Part
from phasewise.train.processes import Processes, replicated, shared_rows
from phasewise.train.recipe import TrainRecipe
from phasewise.train.sharded import clip, shard

RANK_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of the processes' dropout; odd, so that no two ranks meet."""


class Trainer:
    """A model in training. Every process of a training makes one and calls the same methods.

    blank: leave the weights without values, for `restore` to give.
    """

    def __init__(self, recipe: TrainRecipe, processes: Processes, *, blank: bool = False) -> None:
        self.recipe = recipe
        self.processes = processes
        torch.manual_seed(recipe.seed)
        with torch.device("meta") if blank else nullcontext():
            model = Transformer(recipe.model)
        self.model = (model.to_empty if blank else model.to)(device=processes.device).train()
        if recipe.initial is not None and not blank:
            recipe.initial.fill(self.model)
        objective = Objective(self.model, recipe, sharding=shared_rows(recipe, processes))
        if recipe.sharding != "replicated" and processes.size > 1:
            shard(
                self.model,
                narrow=recipe.precision == "bfloat16",
                reshard_after_forward=recipe.sharding == "resharded",
            )
            self.objective: torch.nn.Module = objective
        else:
            self.objective = replicated(objective, processes)
        self.optimizer = build_optimizer(recipe, self.model)
        if not processes.first:
            torch.manual_seed((recipe.seed + processes.rank * RANK_STRIDE) % 2**63)

    def step(self, step: int, parts: Sequence[Part]) -> Tensor:
        """Take step 0, 1, ..; give, on the device, the batch's mean loss and the gradient's norm before clipping."""
        rate = learning_rate(self.recipe, step)
        for group, share in zip(self.optimizer.param_groups, shares(self.recipe), strict=False):
            group["lr"] = share * rate
        losses = []
        for number, part in enumerate(parts):
            with self._communicating(number == len(parts) - 1):
                loss = self.objective(*part)
                loss.backward()
            losses.append(loss.detach())
        if isinstance(self.model, FSDPModule):
            norm = clip(self.model, self.recipe.clip)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mean = self.processes.sum(torch.stack(losses).sum()) / self.processes.size
        return torch.stack([mean, norm])

    def state(self) -> dict[str, Any]:
        """Everything the steps to come depend on, as `load` fills it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "random": self._random()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state that `load` has filled."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for name, generator in state["random"].items():
            if name.startswith("cuda"):
                torch.cuda.set_rng_state(generator, self.processes.device)
            else:
                torch.set_rng_state(generator)

    def measure(self, batches: Windows) -> Measurement:
        """The model's loss on windows, which every process measures whole."""
        recipe, device = self.recipe, self.processes.device
        with torch.compiler.set_stance("force_eager"):
            found = measure(
                Served(self.model, recipe),
                batches,
                length=batches.length,
                stride=batches.stride,
                device=device,
            )
        self.model.train()
        return found

    def whole(self) -> Transformer:
        """The trained model, of one piece in every process, ready for evaluation."""
        with torch.device("meta"):
            model = Transformer(self.recipe.model)
        weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        model.load_state_dict(weights, assign=True)
        return model.eval()

    def _communicating(self, last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged after the last of the parts of a batch alone."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.objective, DistributedDataParallel) and not last:
            return self.objective.no_sync()
        return nullcontext()

    def _random(self) -> dict[str, Tensor]:
        """The states of this process's random generators, by device type and rank."""
        states = {f"cpu{self.processes.rank}": torch.get_rng_state()}
        if self.processes.device.type == "cuda":
            states[f"cuda{self.processes.rank}"] = torch.cuda.get_rng_state(self.processes.device)
        return states
