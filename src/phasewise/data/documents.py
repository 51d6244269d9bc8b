"""Where documents come from, one after another and never all at once: files of text, JSON lines, parquet, hubs.

A source has parts in a fixed order (a file, a split of a data set), and a part has documents in a fixed order.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

FIELD = "--field of phasewise tokenize"
UTF8_SIGNATURE = codecs.BOM_UTF8
UTF16_SIGNATURES = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
LARGEST_IN_MEMORY = 1 << 28
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)
BLOCK = 1 << 20
ROWS = 256
STATED = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"} | {
    "dev": "validation",
    "test": "test",
}
STATED_NAME = re.compile(rf"({'|'.join(STATED)})(?:[-_.].*)?")


@dataclass(frozen=True)
class Document:
    """One document.

    done: how much of its part's size has been read after it.
    split: the split that its place within the part states, if any.
    """

    content: bytes
    done: int
    split: str | None = None


Documents = Iterator[Document]


@dataclass(frozen=True)
class Part:
    """A file, or a split of a data set.

    size: in bytes or rows, for showing progress.
    split: the split that its name states; where neither this nor a document states one, content decides.
    read: gives the documents.
    """

    name: str
    size: int
    split: str | None
    read: Callable[[], Documents]


@dataclass(frozen=True)
class Source:
    """Parts in a fixed order, with where they come from and on what terms, a sentence each."""

    description: str
    licence: str
    parts: tuple[Part, ...]


def split_of(content: bytes, *, held_out: float, seed: int) -> str:
    """The split of a document whose place states none, from its content alone: copies stay together.

    A hash of seed and content is uniform on [0, 1): test below `held_out`, validation below twice that.

    >>> split_of(b"It is a truth universally acknowledged", held_out=0.05, seed=0)
    'train'
    """
    digest = hashlib.sha256(str(seed).encode() + b"\0" + hashlib.sha256(content).digest()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return "test" if place < held_out else "validation" if place < 2 * held_out else "train"


def text_source(name: str, *, separator: str | None = None, field: str = "text") -> Source:
    """The documents of text:PATH, jsonl:PATH, parquet:PATH or datasets:NAME.

    PATH is a file or a folder, of which hidden files are left out; .xz, .gz and .zst are unpacked. Splits are the
    source's own where names state them (train, validation or valid, val, dev, and test, as folders or as the
    starts of names at the top of PATH, or as a data set's splits); a source that names only train has none.
    NAME may end in ":CONFIG", and may be a local folder that the datasets library reads.

    separator: for text: what stands between documents inside a file; None: a file is a document.
    field: for the others: the field or column that holds the text.
    Raises ValueError for what is missing, empty or unreadable, as it is come upon.
    """
    kind, _, path = name.partition(":")
    if separator == "":
        raise ValueError(
            "separator is empty; give the string between documents, or None for one document a file"
        )
    if separator is not None and kind != "text":
        raise ValueError(f"{kind} has documents of its own; leave separator out")
    match kind:
        case "text":
            return _files(Path(path).expanduser(), partial(text_documents, separator=separator), kind)
        case "jsonl":
            return _files(Path(path).expanduser(), partial(_json_lines, field=field), kind)
        case "parquet":
            return _files(Path(path).expanduser(), partial(_parquet, field=field), kind)
        case "datasets":
            return _data_set(path, field)
    raise ValueError(f"{name!r} is no text; give text:PATH, jsonl:PATH, parquet:PATH or datasets:NAME")


def members_of(path: Path, kind: str) -> list[Path]:
    """The file at `path`, or every file below it in order, hidden ones apart, links followed.

    Raises ValueError when there is none, and for a link to nothing.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"no file or folder at {path}; {kind}:PATH takes an existing one")
    members = sorted(_below(path, frozenset()))
    if not members:
        raise ValueError(f"folder {path} holds no files; give a folder with {kind} files")
    return members


def stated_splits(names: Sequence[str]) -> list[str | None]:
    """The split that the start of each name states; all None unless two different ones are stated.

    Raises ValueError when some names state a split and others none.
    """
    found = [STATED_NAME.fullmatch(name) for name in names]
    splits = [STATED[each.group(1)] if each else None for each in found]
    if len(set(splits) - {None}) < 2:
        return [None] * len(names)
    if None in splits:
        raise ValueError(
            f"{names[splits.index(None)]} belongs to no split, while others are named train, validation or "
            "test; move it into one of these, or rename them for a split by content"
        )
    return splits


def _below(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """The files below a folder, but not below a link back to a folder on the way here."""
    real = folder.resolve()
    for member in folder.iterdir() if real not in above else ():
        if member.name.startswith("."):
            continue
        if member.is_symlink() and not member.exists():
            raise ValueError(f"{member} is a link to nothing; mend or remove it")
        if member.is_file():
            yield member
        elif member.is_dir():
            yield from _below(member, above | {real})


def require_small(size: int, data: str) -> None:
    """ValueError for more than 256 MiB of documents, which tokenising at each start would hold in memory."""
    if size > LARGEST_IN_MEMORY:
        raise ValueError(
            f"{data} has more than {LARGEST_IN_MEMORY >> 20} MiB, too much to tokenise at each start; "
            f"run phasewise tokenize {data} --out FOLDER once and give shards:FOLDER"
        )


def _files(path: Path, read: Callable[[Path], Documents], kind: str) -> Source:
    members = members_of(path, kind)
    names = [str(member.relative_to(path)) if member != path else path.name for member in members]
    splits = stated_splits([Path(name).parts[0] for name in names])
    parts = tuple(
        Part(name, member.stat().st_size, split, partial(read, member))
        for name, member, split in zip(names, members, splits, strict=True)
    )
    return Source(f"local {kind}, {len(parts)} files", "as its owner states", parts)


def text_documents(path: Path, *, separator: str | None) -> Documents:
    """The documents of a text file, plain or packed: the whole, or the parts between separators.

    UTF-8's signature (a byte order mark) at the start of a file belongs to no document.
    """
    try:
        with path.open("rb") as packed:
            file = _unpacked(packed, path.suffix)
            contents = [file.read()] if separator is None else _separated(file, separator.encode())
            for number, content in enumerate(contents):
                if not number and content.startswith(UTF16_SIGNATURES):
                    raise ValueError(f"{path} is text in UTF-16 or UTF-32; write it again in UTF-8")
                if (place := content.find(b"\0")) >= 0:
                    raise ValueError(
                        f"{path} is binary (a zero byte at {place}), not text; leave it out of the path"
                    )
                yield Document(content if number else content.removeprefix(UTF8_SIGNATURE), packed.tell())
    except UNREADABLE as error:
        raise ValueError(f"cannot read {path}: {error}; give a readable text file") from error


def _unpacked(packed: io.BufferedReader, suffix: str) -> io.BufferedIOBase:
    match suffix:
        case ".xz":
            return lzma.open(packed)
        case ".gz":
            return gzip.open(packed)
        case ".zst":
            try:
                import pyarrow
            except ImportError as error:
                raise ValueError(".zst files need a package: pip install phasewise[train]") from error
            stream: Any = pyarrow.CompressedInputStream(packed, "zstd")
            return io.BufferedReader(stream)
        case _:
            return packed


def _separated(file: io.BufferedIOBase, separator: bytes) -> Iterator[bytes]:
    rest = bytearray()
    while block := file.read(BLOCK):
        start, searched = 0, max(0, len(rest) - len(separator) + 1)
        rest += block
        while (place := rest.find(separator, max(start, searched))) >= 0:
            yield bytes(rest[start:place])
            start = place + len(separator)
        del rest[:start]
    yield bytes(rest)


def _json_lines(path: Path, *, field: str) -> Documents:
    try:
        with path.open("rb") as packed:
            for number, line in enumerate(_unpacked(packed, path.suffix), start=1):
                if line.strip():
                    yield Document(_field(line, field, f"{path}, line {number}"), packed.tell())
    except UNREADABLE as error:
        raise ValueError(f"cannot read {path}: {error}; give readable JSON lines") from error


def _field(line: bytes, field: str, where: str) -> bytes:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); give one object a line") from error
    if not isinstance(row, dict) or field not in row:
        known = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no {field!r}, only {known}; name the field with {FIELD}")
    return _row(row[field], where, field)


def _parquet(path: Path, *, field: str) -> Documents:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError("parquet needs a package: pip install phasewise[train]") from error
    try:
        with parquet.ParquetFile(path) as file:
            size = path.stat().st_size
            if field not in file.schema_arrow.names:
                known = ", ".join(file.schema_arrow.names)
                raise ValueError(f"{path} has no column {field!r}, only {known}; name it with {FIELD}")
            done = 0
            for rows in file.iter_batches(batch_size=ROWS, columns=[field]):
                for text in rows.column(0).to_pylist():
                    done += 1
                    content = _row(text, f"{path}, row {done}", field)
                    yield Document(content, size * done // file.metadata.num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read {path}: {error}; give a readable parquet file") from error


def _row(text: object, where: str, field: str) -> bytes:
    """The document of one row; a null is a blank one."""
    if text is None:
        return b""
    if not isinstance(text, str):
        raise ValueError(
            f"{where} holds {type(text).__name__} in {field!r}, not text; name the right one with {FIELD}"
        )
    return text.encode(errors="surrogatepass")


def _data_set(name: str, field: str) -> Source:
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data sets by name need a package: pip install phasewise[train]") from error
    title, _, config = name.partition(":")
    try:
        found = _loaded(title, config)
    except Exception as error:  # the library raises many kinds, its own and its hub's
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"datasets cannot load {title!r} ({reason}); check the name, NAME:CONFIG where it has several, "
            "and the network"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        raise ValueError(f"{title!r} has no splits that can be read whole; give another data set")
    known = {split: rows for split, rows in found.items() if str(split) in STATED}
    left_out = ", ".join(str(split) for split in found if str(split) not in STATED)
    if not known:
        raise ValueError(f"{title!r} has no split train, validation or test, only {left_out}")
    parts = []
    for (split, rows), stated in zip(
        known.items(), stated_splits([str(each) for each in known]), strict=True
    ):
        if field not in rows.column_names:
            columns = ", ".join(rows.column_names)
            raise ValueError(f"{title!r} has no column {field!r}, only {columns}; name it with {FIELD}")
        parts.append(Part(str(split), len(rows), stated, partial(_rows, rows.select_columns([field]), field)))
    info = next(iter(known.values())).info
    described = f"data set {name}" + (f", without its {left_out}" if left_out else "")
    return Source(described, info.license or "as its owner states", tuple(parts))


def _loaded(title: str, config: str) -> Any:
    """A data set by name, or what save_to_disk wrote into a folder: one without splits as the split "train"."""
    import datasets

    folder = Path(title).expanduser()
    if config or not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_dataset(title, config or None)
    found = datasets.load_from_disk(folder)
    return found if isinstance(found, datasets.DatasetDict) else datasets.DatasetDict({"train": found})


def _rows(rows: datasets.Dataset, field: str) -> Documents:
    done = 0
    for start in range(0, len(rows), ROWS):
        for text in rows[start : start + ROWS][field]:
            done += 1
            yield Document(_row(text, f"row {done}", field), done)
