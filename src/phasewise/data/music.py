"""Bach's four-part chorales on a grid of sixteenth notes: music21's pieces, or the JSB benchmark's files.

A piece is int16 [steps, 4] of MIDI pitches (soprano, alto, tenor, bass; -1 where a voice is silent), and as
tokens the four voices of the first step, then of the second, and so on. The vocabulary is the paper's 90
(arXiv 2509.10534): padding, silence and the 88 keys of a piano.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import pickle
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phasewise.data.corpus import SPLITS, Corpus, Documents, sha256_of
from phasewise.record import parsed

if TYPE_CHECKING:
    from music21.stream.base import Score

VOICES = 4
REST = -1
STEPS_PER_QUARTER = 4
SILENCE, LOWEST_KEY = 1, 2
LOWEST_PITCH, HIGHEST_PITCH = 21, 108
VOCABULARY = LOWEST_KEY + HIGHEST_PITCH - LOWEST_PITCH + 1
MIDDLE_OF_VOICES = (67.0, 62.0, 55.0, 48.0)
JSB_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
JSB_PIECES = {"train": 229, "validation": 76, "test": 77}
UNREADABLE = (
    OSError,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    ImportError,
    OverflowError,
    zlib.error,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
SHARES = {"validation": 0.2, "test": 0.2, "train": 1.0}
TUNE_INTERVALS = 8
GRID_VERSION = 1
PITCH_CLASSES = ("C", "C#", "D", "Eb", "E", "F", "F#", "G", "Ab", "A", "Bb", "B")


def jsb(path: Path) -> Corpus:
    """The JSB chorales benchmark, 229/76/77 pieces, from a file of its sixteenth-note form.

    path: Jsb16thSeparated.npz (a pickle inside: open only one you trust), or the same as .json or .json.gz
        (splits "train", "valid", "test" of pieces of steps of pitches). A step may leave silent voices out;
        its pitches then go to the voices that last sang nearest to them.

    Raises ValueError for a file that is missing, unreadable, or not those pieces.
    """
    if not path.is_file():
        raise ValueError(f"no file at {path}; jsb:PATH takes Jsb16thSeparated.npz or the same as .json.gz")
    try:
        given = _read_npz(path) if path.suffix == ".npz" else _read_json(path)
        pieces = {split: [_piece(steps) for steps in given[key]] for key, split in JSB_SPLITS.items()}
    except UNREADABLE as error:
        raise ValueError(
            f"{path} does not hold chorales ({type(error).__name__}: {error}); give an .npz, .json or "
            '.json.gz with "train", "valid" and "test", each a list of pieces of steps of four pitches'
        ) from error
    counts = {split: len(members) for split, members in pieces.items()}
    if counts != JSB_PIECES:
        raise ValueError(
            f"{path} has {counts} pieces, but the JSB benchmark has {JSB_PIECES}; give the whole file"
        )
    return _corpus(
        pieces,
        name=f"jsb:{path}",
        source="JSB chorales at sixteenth notes, the benchmark's split (229/76/77 pieces), from a given file",
        licence="compositions in the public domain; the file on its owner's terms",
    )


def _read_npz(path: Path) -> Mapping[str, Sequence[Any]]:
    with path.open("rb") as file, np.load(file, allow_pickle=True, encoding="latin1") as archive:
        return {key: archive[key] for key in JSB_SPLITS}


def _read_json(path: Path) -> Mapping[str, Sequence[Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return parsed(file.read())


def _piece(steps: Sequence[Sequence[float]]) -> np.ndarray:
    """Checked pitches, int16 [steps, 4], of steps whose silent voices are NaN, negative or left out."""
    last = list(MIDDLE_OF_VOICES)
    piece = np.full((len(steps), VOICES), REST, dtype=np.int16)
    for step, pitches in enumerate(steps):
        if len(pitches) > VOICES:
            raise ValueError(f"step {step} has {len(pitches)} voices, not {VOICES}")
        voices = range(VOICES) if len(pitches) == VOICES else _nearest_voices(pitches, last)
        for voice, pitch in zip(voices, pitches, strict=True):
            if pitch >= 0:
                piece[step, voice] = last[voice] = pitch
    return _checked(piece)


def _nearest_voices(pitches: Sequence[float], last: Sequence[float]) -> Sequence[int]:
    def movement(voices: Sequence[int]) -> float:
        return sum(abs(pitch - last[voice]) for voice, pitch in zip(voices, pitches, strict=True))

    return min(combinations(range(VOICES), len(pitches)), key=movement)


def _checked(piece: np.ndarray) -> np.ndarray:
    if piece.ndim != 2 or piece.shape[1] != VOICES or len(piece) == 0:
        raise ValueError(f"a piece must be [steps, {VOICES}], but is {piece.shape}")
    sounding = piece[piece != REST]
    if sounding.size and not LOWEST_PITCH <= sounding.min() <= sounding.max() <= HIGHEST_PITCH:
        raise ValueError(
            f"pitches go from {sounding.min()} to {sounding.max()}, "
            f"beyond a piano's {LOWEST_PITCH} to {HIGHEST_PITCH}; transpose them"
        )
    return piece


def chorales(cache: Path | None = None) -> Corpus:
    """The 368 four-part pieces of Bach in music21, at sixteenth notes. Not the JSB benchmark.

    The first call parses them, about two minutes with a progress bar, into a file in `cache` (None:
    $XDG_CACHE_HOME/phasewise or ~/.cache/phasewise), written whole or not at all; later calls read it.
    Settings of one tune (sopranos that open alike, transposed or not) stay in one split; about three fifths
    of the pieces are for training, a fifth each for validation and test.

    Raises ValueError when music21 is missing or the cached file is damaged.
    """
    try:
        release = version("music21")
    except PackageNotFoundError as error:
        raise ValueError("the chorales come with music21: pip install phasewise[music]") from error
    folder = _cache_folder() if cache is None else cache
    stored = folder / f"chorales-{GRID_VERSION}-music21-{release}.npz"
    if not stored.exists():
        _store(parse_chorales(), stored)
    return _corpus(
        _split_by_tune(_stored(stored)),
        name="chorales",
        source=f"Bach's four-part pieces in music21 {release} (not the JSB benchmark), sixteenth notes",
        licence="compositions in the public domain; encodings on the terms of music21's corpus",
    )


def parse_chorales(names: Sequence[str] | None = None) -> list[np.ndarray]:
    """Pieces of exactly four parts, int16 [steps, 4], from music21's corpus, with a progress bar.

    names: such as "bach/bwv66.6"; None: all of Bach's.
    """
    from music21 import corpus
    from music21.stream.base import Score
    from rich.progress import track

    from phasewise.progress import stderr

    paths = corpus.getComposer("bach") if names is None else names
    pieces = []
    for path in track(paths, description="Parsing chorales, once", console=stderr()):
        score = corpus.parse(path)
        if isinstance(score, Score) and len(score.parts) == VOICES:
            pieces.append(_checked(_on_grid(score)))
    return pieces


def _on_grid(score: Score) -> np.ndarray:
    """The pitch that sounds in each part at each sixteenth: the one whose span holds that instant."""
    piece = np.full((math.ceil(score.highestTime * STEPS_PER_QUARTER), VOICES), REST, dtype=np.int16)
    for voice, part in enumerate(score.parts):
        for note in part.flatten().notes:
            first = math.ceil(note.offset * STEPS_PER_QUARTER)
            end = math.ceil((note.offset + note.quarterLength) * STEPS_PER_QUARTER)
            piece[first:end, voice] = max(pitch.midi for pitch in note.pitches)
    return piece


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "phasewise"


def _store(pieces: Sequence[np.ndarray], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        written = Path(folder) / path.name
        np.savez_compressed(
            written, pitches=np.concatenate(pieces), lengths=np.array([len(piece) for piece in pieces])
        )
        written.replace(path)


def _stored(path: Path) -> list[np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file) as archive:
            return np.split(archive["pitches"], archive["lengths"].cumsum()[:-1])
    except UNREADABLE as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to parse the chorales again") from error


def _split_by_tune(pieces: Sequence[np.ndarray]) -> Mapping[str, Sequence[np.ndarray]]:
    tunes: dict[bytes, list[np.ndarray]] = {}
    for piece in pieces:
        tunes.setdefault(hashlib.sha256(_tune(piece).tobytes()).digest(), []).append(piece)
    splits: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for tune in sorted(tunes):
        for split, share in SHARES.items():
            if len(splits[split]) < share * len(pieces):
                splits[split] += tunes[tune]
                break
    return splits


def _tune(piece: np.ndarray) -> np.ndarray:
    """The first intervals of the soprano, int16; repeated notes and rests left out."""
    soprano = piece[:, 0][piece[:, 0] != REST]
    steps = np.diff(soprano)
    return steps[steps != 0][:TUNE_INTERVALS].astype("<i2")


def _corpus(pieces: Mapping[str, Sequence[np.ndarray]], *, name: str, source: str, licence: str) -> Corpus:
    splits = {
        split: Documents.join([_tokens(piece) for piece in pieces[split]], vocab_size=VOCABULARY)
        for split in SPLITS
    }
    return Corpus(
        name=name,
        source=source,
        licence=licence,
        unit="note",
        vocab_size=VOCABULARY,
        sha256=sha256_of(splits),
        splits=splits,
        decode=_decode,
    )


def _tokens(piece: np.ndarray) -> np.ndarray:
    return np.where(piece == REST, SILENCE, piece - LOWEST_PITCH + LOWEST_KEY).reshape(-1)


def _decode(tokens: np.ndarray) -> str:
    """One line a step: names of the pitches, "." for silence."""
    names = [_name(token) for token in np.asarray(tokens).tolist()]
    return "\n".join(" ".join(names[start : start + VOICES]) for start in range(0, len(names), VOICES))


def _name(token: int) -> str:
    if token <= SILENCE:
        return "."
    octave, degree = divmod(token - LOWEST_KEY + LOWEST_PITCH, 12)
    return f"{PITCH_CLASSES[degree]}{octave - 1}"
