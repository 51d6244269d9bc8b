"""Memory that runs out: an error before the system would kill the process, and one sentence for it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
ASKED = re.compile(r"[Aa]llocate ([\d.]+) (bytes|[KMGTPE]iB)")
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
MUCH = 100 * 2**20


@contextmanager
def within_machine() -> Iterator[None]:
    """Hold the process to the memory and swap of the machine, so that more is an error and not its sudden end.

    Linux grants far more than there is and kills who uses it. Left alone where CUDA is in use, whose addresses
    count as memory there, and on other systems.
    """
    if not MEMINFO.exists() or torch.cuda.is_available():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [_machine(), *(bound for bound in before if bound != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def shortage(error: BaseException) -> str | None:
    """One sentence for an error that comes of memory running out, itself or what it was raised from; None for others.

    >>> shortage(MemoryError("Unable to allocate 7.3 TiB for an array"))[:49]
    'not enough memory: 7475 GiB more were asked for; '
    >>> shortage(RuntimeError("shapes differ"))
    """
    cause: BaseException | None = error
    while cause is not None:
        words = str(cause)
        if isinstance(cause, MemoryError | torch.OutOfMemoryError) or CPU_ALLOCATOR in words:
            remedy = "choose a smaller model, batch, context or length, or a device with more"
            return f"not enough memory{_asked(words)}; {remedy}"
        cause = cause.__cause__
    return None


def _asked(words: str) -> str:
    """How much was asked for at last, where an error says so and that was much."""
    found = ASKED.search(words)
    size = 0.0 if found is None else float(found[1]) * 1024.0 ** UNITS.index(found[2])
    return f": {size / 2**30:.4g} GiB more were asked for" if size >= MUCH else ""


def _machine() -> int:
    """Bytes of memory and swap."""
    sizes = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    return 1024 * sum(int(sizes[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
