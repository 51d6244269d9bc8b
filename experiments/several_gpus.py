"""What the measurements on several GPUs share: rows kept as they come, and how fast the GPUs exchange."""

import gc
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from phasewise.record import record
from phasewise.train.processes import Processes

MULTICAST = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
"""The settings that keep NVLink multicast out of use; every record says how they were."""
GIB = 2**30


class Rows:
    """The cases of one file, written whenever one is measured; a second run has only the others to measure."""

    def __init__(self, out: Path, recipe: Mapping[str, object], here: Processes) -> None:
        self.out, self.here = out, here
        self.rows: list[dict[str, Any]] = json.loads(out.read_text())["values"] if out.exists() else []
        self.recipe = {
            **recipe,
            "processes": here.size,
            "all_reduce_gb_per_second": bandwidth(here),
            **{name: os.environ.get(name) for name in MULTICAST},
        }

    def __contains__(self, case: Any) -> bool:
        return asdict(case) in [row["case"] for row in self.rows]

    def add(self, case: Any, found: dict[str, Any]) -> None:
        """Keep what this process found of a case; every process calls it, and the most memory counts."""
        every = self.here.gather(found)
        peaks = [some["peak_gib"] for some in every if some.get("peak_gib") is not None]
        self.rows.append({"case": asdict(case), **every[0], **({"peak_gib": max(peaks)} if peaks else {})})
        if self.here.first:
            record(self.out, recipe=self.recipe, values=self.rows, device=self.here.device)
            shown = ("tokens_per_second", "mfu", "peak_gib", "failed", "out_of_memory")
            print(case, {name: every[0][name] for name in shown if name in every[0]}, flush=True)


def fresh(device: torch.device) -> None:
    """Forget what earlier cases left on the device; a trainer's blocks refer to themselves."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: torch.device) -> float | None:
    """GiB that tensors of this process have taken at most since `fresh`; None on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None


def now(device: torch.device) -> float:
    """The time in seconds, once the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def bandwidth(here: Processes, *, megabytes: int = 256, repeats: int = 5) -> float | None:
    """What each GPU sends a second while all add up a float32 tensor, GB/s; None of one process or a CPU."""
    if here.size == 1 or here.device.type != "cuda":
        return None
    values = torch.ones(megabytes * 2**18, device=here.device)
    seconds = []
    for _ in range(repeats + 2):
        started = now(here.device)
        dist.all_reduce(values)
        seconds.append(now(here.device) - started)
    sent = 2 * (here.size - 1) / here.size * 4 * values.numel()
    return sent / median(seconds[2:]) / 1e9
