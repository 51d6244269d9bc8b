"""Which optional packages kernels may build on: installed, of the version that is known, and able to load."""

import functools
import importlib.util
import os
import warnings
from importlib import metadata

import torch

FLASH_VERSION = (
    "4.0.0b36"  # of flash-attn-4, whose inner parts we replace, and whose gradients we let overwrite inputs
)


def version(package: str) -> str | None:
    """The version of an installed package, None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_FLASH = version("flash-attn-4")
_TRITON = importlib.util.find_spec("triton") is not None


def triton_obstacle(
    what: str, device: str, capability: tuple[int, int] | None, dtype: torch.dtype
) -> str | None:
    """Why a kernel in Triton, called `what`, cannot run on a device of that type; None when it can."""
    if not _TRITON:
        return "triton is not installed; `pip install phasewise[gpu]`"
    if device == "cuda":
        enough = capability is not None and capability[0] >= 8  # torch.compile cannot compare tuples
        return None if enough else f"{what} needs compute capability 8.0, not {capability}"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return "bfloat16 products are wrong in Triton's interpreter" if dtype == torch.bfloat16 else None
    return f"{what} needs a CUDA device, not {device}"


def flash_obstacle(module: str) -> str | None:
    """Why `module`, which builds on flash-attn-4, cannot be used, and what could be done; None when it can.

    Loads the module, at its first question: a package may be installed and yet lack what it needs itself.
    """
    if _FLASH is None:
        return "flash-attn-4 is not installed; `pip install phasewise[flash]`"
    if _FLASH != FLASH_VERSION:
        return (
            f"flash-attn-4 {_FLASH} is installed, and its inner parts are known of {FLASH_VERSION}; "
            f"`pip install flash-attn-4=={FLASH_VERSION}`"
        )
    failure = _failure(module)
    if failure is None:
        return None
    return f"flash-attn-4 is installed but does not load ({failure}); `pip install --force-reinstall phasewise[flash]`"


# As of `hardware.capability`: torch.compile asks, and does not look inside.
flash_obstacle._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _failure(module: str) -> str | None:
    """The first line of what importing a module raises; asked once, as a failed import is tried anew each time.

    What it warns of is its own affair, and no error where warnings are.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
