"""Checkpoints written whole or not at all, whose name holds the hash of their content.

A checkpoint is one file that `torch.load` reads, `checkpoint-<step>-<hash>.pt`. The name is given by one
rename after everything is on the disk; the hash tells a damaged file, which torch itself would read in part.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{12})\.pt")


@dataclass(frozen=True)
class Checkpoint:
    """Everything the steps to come depend on; data order is a function of the recipe's seed and the step."""

    step: int
    """Steps done."""
    seconds: float
    """Time spent in those steps."""
    recipe: dict[str, Any]
    """The run's recipe, as JSON values."""
    corpus: str
    """SHA-256 of the corpus's tokens."""
    model: dict[str, Any]
    optimizer: dict[str, Any]
    random: dict[str, torch.Tensor]
    """States of the random generators, by device type."""


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and keep the one before it.

    Raises OSError, with the path, when it cannot be written; the earlier ones are then as they were.
    """
    earlier = saved(folder)
    temporary = folder / "checkpoint.partial"
    try:
        with temporary.open("wb") as file:
            torch.save(vars(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"checkpoint-{checkpoint.step:08d}-{_digest(temporary)}.pt"
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch answers an error of the file with one of its own, which says nothing of the disk.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, cause.strerror, str(temporary)) from error
    finally:
        temporary.unlink(missing_ok=True)
    for old in earlier[:-1]:
        old.unlink()
    return path


def saved(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the furthest last."""
    return sorted(path for path in folder.glob("checkpoint-*.pt") if _NAME.fullmatch(path.name))


def load(path: Path, *, device: torch.device) -> Checkpoint:
    """Read a checkpoint onto a device.

    Raises ValueError for a file whose content is not what was written, naming the one before it.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint (checkpoint-<step>-<hash>.pt)")
    if _digest(path) != match[2]:
        before = [other for other in saved(path.parent) if other.name < path.name]
        remedy = (
            f"delete it to go on from {before[-1].name}" if before else "delete it to start this run again"
        )
        raise ValueError(f"{path} is damaged (its content does not match the hash in its name): {remedy}")
    content = torch.load(path, map_location=device, weights_only=True)
    content["random"] = {kind: state.cpu() for kind, state in content["random"].items()}
    return Checkpoint(**content)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
