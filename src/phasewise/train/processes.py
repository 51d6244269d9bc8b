"""The processes of one training: who this one is, and what they say to each other.

`accelerate launch` and torchrun start them; without a launcher there is one, and nothing is communicated.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from phasewise.device import usable
from phasewise.interrupt import Interrupted
from phasewise.train.meeting import meeting, require_counted
from phasewise.train.recipe import Execution

if TYPE_CHECKING:
    from phasewise.model.parallel import Sharding

PATIENCE = timedelta(days=7)
"""How long processes wait for what one of them does alone; for tensors the backend's own limit holds."""
TOLD = (ValueError, OSError, Interrupted)
"""What goes wrong in one process and is raised in all."""
TRANSPORTS = re.compile(r"\bgloo\b|\bNCCL\b|Connection (closed|reset) by peer")
"""What errors say that come of talking to another process."""


@dataclass(frozen=True)
class Processes:
    """This process among those that train one model: its rank, how many there are, and its device.

    >>> alone = Processes(rank=0, size=1, device=torch.device("cpu"))
    >>> alone.first, alone.gather("mine")
    (True, ['mine'])
    """

    rank: int
    size: int
    device: torch.device
    talk: dist.ProcessGroup | None = None
    """What values other than tensors go through; none: the group of all."""

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """`values` added up over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank; returns when all have called."""
        found = [value]
        if self.size > 1:
            found = [None] * self.size
            dist.all_gather_object(found, value, group=self.talk)
        return found

    def any(self, value: bool) -> bool:
        """Whether it is so in one of the processes."""
        return any(self.gather(value))

    def once(self, action: Callable[[], object]) -> None:
        """Have the first process do something; its ValueError, OSError or Interrupted is raised in all."""
        problem = None
        if self.first:
            try:
                action()
            except TOLD as error:
                problem = next(kind for kind in TOLD if isinstance(error, kind)), str(error)
        told = self.gather(problem)[0]
        if told is not None:
            kind, text = told
            raise kind(text)


def join(device: torch.device | str) -> Processes:
    """This process among those that the launcher started; on CUDA each has the device of its local rank.

    Raises ValueError for a device that cannot be used, for a place where processes cannot meet, and without
    accelerate where a launcher was used.
    """
    if "LOCAL_RANK" not in os.environ:
        return Processes(rank=0, size=1, device=usable(device))
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ValueError("several processes need accelerate: pip install 'phasewise[train]'") from error
    require_counted()
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        with meeting(where):
            state = PartialState(cpu=torch.device(device).type == "cpu")
    except (ValueError, dist.DistError) as error:
        raise ValueError(
            f"the processes cannot meet at {where} ({str(error).splitlines()[0]}): give all of them one "
            "MASTER_ADDR, and a free MASTER_PORT, or have torchrun choose with --standalone"
        ) from error
    talk = None
    if state.num_processes > 1:
        talk = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(talk, dist.ProcessGroup)
    return Processes(state.process_index, state.num_processes, usable(state.device or device), talk)


def parted(error: BaseException) -> bool:
    """Whether an error comes of another process that has gone while this one waited for it.

    >>> parted(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8070"))
    True
    >>> parted(RuntimeError("shapes differ"))
    False
    """
    return isinstance(error, dist.DistError) or TRANSPORTS.search(str(error)) is not None


def leave() -> None:
    """End the communication that `join` began, if it did."""
    if dist.is_initialized():
        dist.destroy_process_group()


def replicated(objective: nn.Module, processes: Processes) -> nn.Module:
    """The module with a whole copy of the model in each process, gradients averaged: torch's DDP."""
    if processes.size == 1:
        return objective
    return DistributedDataParallel(objective, gradient_as_bucket_view=True)


def shared_rows(recipe: Execution, processes: Processes) -> "Sharding | None":
    """How neighbouring processes share rows, if the recipe has them do so."""
    from phasewise.model.parallel import Sharding  # which imports torch's compiler: 1 s of every `--help`

    if recipe.context_processes == 1:
        return None
    shape = processes.size // recipe.context_processes, recipe.context_processes
    mesh = init_device_mesh(processes.device.type, shape, mesh_dim_names=("data", "context"))
    return Sharding.over(mesh, "context", regather=not recipe.recompute)
