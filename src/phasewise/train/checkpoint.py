"""Checkpoints written whole or not at all, whose name holds the hash of their content.

A checkpoint is a folder, `checkpoint-<step>-<hash>`, in the format of torch.distributed.checkpoint: each
process writes what it holds, and any number of processes read it back. Its facts.json holds the hash of each
file, and the folder's name that of facts.json. One rename gives the name after everything is on the disk.
"""

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from phasewise.data import Corpus
from phasewise.record import file_sha256
from phasewise.train.processes import Processes
from phasewise.train.recipe import PLACEMENT, TrainRecipe

ALONE = Processes(rank=0, size=1, device=torch.device("cpu"))
FACTS = "facts.json"
WRITER = "inline_container"
"""What torch's errors say that come from its writer of files."""
_NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{12})")


class Facts(BaseModel):
    """What can be known of a checkpoint without reading its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Steps done."""
    seconds: float
    """Time spent in those steps."""
    recipe: dict[str, Any]
    """The run's recipe, as JSON values."""
    corpus: str
    """SHA-256 of the corpus's tokens."""
    generators: tuple[str, ...] = ()
    """The random generators whose states it holds."""
    files: dict[str, str] = {}
    """SHA-256 of each file."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything the steps to come depend on; data order is a function of the recipe's seed and the step."""

    step: int
    seconds: float
    recipe: dict[str, Any]
    corpus: str
    state: dict[str, Any]
    """Tensors and plain values in nested dicts; of sharded tensors, this process's part. "random" holds the
    states of generators, each under a name that no other process uses."""


def save(folder: Path, checkpoint: Checkpoint, *, processes: Processes = ALONE) -> Path:
    """Write a checkpoint and keep the one before it; every process calls it.

    Raises OSError, with the path, when it cannot be written; the earlier ones are then as they were.
    """
    earlier = saved(folder)
    partial = folder / "checkpoint.partial"

    def clear() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    processes.once(clear)
    try:
        writer = FileSystemWriter(partial, overwrite=True)
        with _quietly(partial):
            save_sharded(checkpoint.state, storage_writer=writer, no_dist=processes.size == 1)
        written = sorted(path for path in partial.iterdir() if _writer(path) == processes.rank)
        hashes = processes.gather({path.name: file_sha256(path) for path in written})
        facts = Facts(
            **{name: value for name, value in vars(checkpoint).items() if name != "state"},
            generators=tuple(
                sorted(name for some in processes.gather(tuple(checkpoint.state["random"])) for name in some)
            ),
            files={name: digest for some in hashes for name, digest in some.items()},
        )
        text = facts.model_dump_json(indent=2).encode()
        path = folder / f"checkpoint-{checkpoint.step:08d}-{hashlib.sha256(text).hexdigest()[:12]}"

        def name() -> None:
            _write(partial / FACTS, text)
            # A step that is saved again has the content it had.
            shutil.rmtree(path, ignore_errors=True)
            os.replace(partial, path)
            for old in earlier[:-1]:
                shutil.rmtree(old)

        processes.once(name)
    finally:
        if processes.first:
            shutil.rmtree(partial, ignore_errors=True)
    return path


def saved(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the furthest last."""
    return sorted(path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name))


def step_of(path: Path) -> int:
    """Steps done, as a checkpoint's name has them."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def facts(path: Path) -> Facts:
    """What a checkpoint says of itself; ValueError, naming the one before it, when that is damaged."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint (checkpoint-<step>-<hash>)")
    try:
        text = (path / FACTS).read_bytes()
        if hashlib.sha256(text).hexdigest()[:12] != match[2]:
            raise _damaged(path, FACTS)
        return Facts.model_validate_json(text)
    except (ValidationError, FileNotFoundError) as error:
        raise _damaged(path, FACTS) from error


def load(path: Path, state: dict[str, Any], *, processes: Processes = ALONE) -> Facts:
    """Read a checkpoint into the tensors of `state`; plain values are replaced. Every process calls it.

    Generators that the checkpoint does not know, as of processes there were not, are taken out of "random".

    Raises ValueError for a file whose content is not what was written, naming the checkpoint before it, and
    for a state of other names or shapes.
    """
    known = facts(path)
    mine = sorted(known.files)[processes.rank :: processes.size]
    bad = [
        name for name in mine if not (path / name).exists() or file_sha256(path / name) != known.files[name]
    ]
    if damaged := [name for some in processes.gather(bad) for name in some]:
        raise _damaged(path, ", ".join(damaged))
    state["random"] = {name: seen for name, seen in state["random"].items() if name in known.generators}
    try:
        with _quietly(path):
            load_sharded(state, storage_reader=FileSystemReader(path), no_dist=processes.size == 1)
    except CheckpointException as error:
        reason = str(next(iter(error.failures.values()))[0]).splitlines()[0]
        raise ValueError(f"{path} does not fit this model ({reason}): use another folder") from error
    return known


def require_same_run(path: Path, recipe: TrainRecipe, corpus: Corpus) -> None:
    """Raise ValueError unless the checkpoint is of this recipe, but for its placement, and of this corpus."""
    known, now = facts(path), recipe.model_dump(mode="json")
    differing = sorted(
        name for name in now if name not in PLACEMENT and known.recipe.get(name, now[name]) != now[name]
    )
    if differing:
        raise ValueError(f"{path} was trained with another {', '.join(differing)}: use another folder")
    if known.corpus != corpus.sha256:
        raise ValueError(
            f"the corpus {corpus.name} has changed since {path} was written: "
            "use another folder, or the data as it was"
        )


def _damaged(path: Path, what: str) -> ValueError:
    before = [other for other in saved(path.parent) if other.name < path.name]
    remedy = f"delete it to go on from {before[-1].name}" if before else "delete it to start this run again"
    return ValueError(f"{path} is damaged ({what} is not what was written): {remedy}")


@contextmanager
def _quietly(path: Path) -> Iterator[None]:
    """What the disk refuses comes out as OSError, whatever torch makes of it; one process is no warning."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        failure: BaseException | None = first
        while failure is not None and not isinstance(failure, OSError):
            failure = failure.__context__
        if failure is None and WRITER in str(
            first
        ):  # of another process, whose error came without its context
            raise OSError(f"{path} is not whole, as on a full disk: {str(first).splitlines()[0]}") from error
        if failure is None:
            raise
        raise OSError(failure.errno, failure.strerror, str(path)) from error


def _writer(path: Path) -> int:
    """The rank that wrote a file of torch.distributed.checkpoint: `__<rank>_<number>.distcp`, or `.metadata`."""
    return int(path.name.split("_")[2]) if path.suffix == ".distcp" else 0


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
