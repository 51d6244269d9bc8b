"""Writing the shards of one split: appended to, saved between two documents, cut back when work goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from phasewise.data.shards import LENGTH, REMEDY, Frozen, Part, Shard, require_size, sha256_of_shard


class Open(Frozen):
    """What is on the disk of an unfinished split: closed shards, and what the open one holds."""

    shards: tuple[Shard, ...] = ()
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


class SplitWriter:
    """Appends documents to the shards of a split, from where `state` says on.

    Raises ValueError when the disk holds less than that, OSError with the path where writing fails.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, state: Open) -> None:
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._shards = list(state.shards)
        self._documents, self._tokens, self._text_bytes = state.documents, state.tokens, state.text_bytes
        for shard in self._shards:
            require_size(folder / f"{shard.name}.bin", shard.tokens * dtype.itemsize)
            require_size(folder / f"{shard.name}.lengths", shard.documents * LENGTH.itemsize)
        self._open()

    def append(self, tokens: np.ndarray, *, text_bytes: int) -> None:
        """Write one document of tokens [n] that was `text_bytes` long."""
        _write(self._files[0], tokens.astype(self._dtype), self._paths[0])
        _write(self._files[1], np.array([len(tokens)], LENGTH), self._paths[1])
        self._documents += 1
        self._tokens += len(tokens)
        self._text_bytes += text_bytes
        if self._tokens >= self._shard_tokens:
            self._close_shard()
            self._open()

    def save(self) -> Open:
        """Bring everything onto the disk, and say what is there."""
        for file, path in zip(self._files, self._paths, strict=True):
            with _naming(path):
                os.fsync(file.fileno())
        return Open(
            shards=tuple(self._shards),
            documents=self._documents,
            tokens=self._tokens,
            text_bytes=self._text_bytes,
        )

    def finish(self, *, is_text: bool) -> Part:
        """Close the last shard and say what the split holds."""
        if self._documents:
            self._close_shard()
        else:
            for path in self._paths:
                path.unlink()
        return Part(
            documents=sum(shard.documents for shard in self._shards),
            tokens=sum(shard.tokens for shard in self._shards),
            text_bytes=self._text_bytes if is_text else None,
            shards=tuple(self._shards),
        )

    def close(self) -> None:
        """Close the files, whatever they hold."""
        for file in self._files:
            file.close()

    @property
    def _name(self) -> str:
        return f"{self._split}-{len(self._shards):05}"

    def _open(self) -> None:
        self._paths = self._folder / f"{self._name}.bin", self._folder / f"{self._name}.lengths"
        sizes = self._tokens * self._dtype.itemsize, self._documents * LENGTH.itemsize
        self._files = tuple(_cut_back(path, size) for path, size in zip(self._paths, sizes, strict=True))

    def _close_shard(self) -> None:
        self.save()
        self.close()
        self._shards.append(
            Shard(
                name=self._name,
                documents=self._documents,
                tokens=self._tokens,
                sha256=sha256_of_shard(self._folder, self._name),
            )
        )
        self._documents = self._tokens = 0


def _cut_back(path: Path, size: int) -> BinaryIO:
    """The file, unbuffered, cut to `size` bytes and open at its end."""
    with _naming(path):
        file = path.open("r+b" if path.exists() else "x+b", buffering=0)
        found = file.seek(0, os.SEEK_END)
        if found < size:
            file.close()
            raise ValueError(f"shard {path} has {found} bytes, but {size} were written: {REMEDY}")
        file.truncate(size)
        file.seek(size)
    return file


def _write(file: BinaryIO, values: np.ndarray, path: Path) -> None:
    rest = memoryview(values.tobytes())
    with _naming(path):
        while rest:
            rest = rest[file.write(rest) :]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
