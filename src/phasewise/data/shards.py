"""A tokenised corpus as a folder: shards of tokens that are mapped into memory, and an index written last.

FOLDER/train-00000.bin holds the tokens of whole documents one after another (uint16 or int32, little-endian),
FOLDER/train-00000.lengths their lengths (int64). FOLDER/tokenizer.json is what made them. A folder without
index.json is unfinished.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from phasewise.data.codec import Codec
from phasewise.data.corpus import Corpus, Split, Unit
from phasewise.data.kinds import Origin, for_training, stored_codec
from phasewise.problems import first

INDEX, TOKENIZER = "index.json", "tokenizer.json"
LENGTH = np.dtype("<i8")
BLOCK = 1 << 24
REMEDY = "restore it from a copy, or delete the folder and tokenise again"


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(Frozen):
    """One shard of a split. sha256: of its tokens, then its lengths."""

    name: str
    documents: int
    tokens: int
    sha256: str


class Part(Frozen):
    """One split of the corpus. text_bytes: UTF-8 bytes of its documents; None where they are not text."""

    documents: int
    tokens: int
    text_bytes: int | None
    shards: tuple[Shard, ...]


class Learned(Frozen):
    """What a tokenizer was trained on: so many documents and UTF-8 bytes, out of all of the training split."""

    documents: int
    text_bytes: int
    of_documents: int
    of_text_bytes: int


class Index(Frozen):
    """index.json: everything about the corpus but its tokens.

    learned: None where the tokenizer was not trained on this corpus.
    tokenizer_sha256: of the codec; source_sha256: of all documents in order, each with its split.
    """

    format: Literal[1] = 1
    origin: Origin
    source: str
    licence: str
    unit: Unit
    vocab_size: int
    dtype: Literal["<u2", "<i4"]
    tokenizer_sha256: str
    learned: Learned | None = None
    source_sha256: str
    splits: dict[str, Part]

    @property
    def sha256(self) -> str:
        """Of the tokens and document boundaries of every split, through the hashes of the shards."""
        digest = hashlib.sha256(f"{self.tokenizer_sha256}:{self.dtype}".encode())
        for name, part in self.splits.items():
            digest.update(f"{name}:{':'.join(shard.sha256 for shard in part.shards)}".encode())
        return digest.hexdigest()


class Mapped(Split):
    """The documents of one split, read from the disk as they are asked for.

    Only where each lies is held in memory, 24 bytes a document once batches are drawn.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: np.dtype) -> None:
        self._tokens = [
            np.memmap(folder / f"{each.name}.bin", dtype, mode="r") if each.tokens else np.zeros(0, dtype)
            for each in shards
        ]
        lengths = [np.fromfile(folder / f"{each.name}.lengths", LENGTH) for each in shards]
        self._lengths = np.concatenate(lengths).astype(np.int64)
        self._ends = np.concatenate([each.cumsum() for each in lengths]).astype(np.int64)
        self._first = np.cumsum([0, *(len(each) for each in lengths)])

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        shards = np.searchsorted(self._first, indices, side="right") - 1
        ends, lengths = self._ends[indices], self._lengths[indices]
        return [
            self._tokens[shard][end - length : end].view(np.ndarray)
            for shard, end, length in zip(shards.tolist(), ends.tolist(), lengths.tolist(), strict=True)
        ]


def shards(folder: Path, tokenizer: str = "bytes") -> Corpus:
    """The corpus in a folder that `tokenize` wrote, mapped into memory.

    tokenizer: what must have made the shards; "bytes", which every corpus may be asked for: whatever it was.

    The size of every file is checked at once, the tokenizer's hash too; `verify` hashes the shards.
    Raises ValueError for a folder that is missing, unfinished or damaged, and one of another tokenizer.
    """
    index = read_index(folder)
    if tokenizer not in ("bytes", index.origin.tokenizer):
        raise ValueError(
            f"{folder} was made with {index.origin.tokenizer}, not with {tokenizer}: give that, or bytes for whatever "
            "made it"
        )
    codec = codec_in(folder, index.origin, index.tokenizer_sha256)
    _require_sizes(folder, index)
    text = {split: part.text_bytes for split, part in index.splits.items()}
    made_with = index.origin.tokenizer
    return Corpus(
        name=f"shards:{folder}" + ("" if made_with == "bytes" else f", {made_with}"),
        source=index.source,
        licence=index.licence,
        unit=index.unit,
        vocab_size=index.vocab_size,
        sha256=index.sha256,
        splits=for_training(
            index.origin,
            codec,
            {name: Mapped(folder, part.shards, codec.dtype) for name, part in index.splits.items()},
        ),
        decode=codec.decode,
        bytes_per_token={split: size / index.splits[split].tokens for split, size in text.items() if size}
        or None,
        encode=codec.encode_text if index.unit in ("byte", "token") else None,
        tokenizer=codec.definition if index.unit == "token" else None,
    )


def read_index(folder: Path) -> Index:
    """The index of a finished folder; ValueError when it is missing or damaged."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(
            f"no tokenised corpus at {folder}: it has no {INDEX}; make one, or finish one, with: "
            f"phasewise tokenize DATA --out {folder}"
        )
    try:
        return Index.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} is damaged ({first(error)}): {REMEDY}") from error


def codec_in(folder: Path, origin: Origin, sha256: str) -> Codec:
    """The codec stored in a folder of shards; ValueError when it is missing or has another hash."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{path} is missing: {REMEDY}")
    codec = stored_codec(origin, path.read_text(encoding="utf-8", errors="replace"))
    if codec.sha256 != sha256:
        raise ValueError(f"{path} is not the tokenizer that made the shards beside it: {REMEDY}")
    return codec


def _require_sizes(folder: Path, index: Index) -> None:
    for part in index.splits.values():
        for shard in part.shards:
            require_size(folder / f"{shard.name}.bin", shard.tokens * np.dtype(index.dtype).itemsize)
            require_size(folder / f"{shard.name}.lengths", shard.documents * LENGTH.itemsize)


def verify(folder: Path) -> Index:
    """Hash every shard of a finished folder; ValueError names the first whose content has changed."""
    index = read_index(folder)
    _require_sizes(folder, index)
    for part in index.splits.values():
        for shard in part.shards:
            if sha256_of_shard(folder, shard.name) != shard.sha256:
                raise ValueError(
                    f"shard {folder / shard.name}.bin has changed since it was written: {REMEDY}"
                )
    return index


def sha256_of_shard(folder: Path, name: str) -> str:
    """Of the bytes of a shard's tokens, then of its lengths."""
    digest = hashlib.sha256()
    for suffix in ("bin", "lengths"):
        with (folder / f"{name}.{suffix}").open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def require_size(path: Path, size: int) -> None:
    """ValueError, with the remedy, unless there is a file of that many bytes."""
    found = path.stat().st_size if path.is_file() else None
    if found != size:
        state = "is missing" if found is None else f"has {found} bytes instead of {size}"
        raise ValueError(f"shard {path} {state}: {REMEDY}")
