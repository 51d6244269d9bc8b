"""How the model is computed in training."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.nn.parallel import DistributedDataParallel

from phasewise.train.objective import compiled


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_does_not_cut_what_is_compiled_at_its_buckets(alone, monkeypatch):
    cut = []
    monkeypatch.setattr(DDPOptimizer, "compile_fn", lambda self, graph, _inputs: cut.append(graph) or graph)
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    expected = layer(x)
    layer.forward = compiled(layer.forward)
    torch.compiler.reset()
    given = DistributedDataParallel(layer)(x)
    given.sum().backward()
    assert torch.equal(given, expected)
    assert not cut
