"""What test_parallel.py compares with one process: models over four processes, as 4 parts of a row or 2 x 2."""

import warnings
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from phasewise.model.parallel import Sharding
from phasewise.positions import Positions
from tests.model.small import ENCODINGS, model_of, tokens_of

PROCESSES, ROWS, LENGTH = 4, 2, 24
NAMES = (
    "nope", "rope-geometric", "rope-longrope", "pope-geometric", "pope-dynamic_ntk", "tapa", "alibi", "mixed-joint",
)  # fmt: skip
LAYOUTS = ("plain", "packed", "windowed")
CASES = [
    *product(NAMES, ("zigzag",), LAYOUTS, (4,)),
    *product(("pope-geometric", "tapa"), ("zigzag",), LAYOUTS, (2,)),
    *product(("pope-geometric", "tapa"), ("contiguous",), LAYOUTS, (4,)),
]


def drawn(layout):
    """Tokens [ROWS, LENGTH], the targets, and the places, whose documents end where no chunk does."""
    tokens, targets = tokens_of(ROWS, LENGTH), tokens_of(ROWS, LENGTH, seed=2)
    targets[:, 5] = -100
    at = Positions.packed([7, 3, 14]) if layout == "packed" else None
    return tokens, targets, at


def built(name, layout):
    return model_of(ENCODINGS[name], window=(5, None) if layout == "windowed" else None)


def loss_of(logits, targets, *, scored):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / scored


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def run(name, order, layout, mesh, *, regather=True):
    """The logits of whole rows, the loss and every gradient, added over the processes of the axis."""
    sharding = Sharding.over(mesh, order=order, regather=regather)
    tokens, targets, at = drawn(layout)
    model = built(name, layout)
    logits = model(
        sharding.layout.split(tokens), at=None if at is None else sharding.layout.split(at), sharding=sharding
    )
    loss = loss_of(logits, sharding.layout.split(targets), scored=int((targets != -100).sum()))
    loss.backward()
    found = {"loss": loss.detach(), **gradients(model)}
    for value in found.values():
        dist.all_reduce(value, group=sharding.group)
    return {"logits": sharding.gather(logits.detach(), dim=1), **found}


def run_wrapped(mesh, wrap):
    """A step under data parallelism, rows over one axis and places over the other: loss and gradients."""
    sharding = Sharding.over(mesh)
    tokens, targets, _ = drawn("plain")
    scored, row = int((targets != -100).sum()), mesh.get_local_rank("data")
    model = wrap(built("pope-geometric", "plain"))
    mine, wanted = (sharding.layout.split(x[row : row + 1]) for x in (tokens, targets))
    loss = loss_of(model(mine, sharding=sharding), wanted, scored=scored)
    (loss * PROCESSES).backward()  # what averages gradients over the processes then gives their sum
    total = loss.detach().clone()
    dist.all_reduce(total)
    grads = {
        name.removeprefix("module."): grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in gradients(model).items()
    }
    return {"loss": total, **grads}


def sharded_by_parameters(model):
    for block in model.blocks:
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (PROCESSES,)))
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (PROCESSES,)))


def process(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES
    )
    meshes = {
        4: dist.init_device_mesh("cpu", (4,), mesh_dim_names=("context",)),
        2: dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context")),
    }
    found = {case: run(*case[:3], meshes[case[3]]) for case in CASES}
    once = ("pope-geometric", "zigzag", "packed", 4)
    found["again"] = run(*once[:3], meshes[4])
    found["kept"] = run(*once[:3], meshes[4], regather=False)
    found["ddp"] = run_wrapped(meshes[2], DistributedDataParallel)
    found["fsdp"] = run_wrapped(meshes[2], sharded_by_parameters)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()
