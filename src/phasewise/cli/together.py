"""Several processes of one launcher: the first says what all of them would, the others what only they know."""

import os
from datetime import timedelta

from torch import distributed

PATIENCE = timedelta(seconds=3)
"""How long a process that fails waits for the first one to fail likewise."""


def is_first() -> bool:
    """Whether this process is alone, or the first of those that a launcher started."""
    return _number("RANK", 0) == 0


def speaker(message: str) -> str | None:
    """The name under which this process is to say its last words; None where the first process says the same.

    These are compared in the store that torchrun and `accelerate launch` keep while processes come and go. Where
    there is none, each process speaks for itself.
    """
    if _number("WORLD_SIZE", 1) == 1:
        return "phasewise"
    if is_first():
        _exchanged(message)
        return "phasewise"
    return None if _exchanged(None) == message else f"phasewise, process {_number('RANK', 0)}"


def _exchanged(message: str | None) -> str | None:
    """The last words of the first process, which gives them; None where it has none in time, or no store is kept."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    key = f"phasewise/last words {_number('TORCHELASTIC_RESTART_COUNT', 0)}"
    try:
        store = distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0), is_master=False, timeout=PATIENCE
        )
        if message is not None:
            store.set(key, message)
        store.wait([key], PATIENCE)
        return store.get(key).decode()
    except distributed.DistError:
        return None


def _number(name: str, default: int) -> int:
    """What a launcher has set; a text that is no number is for `phasewise.train.processes.join` to refuse."""
    given = os.environ.get(name, "")
    return int(given) if given.isdecimal() else default
