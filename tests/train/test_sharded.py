"""What a sharded model holds between its passes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phasewise.train.processes import Processes
from phasewise.train.trainer import Trainer

from .small import CPU, recipe


@pytest.mark.parametrize("sharding", ["sharded", "resharded"])
def test_gathered_weights_stay_for_the_backward_pass_unless_resharded(sharding):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = Trainer(recipe(sharding=sharding), Processes(rank=0, size=2, device=CPU))
        tokens = torch.zeros(1, 12, dtype=torch.int64)
        loss = trainer.objective(tokens, tokens, None, torch.tensor(12.0))
        kept = [not isinstance(weight, DTensor) for weight in trainer.model.blocks.parameters()]
        assert set(kept) == {sharding == "sharded"}
        loss.backward()
        assert all(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    finally:
        dist.destroy_process_group()
