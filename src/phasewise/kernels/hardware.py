"""What a device can do, and running there."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def capability(device: torch.device) -> tuple[int, int] | None:
    """The CUDA compute capability of a device; None for what is no CUDA device, though ROCm calls its own "cuda"."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = _properties(device)
    return properties.major, properties.minor


def name_of(device: torch.device) -> str | None:
    """What the driver calls a CUDA device; None for any other."""
    return _properties(device).name if device.type == "cuda" else None


def multiprocessors(device: torch.device) -> int:
    """Those of a CUDA device; 4 for Triton's interpreter, so that it splits work too."""
    return _properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _properties(device: torch.device) -> Any:
    """What a CUDA device is, which does not change; torch looks it up in 4 microseconds, several times a call."""
    return torch.cuda.get_device_properties(device)


# What torch.compiler.assume_constant_result sets, without its import of the compiler: 1.3 s for every user.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def on_its_device(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, run with its first tensor's CUDA device current: Triton launches on the current one."""

    @functools.wraps(operator)
    def guarded(first: torch.Tensor, *rest: Any) -> Any:
        device = first.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return operator(first, *rest)
        with torch.cuda.device(device):
            return operator(first, *rest)

    return guarded
