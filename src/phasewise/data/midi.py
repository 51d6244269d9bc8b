"""Music from MIDI files as REMI tokens: bars, places in them, pitches, velocities and lengths of notes.

Tokens are miditok's (REMI: Huang and Yang, arXiv 2002.00212), of one piano: the notes of all tracks but drums
together, those outside its 88 keys left out. Every training piece also stands there transposed, by up to three
semitones down and up (as in arXiv 2509.10534); the vocabulary reaches that far beyond the piano.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phasewise.data.codec import Codec
from phasewise.data.corpus import Split
from phasewise.data.documents import STATED, Document, Part, Source, members_of, split_of, stated_splits
from phasewise.data.music import HIGHEST_PITCH, LOWEST_PITCH, UNREADABLE
from phasewise.record import parsed

if TYPE_CHECKING:
    from miditok import REMI

SEMITONES = 3
SHIFTS = range(-SEMITONES, SEMITONES + 1)
SUFFIXES = (".mid", ".midi")
MILLISECONDS_PER_QUARTER = 500
ASAP_ARRAYS = ("pitch", "vel", "dt", "dur", "lens", "piece")
PITCH = "Pitch_"
MISSING = "MIDI needs packages: pip install phasewise[music]"


class Transposed(Split):
    """Each piece of a split in all shifts of pitch from -3 to 3 semitones, computed as it is asked for."""

    def __init__(self, pieces: Split, vocabulary: Mapping[str, int]) -> None:
        self._pieces = pieces
        dtype = np.uint16 if len(vocabulary) <= 2**16 else np.int32
        self._tables = [np.arange(len(vocabulary), dtype=dtype) for _ in SHIFTS]
        for shift, table in zip(SHIFTS, self._tables, strict=True):
            for pitch in range(LOWEST_PITCH, HIGHEST_PITCH + 1):
                table[vocabulary[f"{PITCH}{pitch}"]] = vocabulary[f"{PITCH}{pitch + shift}"]

    def __len__(self) -> int:
        return len(self._pieces) * len(SHIFTS)

    @property
    def lengths(self) -> np.ndarray:
        return np.repeat(self._pieces.lengths, len(SHIFTS))

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        pieces = self._pieces.take(indices // len(SHIFTS))
        shifts = (indices % len(SHIFTS)).tolist()
        return [self._tables[shift][piece] for piece, shift in zip(pieces, shifts, strict=True)]


def remi_codec(definition: str | None = None) -> Codec:
    """The codec from the bytes of a MIDI file to REMI tokens; decoding gives their names.

    Places and note lengths are in eighths of a quarter up to a bar, in quarters of it beyond; 32 velocities.

    definition: the vocabulary of tokens that exist, which decodes without miditok; None: miditok's.
    Raises ValueError when miditok is missing or its vocabulary is another.
    """
    vocabulary = definition or json.dumps(_tokenizer().vocab)
    try:
        names = {number: name for name, number in json.loads(vocabulary).items()}
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"the stored vocabulary is damaged ({error}); restore it from a copy, or tokenise again"
        ) from error

    def encode(files: Sequence[bytes]) -> list[np.ndarray]:
        tokenizer = _tokenizer()
        if json.dumps(tokenizer.vocab) != vocabulary:
            raise ValueError("this miditok has another vocabulary than the tokens; install the one they had")
        encoded: list[Any] = [tokenizer.encode(_piano(file)) for file in files]
        return [np.array(tracks[0].ids, dtype=np.int32) for tracks in encoded]

    def decode(tokens: np.ndarray) -> str:
        return " ".join(names[token].removesuffix("_None") for token in np.asarray(tokens).tolist())

    return Codec("remi", "event", len(names), encode, decode, vocabulary)


def transposed(pieces: Split, codec: Codec) -> Split:
    """Each piece in seven keys."""
    return Transposed(pieces, json.loads(codec.definition))


def _tokenizer() -> REMI:
    try:
        from miditok import REMI, TokenizerConfig
    except ImportError as error:
        raise ValueError(MISSING) from error
    return REMI(
        TokenizerConfig(
            pitch_range=(LOWEST_PITCH - SEMITONES, HIGHEST_PITCH + SEMITONES + 1),
            beat_res={(0, 4): 8, (4, 12): 4},
            num_velocities=32,
            special_tokens=["PAD"],
            use_pitchdrum_tokens=False,
            use_tempos=False,
            use_time_signatures=False,
        )
    )


def midi_source(kind: str, path: Path, *, held_out: float, seed: int) -> Source:
    """The MIDI files of midi:PATH, maestro:PATH or asap:PATH.

    midi: a file or folder of .mid and .midi files; splits as for text.
    maestro: the folder of MAESTRO as published, with its own splits in maestro-v3.0.0.csv or .json.
    asap: an .npz of notes (pitch, vel, dt and dur in 10 ms, lens a performance, piece), split by piece.
    """
    if kind == "maestro":
        return _maestro(path)
    if kind == "asap":
        return _asap(path, held_out, seed)
    members = [member for member in members_of(path, kind) if member.suffix.lower() in SUFFIXES]
    if not members:
        raise ValueError(f"{path} holds no MIDI files; give a folder with {' or '.join(SUFFIXES)} files")
    names = [str(member.relative_to(path)) if member != path else path.name for member in members]
    splits = stated_splits([Path(name).parts[0] for name in names])
    parts = tuple(
        _part(name, member, split) for name, member, split in zip(names, members, splits, strict=True)
    )
    return Source(f"local MIDI, {len(parts)} files", "as its owner states", parts)


def _part(name: str, path: Path, split: str | None) -> Part:
    return Part(name, path.stat().st_size, split, partial(_file, path))


def _file(path: Path) -> Iterator[Document]:
    try:
        from symusic import Score
    except ImportError as error:
        raise ValueError(MISSING) from error
    content = path.read_bytes()
    try:
        score: Any = Score.from_midi(content)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}; give a readable MIDI file") from error
    if not _piano_notes(score):
        raise ValueError(f"{path} has no notes on a piano's keys; leave it out")
    yield Document(content, len(content))


def _piano(file: bytes) -> Any:
    """One track of all notes on the keys of a piano, with the file's tempo and bars."""
    from symusic import Score, Track

    score: Any = Score.from_midi(file)
    piano: Any = Track(name="piano", program=0, is_drum=False)
    piano.notes.extend(_piano_notes(score))
    piano.notes.sort(key=lambda note: (note.time, note.pitch, note.duration))
    score.tracks = [piano]
    return score


def _piano_notes(score: Any) -> list[Any]:
    tracks = (track for track in score.tracks if not track.is_drum)
    return [note for track in tracks for note in track.notes if LOWEST_PITCH <= note.pitch <= HIGHEST_PITCH]


def _maestro(path: Path) -> Source:
    tables = sorted([*path.glob("maestro*.csv"), *path.glob("maestro*.json")])
    if not tables:
        raise ValueError(f"{path} has no maestro*.csv or .json; give the folder of MAESTRO as published")
    try:
        rows = _table(tables[0])
        listed = [(row["midi_filename"], STATED[row["split"]]) for row in rows]
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{tables[0]} is not MAESTRO's table ({type(error).__name__}: {error}); it needs midi_filename and "
            "split, one of train, validation and test"
        ) from error
    missing = [name for name, _ in listed if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of {len(listed)} files, as {missing[0]}; unpack the whole archive"
        )
    parts = tuple(_part(name, path / name, split) for name, split in sorted(listed))
    licence = "CC BY-NC-SA 4.0 (Hawthorne and others, arXiv 1810.12247)"
    return Source(f"MAESTRO, {len(parts)} performances, {tables[0].stem}", licence, parts)


def _table(path: Path) -> list[dict[str, str]]:
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    columns = parsed(path.read_text(encoding="utf-8"))
    names = columns["midi_filename"]
    return [{"midi_filename": names[row], "split": columns["split"][row]} for row in names]


def _asap(path: Path, held_out: float, seed: int) -> Source:
    try:
        with path.open("rb") as file, np.load(file) as archive:
            arrays = {name: archive[name] for name in ASAP_ARRAYS}
    except UNREADABLE as error:
        raise ValueError(
            f"cannot read {path} ({type(error).__name__}: {error}); give an .npz with {', '.join(ASAP_ARRAYS)}"
        ) from error
    notes = int(arrays["lens"].sum())
    part = Part(path.name, notes, None, partial(_performances, arrays, held_out, seed))
    return Source(
        f"performances from ASAP, {len(arrays['lens'])} of {len(set(arrays['piece'].tolist()))} pieces, at 10 ms",
        "CC BY-NC-SA 4.0 (Foscarin and others, 2020), for research only",
        (part,),
    )


def _performances(arrays: Mapping[str, np.ndarray], held_out: float, seed: int) -> Iterator[Document]:
    """Each performance as a MIDI file at 120 quarters a minute, a tick a millisecond."""
    try:
        from symusic import Note, Score, Tempo, Track
    except ImportError as error:
        raise ValueError(MISSING) from error
    start = 0
    for length, piece in zip(arrays["lens"].tolist(), arrays["piece"].tolist(), strict=True):
        here = slice(start, start + length)
        start += length
        onsets = 10 * arrays["dt"][here].astype(np.int64).cumsum()
        durations = 10 * arrays["dur"][here].astype(np.int64)
        score: Any = Score(MILLISECONDS_PER_QUARTER)
        track: Any = Track(name=piece, program=0, is_drum=False)
        for onset, duration, pitch, velocity in zip(
            onsets.tolist(),
            durations.tolist(),
            arrays["pitch"][here].tolist(),
            arrays["vel"][here].tolist(),
            strict=True,
        ):
            track.notes.append(Note(onset, duration, pitch, velocity))
        score.tracks.append(track)
        score.tempos.append(Tempo(0, qpm=120))
        split = split_of(piece.encode(), held_out=held_out, seed=seed)
        yield Document(score.dumps_midi(), start, split)
