"""A device and a dtype as the user names them, found to be there or refused in one sentence."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def usable(device: torch.device | str) -> torch.device:
    """The device, once a number was put on it and read back. Raises ValueError for one that cannot hold numbers here.

    >>> usable("cpu")
    device(type='cpu')
    """
    try:
        read_back = torch.zeros(1, device=device)
        read_back.item()
        return read_back.device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(
            f"device {str(device)!r} cannot be used here ({reason}): use cpu, or one there is"
        ) from error


def floating(name: str | None) -> torch.dtype | None:
    """The dtype of that name, or None for None. Raises ValueError for a name that is none of the three.

    >>> floating("bfloat16")
    torch.bfloat16
    """
    if name is not None and name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; choose from {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]
