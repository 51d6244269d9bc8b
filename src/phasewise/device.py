"""A device as the user names it, found to be there or refused in one sentence."""

import torch


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
