"""A model of whose matrices each process holds a part: torch's FSDP2."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import _foreach_mul_ as foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from phasewise.model import Transformer
from phasewise.train.optimizer import matrices

TOGETHER = 50_000_000
"""Weights that are gathered at once. A gathering takes Python a millisecond or two whatever it gathers, and a GPU less
than that to multiply by few weights; more than these would take long before the first and after the last."""


def shard(model: Transformer, *, narrow: bool, reshard_after_forward: bool) -> None:
    """Give each process a part of every matrix, in place; those of one or several blocks are gathered together.

    Norms and an encoding's own parameters, small and used in float32, stay whole in every process. What is
    gathered stays for the backward pass, unless `reshard_after_forward`. narrow: autocast has matrix products in
    bfloat16, so blocks send what it would make of their matrices; gradients are added in float32.
    """
    whole = set(model.parameters()) - matrices(model)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    blocks: list[nn.Module] = [*model.blocks]
    weights = sum(weight.numel() for weight in blocks[0].parameters())
    count = max(1, round(TOGETHER / weights))
    for first in range(0, len(blocks), count):
        fully_shard(
            blocks[first : first + count],
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=whole,
        )
    fully_shard(model, ignored_params=whole)
    for name in ("hidden", "logits"):
        register_fsdp_forward_method(model, name)


@torch.no_grad()
def clip(model: Transformer, largest: float) -> Tensor:
    """Scale the gradients of a sharded model down to a norm of `largest` at most; their norm before that.

    Gradients of parameters that are whole are averaged over the processes first, as FSDP2 has averaged the
    others. What each process holds is worked on as plain tensors: as torch's DTensors the lists of a deep model
    take the CPU longer than the GPU needs for them.
    """
    gradients = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}
    parts = [gradient.to_local() for gradient in gradients.values() if isinstance(gradient, DTensor)]
    wholes = {parameter: grad for parameter, grad in gradients.items() if not isinstance(grad, DTensor)}
    square = nn.utils.get_total_norm(parts).square()
    sums = torch.cat([*(gradient.flatten() for gradient in wholes.values()), square[None]])
    dist.all_reduce(sums)
    means = sums[:-1] / dist.get_world_size()
    for parameter, mean in zip(wholes, means.split([p.numel() for p in wholes]), strict=True):
        parameter.grad = mean.view_as(parameter)
    norm = (sums[-1] + means.square().sum()).sqrt()
    foreach_mul_([*parts, means], (largest / (norm + 1e-6)).clamp(max=1.0))
    return norm
