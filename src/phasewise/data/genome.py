"""Genomes in FASTA files: a document is a run of known bases, a token a base or K of them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from phasewise.data.codec import Codec
from phasewise.data.corpus import SPLITS, Corpus, Documents, sha256_of
from phasewise.data.documents import Document, Part, Source, members_of, require_small, stated_splits

BASES = b"ACGT"
AMBIGUOUS = b"NRYKMSWBDHV"
SUFFIXES = (".fa", ".fasta", ".fna")
HELD_OUT = 0.1
LONGEST_WORD = 9
_INVALID = 255

Ranges = dict[str, list[tuple[int, int, str]]]


def genome(path: Path, tokenizer: str = "bytes") -> Corpus:
    """The known bases of FASTA files in memory, as `genome_source` splits them.

    tokenizer: "bytes", a base a token, 0 to 3 for A, C, G and T; or "kmers:K", as `genome_codec` says.
    Raises ValueError for a file that is missing, unreadable, not FASTA, or without two known bases in a row
    for every split.
    """
    codec = genome_codec(tokenizer)
    source = genome_source(path)
    contents: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    size = 0
    for part in source.parts:
        for document in part.read():
            split = document.split or part.split
            assert split is not None
            contents[split].append(document.content)
            require_small(size := size + len(document.content), f"genome:{path}")
    for split, members in contents.items():
        if max((len(member) for member in members), default=0) < 2:
            raise ValueError(
                f"{path} has too few known bases: none are left for {split}; give a longer genome"
            )
    splits = {
        split: Documents.join(codec.encode(members), vocab_size=codec.vocab_size)
        for split, members in contents.items()
    }
    return Corpus(
        name=f"genome:{path}" + ("" if tokenizer == "bytes" else f", {tokenizer}"),
        source=source.description,
        licence=source.licence,
        unit=codec.unit,
        vocab_size=codec.vocab_size,
        sha256=sha256_of(splits),
        splits=splits,
        decode=codec.decode,
    )


def genome_source(path: Path) -> Source:
    """Runs of known bases, as upper-case letters, of a FASTA file or of those in a folder, plain or .gz.

    N and the other ambiguous letters end a run; U is T. Splits never overlap. They are, in this order:
    the file names or folders' names that state them; a .bed file in the folder, whose fourth column names
    the split of each range (counted from 0, the end left out; what is in no range is left out); or, of each
    run, the last tenth for test and the tenth before it for validation.
    """
    if not path.exists():
        raise ValueError(f"no file at {path}; genome:PATH takes a FASTA file, plain or .gz, or a folder")
    members = members_of(path, "genome")
    beds = [member for member in members if member.suffix == ".bed"]
    if path.is_dir():
        members = [member for member in members if member.name.removesuffix(".gz").endswith(SUFFIXES)]
    if not members or len(beds) > 1:
        raise ValueError(
            f"{path} has {len(members)} FASTA files ({', '.join(SUFFIXES)}, or .gz) and {len(beds)} .bed files; "
            "give some, and at most one .bed"
        )
    names = [str(member.relative_to(path)) if path.is_dir() else path.name for member in members]
    splits = stated_splits([Path(name).parts[0] for name in names])
    ranges = _ranges(beds[0]) if beds else None
    if ranges is not None and splits[0] is not None:
        raise ValueError(f"{path} states splits by names and in {beds[0].name}; remove one of the two")
    seen: set[str] = set()
    parts = tuple(
        Part(
            name,
            member.stat().st_size,
            split,
            partial(_documents, member, split=split, ranges=ranges, seen=seen, last=member == members[-1]),
        )
        for name, member, split in zip(names, members, splits, strict=True)
    )
    where = "split by ranges" if beds else "split by file" if splits[0] else "each run split by tenths"
    return Source(f"local FASTA, {len(parts)} files, {where}", "as its owner states", parts)


def genome_codec(name: str) -> Codec:
    """The codec of bases: "bytes", one a token, or "kmers:K" for K from 1 to 9.

    A word of K bases is the number they write in base 4, A being 0: 4^K words. The up to K - 1 bases at the
    end of a run are four more tokens, one a base. So "kmers:6" has 4100 tokens; the 4107 of arXiv 2509.10534
    also count an N and special ones, which never occur here.

    >>> codec = genome_codec("kmers:2")
    >>> codec.encode([b"ACGTA"])[0].tolist(), codec.vocab_size
    ([1, 11, 16], 20)
    """
    if name == "bytes":
        return Codec("bytes", "base", len(BASES), lambda runs: [_codes(run) for run in runs], _decode)
    kind, _, size = name.partition(":")
    if kind != "kmers" or not size.isdecimal() or not 1 <= int(size) <= LONGEST_WORD:
        raise ValueError(
            f"genomes have no tokenizer {name!r}; give bytes (a base a token) or kmers:K, K to {LONGEST_WORD}"
        )
    width = int(size)
    words = 4**width
    places = 4 ** np.arange(width - 1, -1, -1, dtype=np.int32)

    def encode(runs: Sequence[bytes]) -> list[np.ndarray]:
        found = []
        for codes in map(_codes, runs):
            body = len(codes) // width * width
            found.append(
                np.concatenate([codes[:body].reshape(-1, width) @ places, codes[body:] + np.int32(words)])
            )
        return found

    def decode(tokens: np.ndarray) -> str:
        return "".join(
            _decode(token // places % 4) if token < words else _decode(np.array([token - words]))
            for token in np.asarray(tokens, dtype=np.int64).tolist()
        )

    return Codec(name, "k-mer", words + len(BASES), encode, decode)


def _documents(
    path: Path, *, split: str | None, ranges: Ranges | None, seen: set[str], last: bool
) -> Iterator[Document]:
    size = path.stat().st_size
    for name, letters in _records(path):
        seen.add(name)
        for first, after, _ in (ranges or {}).get(name, ()):
            if after > len(letters):
                raise ValueError(
                    f"the .bed file names {name} {first} to {after}, but {path} has {len(letters)} letters of it"
                )
        known = np.concatenate([[False], letters != ord("N"), [False]])
        edges = np.flatnonzero(known[1:] != known[:-1])
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            for first, after, part in _parts(name, start, end, split, ranges):
                yield Document(letters[first:after].tobytes(), size, part)
    if last and ranges is not None and set(ranges) - seen:
        missing = ", ".join(sorted(set(ranges) - seen))
        raise ValueError(f"the .bed file names {missing}, but the FASTA files have {', '.join(sorted(seen))}")


def _parts(
    name: str, start: int, end: int, split: str | None, ranges: Ranges | None
) -> Iterator[tuple[int, int, str]]:
    """The pieces of a run that belong to one split each."""
    if split is not None:
        yield start, end, split
    elif ranges is None:
        places = [start + round((end - start) * share) for share in (0, 1 - 2 * HELD_OUT, 1 - HELD_OUT, 1)]
        yield from zip(places, places[1:], SPLITS, strict=False)
    else:
        for first, after, stated in ranges.get(name, ()):
            if max(start, first) < min(end, after):
                yield max(start, first), min(end, after), stated


def _ranges(path: Path) -> Ranges:
    found: Ranges = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip() or line.startswith(("#", "track", "browser")):
            continue
        columns = line.split()
        try:
            name, first, after, split = columns[0], int(columns[1]), int(columns[2]), columns[3]
        except (IndexError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number} is not a range; give NAME START END SPLIT, as 20 60000 26319569 test"
            ) from error
        if split not in SPLITS or not 0 <= first < after:
            raise ValueError(
                f"{path}, line {number} has the split {split!r} for {first} to {after}; give one of "
                f"{', '.join(SPLITS)} and a range that is not empty"
            )
        for other in found.setdefault(name, []):
            if first < other[1] and other[0] < after:
                raise ValueError(
                    f"{path}, line {number} overlaps {name} {other[0]} to {other[1]}; splits must not overlap"
                )
        found[name].append((first, after, split))
    return {name: sorted(members) for name, members in found.items()}


def _records(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The name of each record, and its letters: A, C, G, T, or N for what is unknown."""
    table = np.full(256, _INVALID, dtype=np.uint8)
    for letters, meaning in ((BASES, BASES), (b"U", b"T"), (AMBIGUOUS, b"N" * len(AMBIGUOUS))):
        table[list(letters)] = table[list(letters.lower())] = list(meaning)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            start = file.readline()
            if not start.startswith(b">"):
                raise ValueError(
                    f"{path} is not FASTA: it starts with {start[:10]!r}, not with '>' and a name"
                )
            header, lines = start, []
            for line in file:
                if line.startswith(b">"):
                    yield _record(path, header, lines, table)
                    header, lines = line, []
                else:
                    lines.append(line)
            yield _record(path, header, lines, table)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}; give a readable FASTA file") from error


def _record(path: Path, header: bytes, lines: list[bytes], table: np.ndarray) -> tuple[str, np.ndarray]:
    letters = np.frombuffer(b"".join(lines).translate(None, b"\r\n \t"), dtype=np.uint8)
    known = table[letters]
    if (known == _INVALID).any():
        wrong = bytes([letters[(known == _INVALID).argmax()]])
        name = header[1:].strip()[:30]
        raise ValueError(f"{path}: record {name!r} holds {wrong!r}, which stands for no base; remove it")
    return (header[1:].split() or [b""])[0].decode(errors="replace"), known


def _codes(run: bytes) -> np.ndarray:
    table = np.zeros(256, dtype=np.int32)
    table[list(BASES)] = range(len(BASES))
    return table[np.frombuffer(run, dtype=np.uint8)]


def _decode(tokens: np.ndarray) -> str:
    return np.frombuffer(BASES, dtype=np.uint8)[np.asarray(tokens)].tobytes().decode()
