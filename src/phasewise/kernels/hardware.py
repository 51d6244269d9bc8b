"""What a device can do."""

import torch


def capability(device: torch.device) -> tuple[int, int] | None:
    """The CUDA compute capability of a device; None for what is no CUDA device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


# What torch.compiler.assume_constant_result sets, without its import of the compiler: 1.3 s for every user.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]
