"""What a sharded model holds between its passes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phasewise.train.optimizer import matrices
from phasewise.train.processes import Processes
from phasewise.train.trainer import Trainer

from .small import CPU, recipe


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharding", ["sharded", "resharded"])
def test_gathered_matrices_stay_for_the_backward_pass_unless_resharded(sharding, precision):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = Trainer(
            recipe("pope", sharding=sharding, precision=precision), Processes(rank=0, size=2, device=CPU)
        )
        tokens = torch.zeros(1, 12, dtype=torch.int64)
        loss = trainer.objective(tokens, tokens, None, torch.tensor(12.0))
        block = trainer.model.blocks[0]
        matrix = block.feed_forward.up.weight
        assert isinstance(matrix, DTensor) == (sharding == "resharded")
        if sharding == "sharded":
            assert matrix.dtype == getattr(torch, precision)
        loss.backward()
        weights = set(trainer.model.parameters())
        assert {weight for weight in weights if isinstance(weight, DTensor)} == matrices(trainer.model)
        assert {weight.dtype for weight in weights} == {torch.float32}
        assert not isinstance(block.attention.encoding.phase, DTensor)
    finally:
        dist.destroy_process_group()
