"""A measured number's birth certificate: one JSON file with what was measured, from what, on what."""

import errno
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("phasewise", "torch", "triton", "transformers", "flash-attn-4", "PoPE-pytorch")


def record(
    path: str | Path,
    *,
    recipe: Mapping[str, object],
    values: object,
    device: torch.device | str | None = None,
) -> dict[str, object]:
    """Write `values` to `path` with their recipe, commit, device, versions and date; return what was written.

    The recipe says what must be repeated to get the values again, seeds included. The commit is that of the
    checkout the package was imported from, `dirty` when tracked files differ from it; "unknown" outside one.
    The file appears whole or not at all. Raises ValueError for what JSON cannot say, as NaN and infinity.

    >>> written = record("timing.json", recipe={"seeds": [0]}, values={"median_ms": 1.5})
    >>> written["values"]
    {'median_ms': 1.5}
    """
    document = certified(recipe=recipe, values=values, device=device)
    try:
        text = written(document)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: recipe and values must be plain, finite JSON: {error}") from error
    with replacing(Path(path)) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
    return document


def certified(
    *, recipe: Mapping[str, object], values: object, device: torch.device | str | None = None
) -> dict[str, object]:
    """What `record` writes, unwritten."""
    return {
        "values": values,
        "recipe": dict(recipe),
        **commit(Path(__file__).parent),
        "device": device_name(torch.device(device or "cpu")),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def written(document: Mapping[str, object]) -> str:
    """A record's JSON text. Raises TypeError or ValueError for what JSON cannot say."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def parsed(text: str) -> Any:
    """What a JSON text holds. Raises json.JSONDecodeError for none, and for one nested deeper than can be read.

    >>> parsed('{"seeds": [0]}')
    {'seeds': [0]}
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", text, 0) from error


def file_sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(folder: Path) -> dict[str, object]:
    """The git commit of `folder` and whether tracked files differ from it; "unknown" outside a checkout."""
    head = _git(folder, "rev-parse", "HEAD")
    # An installed copy may lie inside somebody else's checkout, as a virtual environment does.
    if head is None or not _git(folder, "ls-files", "--", "__init__.py"):
        return {"commit": "unknown", "dirty": None}
    return {"commit": head, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def device_name(device: torch.device) -> str:
    """The device in words: the GPU's own name, or the processor's with its core and thread counts."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores, threads = os.cpu_count(), torch.get_num_threads()
    return f"{device.type} {_processor()}, {cores} cores, {threads} torch threads"


def versions() -> dict[str, str]:
    """Python's version and those of the packages that decide a number, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def ready(path: Path) -> None:
    """Make the folder of a file that will be written, and make sure before long work that it can be.

    Raises OSError where it cannot.

    >>> ready(Path("results/timing.json"))
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    try:
        beside.write_text("room for a few bytes")
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it becomes `path` if the block succeeds, and else goes away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _beside(path)
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
