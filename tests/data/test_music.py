"""Chorales: pitches checked by hand, both forms of the benchmark, a cache that is whole or absent."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from phasewise.data import load
from phasewise.data.music import parse_chorales

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
NPZ, JSON = SHARED / "Jsb16thSeparated.npz", SHARED / "jsb-chorales-16th.json.gz"
benchmark = pytest.mark.skipif(not NPZ.exists(), reason=f"the JSB benchmark's files are not in {SHARED}")
CHANT = [[67, 62, 55, 43]] * 4


def write_json(path: Path, train: list, counts: tuple[int, int, int] = (229, 76, 77)) -> Path:
    splits = dict(zip(("train", "valid", "test"), ([CHANT] * count for count in counts), strict=True))
    splits["train"] = train + splits["train"][len(train) :]
    path.write_text(json.dumps(splits))
    return path


def test_tokens_go_through_the_voices_then_the_steps_with_silence_a_token(tmp_path: Path) -> None:
    piece = [[67, 62, 55, 43], [-1, 62, 108, 21]]
    corpus = load(f"jsb:{write_json(tmp_path / 'jsb.json', [piece])}")
    key = {pitch: pitch - 21 + 2 for pitch in range(21, 109)}
    assert corpus.splits["train"][0].tolist() == [
        *(key[67], key[62], key[55], key[43]),
        *(1, key[62], key[108], key[21]),
    ]
    assert corpus.vocab_size == 90 == max(key.values()) + 1
    assert corpus.decode(corpus.splits["train"][0]) == "G4 D4 G3 G2\n. D4 C8 A0"
    assert (corpus.unit, corpus.bytes_per_token) == ("note", None)


def test_pitches_of_a_step_with_voices_left_out_go_to_the_nearest_voices(tmp_path: Path) -> None:
    piece = [[71, 66, 62, 50], [70, 51], [], [66, 62, 50]]
    corpus = load(f"jsb:{write_json(tmp_path / 'jsb.json', [piece])}")
    assert corpus.decode(corpus.splits["train"][0]).splitlines()[1:] == [
        "Bb4 . . Eb3",
        ". . . .",
        ". F#4 D4 D3",
    ]


@benchmark
def test_the_benchmark_s_split_sizes_lengths_and_pitches() -> None:
    for path in (NPZ, JSON):
        corpus = load(f"jsb:{path}")
        assert {name: len(split) for name, split in corpus.splits.items()} == {
            "train": 229,
            "validation": 76,
            "test": 77,
        }
        notes = {name: int(split.lengths.sum()) // 4 for name, split in corpus.splits.items()}
        assert notes == {"train": 55_228, "validation": 18_408, "test": 18_900}
        sounding = np.concatenate([piece for split in corpus.splits.values() for piece in split])
        assert sounding[sounding > 1].min() == 36 - 19
        assert sounding.max() == 81 - 19


@benchmark
def test_both_forms_of_the_benchmark_hold_the_same_pieces_wherever_all_voices_are_given() -> None:
    with gzip.open(JSON, "rt") as file:
        given = json.load(file)
    incomplete = sum(0 < len(step) < 4 for split in given.values() for piece in split for step in piece)
    total = sum(len(piece) for split in given.values() for piece in split)
    npz, from_json = load(f"jsb:{NPZ}"), load(f"jsb:{JSON}")
    different = 0
    for name, split in npz.splits.items():
        sung = {sorted_steps(piece): piece for piece in split}
        for piece in from_json.splits[name]:
            twin = sung[sorted_steps(piece)]
            different += int((piece.reshape(-1, 4) != twin.reshape(-1, 4)).any(1).sum())
    assert (incomplete, total) == (128, 92_536)
    assert different <= 28


def sorted_steps(piece: np.ndarray) -> bytes:
    return np.sort(piece.reshape(-1, 4), axis=1).tobytes()


@benchmark
def test_the_benchmark_can_be_trained_at_the_paper_s_length() -> None:
    from phasewise.data import batch

    drawn = batch(load(f"jsb:{NPZ}"), "train", step=0, context=2048, batch_size=4, seed=0)
    assert drawn.tokens.shape == (4, 2048)
    assert drawn.positions is not None


def test_files_that_hold_no_chorales_say_what_is_wrong(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load(f"jsb:{path}")

    refused(tmp_path / "absent.npz", "no file at .*; jsb:PATH takes Jsb16thSeparated.npz")
    for name in ("text.npz", "text.json", "text.json.gz"):
        (tmp_path / name).write_bytes(b"these are no chorales")
        refused(tmp_path / name, "does not hold chorales .*; give an .npz, .json or .json.gz")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    refused(tmp_path / "deep.json", "does not hold chorales .*nested too deeply")
    np.savez(tmp_path / "keys.npz", train=np.zeros((1, 3, 4)))
    refused(tmp_path / "keys.npz", "does not hold chorales .KeyError: .*valid")
    refused(write_json(tmp_path / "five.json", [[[60] * 5]]), "step 0 has 5 voices, not 4")
    refused(write_json(tmp_path / "flat.json", [[60, 61]]), "does not hold chorales .TypeError")
    refused(write_json(tmp_path / "huge.json", [[[10**9] * 4]]), "does not hold chorales .OverflowError")
    refused(write_json(tmp_path / "none.json", [[]]), r"must be \[steps, 4\], but is \(0, 4\)")
    refused(
        write_json(tmp_path / "high.json", [[[109, 60, 60, 60]]]),
        "go from 60 to 109, beyond a piano's 21 to 108; transpose them",
    )
    refused(
        write_json(tmp_path / "part.json", [], counts=(9, 76, 77)),
        "has .*'train': 9.* pieces, but the JSB benchmark has .*'train': 229.*; give the whole file",
    )


def test_music21_pieces_fall_on_the_grid_as_printed() -> None:
    pytest.importorskip("music21")
    (bwv66, bwv269) = parse_chorales(["bach/bwv66.6", "bach/bwv269"])
    assert bwv66.shape == (36 * 4, 4)
    assert bwv269.shape == (63 * 4, 4)
    first_two_beats = [[73, 64, 57, 57]] * 2 + [[71, 64, 59, 56]] * 2 + [[69, 66, 61, 54]] * 4
    assert bwv66[:8].tolist() == first_two_beats
    dotted = [67, 62, 59, 43]
    assert bwv269[:4].tolist() == [dotted] * 4
    assert bwv269[16:22, 0].tolist() == [71] * 6
    assert bwv269[22:24, 0].tolist() == [69] * 2


def test_a_piece_of_five_parts_is_left_out() -> None:
    pytest.importorskip("music21")
    assert parse_chorales(["bach/bwv1.6"]) == []


def test_chorales_without_music21_say_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ValueError, match=r"pip install phasewise\[music\]"):
        load("chorales", cache=tmp_path)


@pytest.fixture
def twenty_pieces(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    pytest.importorskip("music21")
    random = np.random.default_rng(0)
    pieces = [random.integers(40, 80, size=(length, 4)).astype(np.int16) for length in range(20, 40)]
    monkeypatch.setattr("phasewise.data.music.parse_chorales", lambda: pieces)
    return pieces


def test_parsed_chorales_are_read_from_the_cache_the_second_time(
    tmp_path: Path, twenty_pieces: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load("chorales", cache=tmp_path / "new" / "folder")
    monkeypatch.setattr("phasewise.data.music.parse_chorales", lambda: pytest.fail("parsed again"))
    again = load("chorales", cache=tmp_path / "new" / "folder")
    assert first.sha256 == again.sha256
    assert Counter(split for split in again.splits) == Counter(["train", "validation", "test"])
    assert sum(len(split) for split in again.splits.values()) == len(twenty_pieces)
    assert "not the JSB benchmark" in first.source


def test_an_interrupted_parse_or_write_leaves_nothing_behind(
    tmp_path: Path, twenty_pieces: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("phasewise.data.music.parse_chorales", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load("chorales", cache=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load("chorales", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert sum(len(split) for split in load("chorales", cache=tmp_path).splits.values()) == len(twenty_pieces)


@pytest.mark.usefixtures("twenty_pieces")
def test_a_damaged_cache_says_to_delete_it(tmp_path: Path) -> None:
    load("chorales", cache=tmp_path)
    (stored,) = tmp_path.iterdir()
    stored.write_bytes(stored.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"is damaged .*; delete it to parse the chorales again"):
        load("chorales", cache=tmp_path)


@pytest.mark.usefixtures("twenty_pieces")
def test_the_cache_is_in_the_user_s_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load("chorales")
    assert [path.suffix for path in (tmp_path / "xdg" / "phasewise").iterdir()] == [".npz"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load("chorales")
    assert [path.suffix for path in (tmp_path / "home" / ".cache" / "phasewise").iterdir()] == [".npz"]


def test_settings_of_one_tune_stay_in_one_split(
    tmp_path: Path, twenty_pieces: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_of_tunes = [piece + shift for piece in twenty_pieces for shift in (0, 3)]
    monkeypatch.setattr("phasewise.data.music.parse_chorales", lambda: settings_of_tunes)
    corpus = load("chorales", cache=tmp_path)
    tunes = [
        {np.diff(piece[::4].astype(int)).tobytes() for piece in split} for split in corpus.splits.values()
    ]
    assert sum(len(members) for members in tunes) == len(set.union(*tunes)) == 20
    assert [len(split) for split in corpus.splits.values()] == [24, 8, 8]


@pytest.mark.slow
def test_music21_holds_368_four_part_pieces(tmp_path: Path) -> None:
    pytest.importorskip("music21")
    corpus = load("chorales", cache=tmp_path)
    assert {name: len(split) for name, split in corpus.splits.items()} == {
        "train": 220,
        "validation": 74,
        "test": 74,
    }
    assert sum(int(split.lengths.sum()) for split in corpus.splits.values()) == 4 * 80_000
