"""MIDI becomes REMI tokens of its piano notes, transposed for training, in splits that share no piece."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from symusic import Note, Score, Tempo, Track

from phasewise.cli import main
from phasewise.data import Corpus, load
from phasewise.data.kinds import Origin
from phasewise.data.midi import SHIFTS
from phasewise.data.tokenization import tokenize
from phasewise.interrupt import Interrupted

SIXTEENTH = 120


def write(path: Path, pitches: list[int], drums: list[int] = []) -> None:  # noqa: B006
    score = Score(480)
    for notes, is_drum in ((pitches, False), (drums, True)):
        track = Track(program=0, is_drum=is_drum)
        for place, pitch in enumerate(notes):
            track.notes.append(Note(place * SIXTEENTH, SIXTEENTH, pitch, 64))
        if notes:
            score.tracks.append(track)
    score.tempos.append(Tempo(0, qpm=120))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(score.dumps_midi())


def pitches_of(corpus: Corpus, document: np.ndarray) -> list[int]:
    names = corpus.decode(document).split()
    return [int(name.removeprefix("Pitch_")) for name in names if name.startswith("Pitch_")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, low in (("train", 60), ("validation", 40), ("test", 50)):
        for number in range(2):
            write(tmp_path / "midi" / split / f"{number}.mid", [low + number, low + 4, low + 7] * 9)
    return tmp_path / "midi"


def test_a_note_is_its_place_pitch_velocity_and_length_and_bars_are_marked(folder: Path) -> None:
    corpus = load(f"midi:{folder}")
    assert (corpus.unit, corpus.bytes_per_token) == ("event", None)
    names = corpus.decode(corpus.split("test")[0]).split()
    first = ["Bar", "Position_0", "Pitch_50", "Velocity_63", "Duration_0.2.8", "Position_2", "Pitch_54"]
    assert names[: len(first)] == first
    assert names.count("Bar") == 2
    assert max(document.max() for document in corpus.split("train")) < corpus.vocab_size


def test_a_wish_to_stop_is_heard_after_the_piece_and_work_goes_on_to_identical_shards(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = Origin(data=f"midi:{folder}")
    with pytest.raises(Interrupted, match=r"document 1$"):
        tokenize(origin, tmp_path / "parts", stop=lambda: True)
    assert main(["tokenize", origin.data, "--out", str(tmp_path / "parts")]) == 0
    assert "local MIDI, 6 files, REMI, in" in capsys.readouterr().out
    tokenize(origin, tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes()


def test_training_pieces_stand_in_seven_keys_and_held_out_ones_as_they_are(folder: Path) -> None:
    corpus = load(f"midi:{folder}")
    assert {name: len(documents) for name, documents in corpus.splits.items()} == {
        "train": 2 * len(SHIFTS),
        "validation": 2,
        "test": 2,
    }
    for piece, bottom in ((0, 60), (1, 61)):
        for copy, shift in enumerate(SHIFTS):
            document = corpus.split("train")[piece * len(SHIFTS) + copy]
            assert pitches_of(corpus, document)[:3] == [bottom + shift, 64 + shift, 67 + shift]
    assert corpus.split("train").lengths.tolist() == [len(document) for document in corpus.split("train")]


def test_the_whole_piano_can_be_transposed_and_what_lies_beyond_it_is_left_out(folder: Path) -> None:
    write(folder / "train" / "2.mid", [20, 21, 108, 109])
    corpus = load(f"midi:{folder}")
    found = [pitches_of(corpus, document) for document in corpus.split("train")[2 * len(SHIFTS) :]]
    assert found == [[21 + shift, 108 + shift] for shift in SHIFTS]


def test_drums_are_left_out_and_other_tracks_join(folder: Path) -> None:
    before = load(f"midi:{folder}")
    write(folder / "test" / "0.mid", [50, 54, 57] * 9, drums=[36, 38] * 9)
    assert load(f"midi:{folder}").sha256 == before.sha256


def test_music_in_shards_is_music_in_memory(folder: Path, tmp_path: Path) -> None:
    tokenize(Origin(data=f"midi:{folder}"), tmp_path / "out")
    mapped, in_memory = load(f"shards:{tmp_path / 'out'}"), load(f"midi:{folder}")
    for split in in_memory.splits:
        for first, second in zip(mapped.split(split), in_memory.split(split), strict=True):
            assert mapped.decode(first) == in_memory.decode(second)


ROWS = [
    ("2004/a.midi", "train"),
    ("2006/b.midi", "validation"),
    ("2008/c.midi", "test"),
    ("2004/d.midi", "train"),
]


@pytest.fixture(params=["csv", "json"])
def maestro(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "maestro"
    for number, (name, _) in enumerate(ROWS):
        write(folder / name, [60 + number, 64] * 8)
    columns = {
        "canonical_composer": ["Bach, the elder"] * 4,
        "split": [split for _, split in ROWS],
        "midi_filename": [name for name, _ in ROWS],
    }
    if request.param == "json":
        by_row = {
            name: {str(row): value for row, value in enumerate(column)} for name, column in columns.items()
        }
        (folder / "maestro-v3.0.0.json").write_text(json.dumps(by_row))
    else:
        lines = [",".join(columns), *(f'"Bach, the elder",{split},{name}' for name, split in ROWS)]
        (folder / "maestro-v3.0.0.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_maestro_s_own_splits_are_kept(maestro: Path) -> None:
    corpus = load(f"maestro:{maestro}")
    found = {
        split: [pitches_of(corpus, document)[0] for document in documents]
        for split, documents in corpus.splits.items()
    }
    assert found["validation"] == [61]
    assert found["test"] == [62]
    assert found["train"] == [60 + shift for shift in SHIFTS] + [63 + shift for shift in SHIFTS]
    assert "CC BY-NC-SA" in corpus.licence


def test_an_incomplete_maestro_names_what_is_missing(maestro: Path, tmp_path: Path) -> None:
    (maestro / "2006" / "b.midi").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 4 files, as 2006/b\.midi; unpack the whole archive"):
        load(f"maestro:{maestro}")
    with pytest.raises(ValueError, match=r"has no maestro\*\.csv or \.json; give the folder of MAESTRO"):
        load(f"maestro:{tmp_path}")


def notes_file(path: Path, performances: int) -> None:
    random = np.random.default_rng(0)
    lens = random.integers(5, 9, performances)
    count = int(lens.sum())
    np.savez(
        path,
        pitch=random.integers(21, 109, count).astype(np.uint8),
        vel=np.full(count, 64, np.uint8),
        dt=np.full(count, 50, np.uint16),
        dur=np.full(count, 25, np.uint16),
        lens=lens,
        piece=np.array([f"piece {number // 3}" for number in range(performances)]),
    )


def test_performances_of_a_piece_stay_in_one_split_and_keep_their_notes(tmp_path: Path) -> None:
    notes_file(tmp_path / "notes.npz", 240)
    corpus = load(f"asap:{tmp_path / 'notes.npz'}")
    held = {split: len(documents) for split, documents in corpus.splits.items()}
    assert all(count % (3 * (7 if split == "train" else 1)) == 0 for split, count in held.items())
    assert held["train"] // 7 + held["validation"] + held["test"] == 240
    with np.load(tmp_path / "notes.npz") as archive:
        starts = np.cumsum(archive["lens"]) - archive["lens"]
        given = [archive["pitch"][s : s + n].tolist() for s, n in zip(starts, archive["lens"], strict=True)]
    for document in corpus.split("test"):
        assert pitches_of(corpus, document) in given
    names = corpus.decode(corpus.split("test")[0]).split()
    assert names[1:5:3] == ["Position_8", "Duration_0.4.8"]
    assert "Position_16" in names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MThd", r"cannot read .*bad\.mid: .*; give a readable MIDI file"),
        (b"", r"cannot read .*bad\.mid"),
    ],
)
def test_a_file_that_is_no_midi_is_named(folder: Path, content: bytes, message: str) -> None:
    (folder / "train" / "bad.mid").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(f"midi:{folder}")


def test_music_that_cannot_be_says_why(folder: Path, tmp_path: Path) -> None:
    for name, pitches, drums in (("drums", [], [36]), ("low", [5, 6], [])):
        write(folder / "train" / f"{name}.mid", pitches, drums=drums)
        with pytest.raises(ValueError, match=rf"{name}\.mid has no notes on a piano's keys; leave it out"):
            load(f"midi:{folder}")
        (folder / "train" / f"{name}.mid").unlink()
    (tmp_path / "words.txt").write_text("x")
    with pytest.raises(ValueError, match=r"holds no MIDI files; give a folder with \.mid or \.midi files"):
        load(f"midi:{tmp_path / 'words.txt'}")
    with pytest.raises(
        ValueError, match=r"cannot read .*words\.txt .*; give an \.npz with pitch, vel, dt, dur"
    ):
        load(f"asap:{tmp_path / 'words.txt'}")
    with pytest.raises(ValueError, match="music has one tokenizer, REMI, not 'bpe:300'; leave tokenizer out"):
        tokenize(Origin(data=f"midi:{folder}", tokenizer="bpe:300"), tmp_path / "out")


@pytest.mark.parametrize("missing", ["symusic", "miditok"])
def test_a_missing_package_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"MIDI needs packages: pip install phasewise\[music\]"):
        load(f"midi:{folder}")
