"""Tokenising a source: into a folder of shards, however large it is, or into memory, where it is small.

Documents are read, encoded (on all cores, by the codec) and appended to the open shard of their split, in the
order of the source. progress.json says up to which document everything is on the disk; going on cuts the open
shards back to that and reads the source again to that place, so shards do not depend on interruptions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from phasewise.data.corpus import SPLITS, Corpus, Documents, sha256_of
from phasewise.data.documents import Source, require_small, split_of
from phasewise.data.kinds import Origin, for_training, make_codec, open_source
from phasewise.data.sampling import MOST_LEARNED, drawn
from phasewise.data.shards import INDEX, TOKENIZER, Frozen, Index, Learned, Part, codec_in, read_index, verify
from phasewise.data.writing import Open, SplitWriter
from phasewise.interrupt import Interrupted
from phasewise.lock import hold
from phasewise.problems import first
from phasewise.record import replacing

if TYPE_CHECKING:
    from rich.console import Console

PROGRESS = "progress.json"
TEXT_UNITS = ("byte", "token")
IN_FOLDERS = ("text", "jsonl", "parquet", "midi")
AT_ONCE = 1 << 21
SAVE_EVERY = 1 << 24
ENCODED_AT_ONCE = 64
NOTHING: dict[str, Any] = {"documents": 0, "source_sha256": "", "splits": {split: Open() for split in SPLITS}}


class Progress(Frozen):
    """progress.json: how far an unfinished folder has come.

    documents: how many of the source are on the disk. source_sha256: of these, chained.
    """

    origin: Origin
    shard_tokens: int
    tokenizer_sha256: str
    learned: Learned | None = None
    documents: int
    source_sha256: str
    splits: dict[str, Open]


def tokenize(
    origin: Origin,
    folder: Path,
    *,
    shard_tokens: int = 2**27,
    console: Console | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Index:
    """Tokenise a source into `folder`, or go on where an earlier call stopped, or check what is finished.

    The shards are the same whether or not the work was interrupted. A finished folder is verified: its source
    and its shards must be as they were. The longest document, not the corpus, must fit into memory.

    shard_tokens: a shard is closed by the document that brings it to so many tokens.
    console: where to show progress; None: nowhere.
    stop: asked between documents; when it says so, what is done is saved and Interrupted raised.
    Raises ValueError for a source that is missing, empty, unreadable or has changed, a folder of another
    origin, a damaged folder, and a split without documents; OSError, with the path, for a full disk.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens must be at least 1, but is {shard_tokens}")
    source = open_source(origin)
    place = Path(origin.data.partition(":")[2]).expanduser()
    if place.is_dir() and folder.resolve().is_relative_to(place.resolve()):
        raise ValueError(f"{folder} lies inside {place}, which would hold its own shards; choose one outside")
    if folder.is_file():
        raise ValueError(f"{folder} is a file: choose a folder, a new one")
    if (folder / INDEX).exists():
        return _checked(origin, source, folder, console, stop)
    with _alone(folder):
        return _tokenized(origin, source, folder, shard_tokens, console, stop)


def _tokenized(
    origin: Origin,
    source: Source,
    folder: Path,
    shard_tokens: int,
    console: Console | None,
    stop: Callable[[], bool],
) -> Index:
    progress = _begun(origin, shard_tokens, source, folder, console, stop)
    codec = codec_in(folder, origin, progress.tokenizer_sha256)
    is_text = codec.unit in TEXT_UNITS
    reading = Reading(source, origin, console)
    documents = reading.after(
        progress.documents, progress.source_sha256, f"delete {folder} and tokenise again", stop
    )
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                closing(
                    SplitWriter(folder, split, codec.dtype, progress.shard_tokens, progress.splits[split])
                )
            )
            for split in SPLITS
        }
        unsaved = 0
        for some in _by_size(documents, AT_ONCE if is_text else 1):
            encoded = codec.encode([content for _, content in some])
            for (split, content), tokens in zip(some, encoded, strict=True):
                writers[split].append(tokens, text_bytes=len(content))
                unsaved += len(content)
            stopping = stop()
            if stopping or unsaved >= SAVE_EVERY:
                unsaved = 0
                states = {split: writer.save() for split, writer in writers.items()}
                done = {"documents": reading.documents, "source_sha256": reading.sha256, "splits": states}
                _write(folder / PROGRESS, progress.model_copy(update=done))
            if stopping:
                raise Interrupted(f"document {reading.documents:,}")
        parts = {split: writer.finish(is_text=is_text) for split, writer in writers.items()}
    try:
        complete = _complete(parts, origin, reading)
    except ValueError:  # it asks for other settings, so nothing kept may hold the folder to these
        _write(folder / PROGRESS, progress.model_copy(update=NOTHING))
        raise
    index = Index(
        origin=origin,
        source=source.description,
        licence=source.licence,
        unit=codec.unit,
        vocab_size=codec.vocab_size,
        dtype="<u2" if codec.dtype.itemsize == 2 else "<i4",
        tokenizer_sha256=codec.sha256,
        learned=progress.learned,
        source_sha256=reading.sha256,
        splits=complete,
    )
    _write(folder / INDEX, index)
    (folder / PROGRESS).unlink()
    return index


def collect(origin: Origin, console: Console | None = None) -> Corpus:
    """The same documents, splits and tokens in memory, for at most 256 MiB of documents.

    console: where to show progress; None: nowhere.
    Raises ValueError as `tokenize` does, and for a larger source.
    """
    from rich.progress import track

    source = open_source(origin)
    documents: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    size = 0
    reading = Reading(source, origin, console)
    for split, content in reading:
        documents[split].append(content)
        size += len(content)
        require_small(size, origin.data)
    codec = make_codec(origin, lambda: drawn(documents["train"], origin.learn_from or MOST_LEARNED)[0])
    is_text = codec.unit in TEXT_UNITS
    tokens: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    groups = [
        (split, members[start : start + ENCODED_AT_ONCE])
        for split, members in documents.items()
        for start in range(0, len(members), ENCODED_AT_ONCE)
    ]
    for split, some in track(groups, "Tokenising", console=console, disable=console is None):
        tokens[split] += codec.encode(some)
    parts = {
        split: Part(
            documents=len(members),
            tokens=sum(len(each) for each in tokens[split]),
            text_bytes=sum(len(each) for each in members) if is_text else None,
            shards=(),
        )
        for split, members in documents.items()
    }
    kept = _complete(parts, origin, reading)
    splits = {split: Documents.join(tokens[split], vocab_size=codec.vocab_size) for split in kept}
    return Corpus(
        name=origin.data if origin.tokenizer == "bytes" else f"{origin.data}, {origin.tokenizer}",
        source=source.description,
        licence=source.licence,
        unit=codec.unit,
        vocab_size=codec.vocab_size,
        sha256=sha256_of(splits),
        splits=for_training(origin, codec, splits),
        decode=codec.decode,
        bytes_per_token={split: (part.text_bytes or 0) / part.tokens for split, part in kept.items()}
        if is_text
        else None,
        encode=codec.encode_text if is_text else None,
        tokenizer=(codec.definition or None) if is_text else None,
    )


class Reading:
    """One pass over the documents of a source that are not blank, with their splits, count and hash so far.

    doing: shown with the progress.
    """

    def __init__(
        self, source: Source, origin: Origin, console: Console | None, doing: str = "Tokenising"
    ) -> None:
        self._source, self._origin, self._console, self._doing = source, origin, console, doing
        self.documents, self.sha256 = 0, ""
        self.by_content = False

    def after(
        self, documents: int, sha256: str, remedy: str, stop: Callable[[], bool]
    ) -> Iterator[tuple[str, bytes]]:
        """The documents after the first `documents`; ValueError unless these have the hash they had before."""
        for split, content in self:
            if self.documents > documents:
                yield split, content
            elif stop():
                raise Interrupted(f"document {documents:,}")
            elif self.documents == documents and self.sha256 != sha256:
                raise ValueError(
                    f"{self._origin.data} has changed among its first {documents:,} documents; {remedy}"
                )
        if self.documents < documents:
            raise ValueError(
                f"{self._origin.data} has {self.documents:,} documents, {documents:,} before; {remedy}"
            )

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        total = sum(part.size for part in self._source.parts)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
        )
        shown = Progress(
            *columns, TimeRemainingColumn(), console=self._console, disable=self._console is None
        )
        before = 0
        with shown:
            task = shown.add_task(self._doing, total=total)
            for part in self._source.parts:
                for document in part.read():
                    if document.content.strip():
                        stated = document.split or part.split
                        split = stated or split_of(
                            document.content, held_out=self._origin.held_out, seed=self._origin.seed
                        )
                        self.documents += 1
                        content = hashlib.sha256(document.content).hexdigest()
                        self.sha256 = hashlib.sha256(f"{self.sha256}:{split}:{content}".encode()).hexdigest()
                        self.by_content = self.by_content or not stated
                        yield split, document.content
                    shown.update(
                        task,
                        completed=before + document.done,
                        description=f"{self._doing} {self.documents:,} documents",
                    )
                before += part.size
        if not self.documents:
            raise ValueError(f"{self._origin.data} is empty; give data with text")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder while the block lasts; ValueError when one is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        hold(opened, f"another process is tokenising into {folder}; wait for it, or choose another")
        yield
    finally:
        os.close(opened)


def _begun(
    origin: Origin,
    shard_tokens: int,
    source: Source,
    folder: Path,
    console: Console | None,
    stop: Callable[[], bool],
) -> Progress:
    """The progress of a begun folder, or that of a new one once its tokenizer is stored."""
    path = folder / PROGRESS
    if path.exists():
        try:
            progress = Progress.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(
                f"{path} is damaged ({first(error)}); delete {folder} and tokenise again"
            ) from error
        if progress.documents:
            _require_same(origin, progress.origin, folder)
            if shard_tokens != progress.shard_tokens:
                raise ValueError(
                    f"{folder} was begun with shards of {progress.shard_tokens} tokens, not {shard_tokens}; "
                    "go on with these, or choose another folder"
                )
            return progress
        same = (origin, shard_tokens) == (progress.origin, progress.shard_tokens)
        if same and (folder / TOKENIZER).exists():
            return progress
        _forget(folder)
    elif any(not each.name.startswith(f".{PROGRESS}.") for each in folder.iterdir()):
        raise ValueError(f"{folder} holds other files; choose a new folder")

    learned = None

    def heard(documents: Iterable[bytes]) -> Iterator[bytes]:
        for each in documents:
            if stop():
                raise Interrupted("document 0, while the tokenizer was learning")
            yield each

    def training() -> Iterator[bytes]:
        nonlocal learned
        reading = Reading(source, origin, console, "Learning from")
        split = heard(content for split, content in reading if split == "train")
        chosen, learned = drawn(split, origin.learn_from or MOST_LEARNED)
        yield from heard(chosen)

    codec = make_codec(origin, training)
    progress = Progress(
        origin=origin,
        shard_tokens=shard_tokens,
        tokenizer_sha256=codec.sha256,
        learned=learned,
        **NOTHING,
    )
    _write(path, progress)
    with replacing(folder / TOKENIZER) as unfinished:
        unfinished.write_text(codec.definition, encoding="utf-8")
    return progress


def _forget(folder: Path) -> None:
    """Remove what was begun in `folder`, the file that says so last."""
    shards = (path for split in SPLITS for path in folder.glob(f"{split}-*"))
    for path in (*shards, folder / TOKENIZER, folder / PROGRESS):
        path.unlink(missing_ok=True)


def _checked(
    origin: Origin, source: Source, folder: Path, console: Console | None, stop: Callable[[], bool]
) -> Index:
    index = read_index(folder)
    _require_same(origin, index.origin, folder)
    reading = Reading(source, origin, console, "Checking")
    for _ in reading:
        if stop():
            raise Interrupted("document 0, as checking starts anew")
    if reading.sha256 != index.source_sha256:
        raise ValueError(
            f"{origin.data} has changed since {folder} was made; tokenise it into another folder"
        )
    return verify(folder)


def _require_same(origin: Origin, before: Origin, folder: Path) -> None:
    differing = [name for name in Origin.model_fields if getattr(origin, name) != getattr(before, name)]
    if differing:
        said = ", ".join(f"{name} {getattr(before, name)!r}" for name in differing)
        raise ValueError(f"{folder} was begun with {said}; go on with that, or choose another folder")


def _complete(parts: dict[str, Part], origin: Origin, reading: Reading) -> dict[str, Part]:
    """The splits with documents. Data may state fewer than three; a split by content must fill each."""
    found = {split: part for split, part in parts.items() if part.tokens}
    missing = [split for split in parts if split not in found]
    if "train" in missing or (missing and reading.by_content and origin.held_out):
        remedies = [f"run phasewise tokenize with a larger --held-out than {origin.held_out}"]
        if origin.kind == "text":
            remedies.append("with a --separator that divides files")
        if origin.kind in IN_FOLDERS:
            remedies.append("lay them in folders train, validation and test")
        said = f"none of {reading.documents} documents fell to {', '.join(missing)}"
        raise ValueError(f"{said}: {', or '.join(remedies)}")
    return found


def _by_size(documents: Iterator[tuple[str, bytes]], least: int) -> Iterator[list[tuple[str, bytes]]]:
    """The same in groups of at least so many bytes, or of one larger document."""
    some: list[tuple[str, bytes]] = []
    size = 0
    for each in documents:
        some.append(each)
        size += len(each[1])
        if size >= least:
            yield some
            some, size = [], 0
    if some:
        yield some


def _write(path: Path, document: Frozen) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(document.model_dump_json(indent=1) + "\n")
