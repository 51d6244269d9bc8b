"""A model of tokens that a tokenizer made takes the tokenizer with it, so later commands need not be told."""

import json

import numpy as np
import pytest

from phasewise.cli import main
from phasewise.data import load, require_tokenizer_of

EVAL = "RULER's tasks need lm-eval: pip install 'phasewise[eval]'"
SENTENCE = "the sea was calm and grey under long low clouds ; nobody spoke ! a gull cried once -"
WORDS = SENTENCE.split()
SIZES = ["--width", "16", "--layers", "1", "--heads", "2", "--device", "cpu"]
BUDGET = ["--context", "32", "--batch-size", "2", "--steps", "4", "--warmup", "1"]


def phasewise(*arguments):
    return main([str(each) for each in arguments])


def values(folder):
    return json.loads((folder / "report.json").read_text())["values"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two texts, and a model trained on shards of one: 300 tokens of its own, in a vocabulary padded to 384."""
    folder = tmp_path_factory.mktemp("tokens")
    random = np.random.default_rng(0)
    for name in ("one", "other"):
        (folder / name).mkdir()
        for split in ("train", "validation", "test"):
            (folder / name / f"{split}.txt").write_text(" ".join(random.choice(WORDS, 4000)))
    bpe = "bpe:300"
    assert (
        phasewise("tokenize", f"text:{folder / 'one'}", "--out", folder / "shards", "--tokenizer", bpe) == 0
    )
    data = f"shards:{folder / 'shards'}"
    padded = ["--vocabulary-multiple", "128"]
    assert phasewise("train", "--data", data, "--out", folder / "run", *SIZES, *BUDGET, *padded) == 0
    return folder


def test_text_is_evaluated_in_the_tokens_that_a_model_was_trained_on(place, tmp_path):
    text = f"text:{place / 'other' / 'test.txt'}"
    options = ["--lengths", "64", "--tokens", "500", "--device", "cpu", "--no-figure"]
    for number, data in enumerate((text, f"shards:{place / 'shards'}")):
        out = tmp_path / str(number)
        assert phasewise("evaluate", place / "run", "--data", data, *options, "--out", out) == 0
        (row,) = values(out)["rows"]
        (loss,) = row["losses"]
        (bits,), (measured,) = loss["bits_per_byte"], loss["measurements"]
        assert (loss["corpus"]["unit"], loss["corpus"]["vocab_size"]) == ("token", 300)
        # A token is several bytes, where bytes alone would give equal numbers.
        assert bits < 0.7 * measured["bits"]
        assert row["checkpoint"]["tokenizer"] == str(place / "run" / "model" / "tokenizer.json")
        assert row["checkpoint"]["vocab_size"] == 384


def test_extending_needs_no_tokenizer_and_hands_it_on(place, tmp_path):
    text = f"text:{place / 'other'}"
    options = ["--length", "64", "--rule", "yarn", "--data", text, "--evaluate-tokens", "200", "--no-figure"]
    options += ["--device", "cpu"]
    for steps in ("0", "2"):
        out = tmp_path / steps
        short = ["--warmup", "1"]
        assert phasewise("extend", place / "run", "--steps", steps, *short, *options, "--out", out) == 0
        own = (place / "run" / "model" / "tokenizer.json").read_text()
        assert (out / "model" / "tokenizer.json").read_text() == own
    vocab_size = load(f"shards:{place / 'shards'}").vocab_size
    assert values(tmp_path / "2")["corpus"]["vocab_size"] == vocab_size == 300


@pytest.mark.parametrize("damaged", [b"", b"[]", b"{}", b'{"model": 7}', b"\xff", b"[" * 100_000])
def test_a_damaged_tokenizer_beside_a_checkpoint_is_named(place, tmp_path, damaged):
    (tmp_path / "tokenizer.json").write_bytes(damaged)
    corpus = load(f"shards:{place / 'shards'}")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a tokenizer\.json: copy it again, or remove it"
    ):
        require_tokenizer_of(tmp_path, corpus)


@pytest.mark.parametrize("tokenizer", ["bpe:300", "bytes"])
def test_shards_of_another_tokenizer_are_refused_by_every_command(place, tmp_path, capsys, tokenizer):
    shards = tmp_path / "shards"
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "validation", "test"):
        (text / f"{name}.txt").write_text("quite other words make other pairs " * 400)
    assert phasewise("tokenize", f"text:{text}", "--out", shards, "--tokenizer", tokenizer) == 0
    capsys.readouterr()
    data = ["--data", f"shards:{shards}"]
    evaluating = ["--lengths", "64", "--tokens", "500", "--no-figure", "--out", tmp_path / "out"]
    extending = [
        "--length",
        "64",
        "--steps",
        "2",
        "--warmup",
        "1",
        "--rule",
        "yarn",
        "--out",
        tmp_path / "out",
    ]
    for command, options in (
        ("evaluate", evaluating),
        ("extend", extending),
        ("advise", ["--length", "64"]),
        ("inspect", []),
    ):
        assert phasewise(command, place / "run", *data, *options, "--device", "cpu") == 2, command
        assert "was made by another tokenizer than" in capsys.readouterr().err, command


@pytest.mark.slow
def test_ruler_is_made_and_answered_without_a_network(place, tmp_path, monkeypatch):
    nltk = pytest.importorskip("nltk", reason=EVAL)
    for package in ("lm_eval", "wonderwords"):
        pytest.importorskip(package, reason=EVAL)
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    data = ["--data", f"shards:{place / 'shards'}", "--lengths", "1024", "--tokens", "1024"]
    options = ["--tasks", "niah_single_1", "--task-limit", "2", "--device", "cpu", "--no-figure"]
    assert phasewise("evaluate", place / "run", *data, *options, "--out", tmp_path / "out") == 0
    ((task,),) = [row["tasks"] for row in values(tmp_path / "out")["rows"]]
    assert task["examples"] == 2
    assert set(task["metrics"]) == {"1024"}
