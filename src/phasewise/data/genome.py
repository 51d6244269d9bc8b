"""Genomes in FASTA files: a token is a base, a document a run of known bases."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from phasewise.data.corpus import SPLITS, Corpus, Documents, sha256_of

BASES = b"ACGT"
AMBIGUOUS = b"NRYKMSWBDHV"
HELD_OUT = 0.1
_UNKNOWN, _INVALID = 4, 255


def genome(path: Path) -> Corpus:
    """The bases of a FASTA file, plain or .gz, as tokens 0 to 3 for A, C, G and T (and U), in either case.

    A document is a run of known bases within a record: N and the other ambiguous letters end it. Each
    document gives its last tenth to test and the tenth before it to validation.

    Raises ValueError for a file that is missing, unreadable, not FASTA, or without two known bases in a row
    for every split.
    """
    runs = [run for record in _records(path) for run in _known_runs(record)]
    splits: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for run in runs:
        validation, test = round(len(run) * (1 - 2 * HELD_OUT)), round(len(run) * (1 - HELD_OUT))
        for split, part in zip(SPLITS, np.split(run, [validation, test]), strict=True):
            splits[split].append(part)
    for split, parts in splits.items():
        if max((len(part) for part in parts), default=0) < 2:
            raise ValueError(
                f"{path} has too few known bases: none are left for {split}; give a longer genome"
            )
    documents = {split: Documents.join(parts, vocab_size=len(BASES)) for split, parts in splits.items()}
    return Corpus(
        name=f"genome:{path}",
        source=f"local FASTA file, {len(runs)} runs of known bases",
        licence="as its owner states",
        unit="base",
        vocab_size=len(BASES),
        sha256=sha256_of(documents),
        splits=documents,
        decode=_decode,
    )


def _records(path: Path) -> list[np.ndarray]:
    """The letters of each record, as codes: a base, unknown, or invalid."""
    if not path.is_file():
        raise ValueError(f"no file at {path}; genome:PATH takes a FASTA file, plain or .gz")
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}; give a readable FASTA file") from error
    if not content.startswith(b">"):
        raise ValueError(f"{path} is not FASTA: it starts with {content[:10]!r}, not with '>' and a name")
    codes = np.full(256, _INVALID, dtype=np.uint8)
    for letters in (BASES, BASES.lower()):
        codes[list(letters)] = range(len(BASES))
    codes[list(b"Uu")] = BASES.index(b"T")
    codes[list(AMBIGUOUS + AMBIGUOUS.lower())] = _UNKNOWN
    records = []
    for record in content[1:].split(b"\n>"):
        name, _, body = record.partition(b"\n")
        letters = np.frombuffer(body.translate(None, b"\r\n \t"), dtype=np.uint8)
        coded = codes[letters]
        if (coded == _INVALID).any():
            wrong = bytes([letters[coded.argmax()]])
            raise ValueError(
                f"{path}: record {name[:30]!r} holds {wrong!r}, which stands for no base; remove it"
            )
        records.append(coded)
    return records


def _known_runs(coded: np.ndarray) -> list[np.ndarray]:
    known = np.concatenate([[False], coded < _UNKNOWN, [False]])
    edges = np.flatnonzero(known[1:] != known[:-1])
    return [coded[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _decode(tokens: np.ndarray) -> str:
    return np.frombuffer(BASES, dtype=np.uint8)[np.asarray(tokens)].tobytes().decode()
