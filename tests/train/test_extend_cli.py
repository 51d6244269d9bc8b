"""phasewise extend, from the command line to the run folder."""

import json

import pytest

from phasewise.cli import main
from phasewise.model.folder import load
from phasewise.train import extend as module
from phasewise.train.kept import keep
from phasewise.train.loop import train
from tests.hf.tiny import tiny

from .small import CPU, corpus, recipe

FAST = ("--warmup", "0", "--evaluate-tokens", "200", "--no-figure", "--device", "cpu")


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load", lambda _name, *, tokenizer: corpus())
    first = recipe()
    keep(
        train(first, corpus(), tmp_path / "first", device=CPU).model,
        tmp_path / "first" / "model",
        first,
        corpus(),
    )
    return str(tmp_path / "first")


def test_a_command_extends_and_a_second_one_reads_the_finished_run(checkpoint, tmp_path, capsys):
    out = str(tmp_path / "out")
    request = [checkpoint, "--length", "24", "48", "--steps", "2", "2", "--rule", "abf:500", "--out", out]
    assert main(["extend", *request, *FAST]) == 0
    shown = capsys.readouterr().out
    assert "abf, 4 steps" in shown
    assert load(tmp_path / "out" / "model").config.encoding.frequencies.base == 500
    assert main(["extend", "--out", out, "--resume", "--json", "--no-figure"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["recipe"]["rule"] == {"kind": "abf", "base": 500.0}


def test_a_hugging_face_folder_is_rewritten_and_said_not_to_be_trained(tmp_path, capsys):
    tiny("llama").save_pretrained(tmp_path / "llama")
    request = [str(tmp_path / "llama"), "--length", "1024", "--steps", "0", "--rule", "pi"]
    assert main(["extend", *request, "--out", str(tmp_path / "out"), *FAST]) == 0
    assert "nothing was trained or measured" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 1024


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--length", "6", "--steps", "0", "--rule", "pi"], "length 6 is not above 12"),
        (
            ["--length", "48", "--steps", "0", "--rule", "pii"],
            "--rule: unknown kind 'pii'; choose from 'none'",
        ),
        (["--length", "48", "--steps", "0", "--rule", "grid:no.json"], "no file no.json"),
        (["--length", "48", "--steps", "0", "--rule", "none"], "0 steps change rates alone"),
        (
            ["--length", "4800", "--steps", "2", "--rule", "pi"],
            "a context of 4800 needs a document of 4801 tokens",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(checkpoint, tmp_path, capsys, arguments, said):
    assert main(["extend", checkpoint, *arguments, "--out", str(tmp_path / "out"), *FAST]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_resuming_nothing_is_refused(tmp_path, capsys):
    assert main(["extend", "--out", str(tmp_path), "--resume"]) == 2
    assert "holds no run to resume" in capsys.readouterr().err
