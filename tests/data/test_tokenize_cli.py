"""phasewise tokenize: shards, a table or JSON, one line for what is wrong, and work that goes on after Ctrl-C."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phasewise.cli import main
from phasewise.data import load


@pytest.fixture
def books(tmp_path: Path) -> Path:
    path = tmp_path / "books.txt"
    path.write_text("\f".join(f"Book {number}. {'It was a truth. ' * (number % 9)}" for number in range(200)))
    return path


def test_the_table_says_what_was_made_and_how_to_use_it(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [
        "tokenize",
        f"text:{books}",
        "--out",
        str(out),
        "--separator",
        "\f",
        "--tokenizer",
        "bpe:300",
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    corpus = load(f"shards:{out}")
    assert f"give --data shards:{out}" in shown
    for split, documents in corpus.splits.items():
        assert f"{len(documents):,}" in shown
        assert split in shown
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["documents"] == len(corpus.split("train"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["csv:x"], "'csv:x' cannot be tokenised; give text:PATH"),
        (["text:missing.txt"], "no file or folder at missing.txt; text:PATH takes an existing one"),
        (["text:{books}", "--tokenizer", "bpe:3"], "bpe:3 is no vocabulary size"),
        (["text:{books}", "--tokenizer", "bpe:999999999"], "bpe:999999999 is no vocabulary size; give from"),
        (
            ["text:{books}", "--learn-from", "9"],
            "tokenizer 'bytes' is not trained: leave learn_from (--learn-from) out",
        ),
        (["text:{books}", "--held-out", "0.5"], "--held-out: Input should be less than 0.5, but is 0.5"),
        (
            ["text:{books}"],
            "larger --held-out than 0.05, or with a --separator that divides files, or lay them in",
        ),
        (["text:{books}", "--out", "{books}"], "books.txt is a file: choose a folder"),
        (["text:{books}", "--shard-tokens", "0"], "shard_tokens must be at least 1, but is 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [each.format(books=books) for each in arguments]
    assert main(["tokenize", "--out", str(tmp_path / "out"), *given]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert said in line


def test_a_full_disk_is_one_line_that_says_the_work_can_go_on(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tokenize", f"text:{books}", "--separator", "\f", "--out", str(tmp_path / "out")]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "train-00000.bin (File too large): what was saved is kept" in line
    assert "the same command goes on" in line
    assert main(command) == 0


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done_and_the_same_command_goes_on(
    tmp_path: Path, told: signal.Signals
) -> None:
    path = tmp_path / "books.txt"
    path.write_text(
        "\f".join(f"{number} It was a truth universally acknowledged. " * 9 for number in range(12_000))
    )
    command = [sys.executable, "-m", "phasewise", "tokenize", f"text:{path}", "--separator", "\f"]
    command += ["--tokenizer", "gpt2", "--out"]
    with subprocess.Popen([*command, str(tmp_path / "cut")], stderr=subprocess.PIPE, text=True) as running:
        until = time.monotonic() + 60
        shard = tmp_path / "cut" / "train-00000.bin"
        while not (shard.exists() and shard.stat().st_size) and time.monotonic() < until:
            time.sleep(0.01)
        running.send_signal(told)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted after document" in said
    assert "the same command goes on from there" in said
    for name in ("cut", "whole"):
        subprocess.run([*command, str(tmp_path / name)], check=True, capture_output=True)
    for first in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "cut" / first.name).read_bytes() == first.read_bytes()
