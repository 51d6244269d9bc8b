"""One process at a time at a file or folder, for as long as it lives."""


def hold(descriptor: int, otherwise: str) -> None:
    """Lock an open file or folder until it is closed, which the system does for a process that dies.

    Raises ValueError: `otherwise`, where another process holds it; and where the system has no such locks.
    """
    try:
        import fcntl
    except ImportError as error:
        raise ValueError(
            "folders are held by POSIX locks, which this system lacks: run on Linux, macOS or WSL"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(otherwise) from error
