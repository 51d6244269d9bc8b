"""How the processes of one training meet, which takes until the last of them has come."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from phasewise.interrupt import at_once

QUIET = 10.0
"""Seconds of waiting that are no reason for a word."""
LOG = logging.getLogger(__name__)


def require_counted() -> None:
    """Raise ValueError where this process is none of those that are to meet, which then wait for ever.

    MPI counts them by variables of its own, which accelerate reads.
    """
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if (rank or size) and not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ValueError(
            f"RANK is {rank!r} and WORLD_SIZE {size!r}, but processes are counted from 0; torchrun and accelerate "
            "launch set both"
        )


@contextmanager
def meeting(where: str) -> Iterator[None]:
    """Say, after a while, whom this process waits for, and let Ctrl-C end it.

    torch waits outside of Python, up to half an hour, and Python would hear of Ctrl-C only then.
    """
    rank, size = (os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE"))
    text = f"process {rank} of {size} waits at {where} for the others; Ctrl-C ends it"
    word = Timer(QUIET, LOG.warning, [text])
    word.daemon = True
    word.start()
    try:
        with at_once():
            yield
    finally:
        word.cancel()
