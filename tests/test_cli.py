import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from phasewise import cli
from phasewise.cli import main
from phasewise.train.report import Comparison

MODEL = ["--width", "16", "--layers", "1", "--heads", "2", "--device", "cpu"]
BUDGET = ["--context", "16", "--batch-size", "2", "--steps", "4", "--warmup", "1"]
OPTIONS = [*MODEL, *BUDGET, "--evaluate-tokens", "300", "--encodings", "rope", "pope", "--scalings", "yarn"]

EXTEND = ["extend", "x", "--rule", "yarn", "--steps", "1"]


def run(capsys, *arguments):
    """Exit code, stdout and stderr of a command."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stopped:
        code = stopped.code
    return code, *capsys.readouterr()


def test_compare_prints_the_table_and_writes_the_run_folder(capsys, tmp_path):
    code, out, err = run(capsys, "compare", "--out", tmp_path / "run", *OPTIONS)
    assert code == 0
    for wanted in ("rope + yarn", "pope", "8x", "300 scored tokens", "loss, nats per byte", "figure.svg"):
        assert wanted in out
    assert "rope, seed 0" in err
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"report.json", "figure.svg", "figure.png"}


def test_json_is_the_one_thing_on_stdout(capsys, tmp_path):
    code, out, _ = run(capsys, "compare", "--out", tmp_path / "run", "--json", "--no-figure", *OPTIONS)
    assert code == 0
    document = json.loads(out)
    assert document == json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(Comparison.model_validate(document["values"]).rows) == 3


def test_several_seeds_are_shown_as_mean_and_one_by_one(capsys, tmp_path):
    options = ["--seeds", "3", "4", "--no-figure"]
    code, out, _ = run(capsys, "compare", "--out", tmp_path / "run", *OPTIONS, *options)
    assert code == 0
    assert out.count("seed 3") == out.count("seed 4") == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "--encodings", "fire"], "--encodings: unknown encoding 'fire'; choose from"),
        (["compare", "--scalings", "pi"], "--scalings: unknown scaling 'pi'; choose from linear, ntk, yarn"),
        (["compare", "--data", "austin"], "no corpus 'austin'; there are austen, chorales"),
        (["compare", "--data", "text:/nowhere"], "/nowhere"),
        (
            ["compare", "--learning-rate", "-1"],
            "--learning-rate: Input should be greater than 0, but is -1.0",
        ),
        (["compare", "--steps", "5"], "warmup 50 leaves nothing of steps 5: choose a smaller one"),
        (["compare", "--heads", "7"], "7 heads"),
        (["compare", "--device", "toaster"], "device 'toaster' cannot be used here"),
        (["compare", "--device", "meta"], "device 'meta' cannot be used here"),
        (["compare", "--seeds", "-1"], "--seeds: Input should be greater than or equal to 0, but is -1\n"),
        (["compare", "--layers", "1000000"], "--layers: Input should be less than or equal to 256"),
        (["compare", "--width", "2000000000"], "--width: Input should be less than or equal to 16384"),
        (["compare", "--threads", "100000000000"], "--threads: Input should be less than or equal to 1024"),
        (["compare", "--resume"], "holds no run to resume"),
        ([*EXTEND, "--length", "-5"], ": --length: Input should be greater than or equal to 2, but is -5\n"),
        ([*EXTEND, "--length"], "phasewise: --length: give at least 1\n"),
        (["evaluate", "--lengths", "64"], "give at least one checkpoint, as runs/mine"),
        (["profile", "austen", "austen"], "'austen' is given twice: give it once"),
        (
            ["profile", "austen", "--granularities", "words", "words"],
            "'words' is given twice: give it once",
        ),
        (["comprae"], "unknown command 'comprae'; choose from compare"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys, tmp_path, arguments, said):
    if arguments[0] in cli.COMMANDS:
        arguments = [*arguments, "--out", tmp_path / "run"]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("phasewise: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments", [["--out", "x", "--colour", "red"], [], ["--out", "x", "--steps", "many"]]
)
def test_option_that_does_not_parse_has_exit_code_2(capsys, arguments):
    code, out, err = run(capsys, "compare", *arguments)
    assert (code, out) == (2, "")
    assert err


def test_folder_with_a_run_is_refused_and_left_alone(capsys, tmp_path):
    (tmp_path / "recipe.json").write_text("{}")
    code, _, err = run(capsys, "compare", "--out", tmp_path, *OPTIONS)
    assert code == 2
    assert "already exists: choose another folder, or --resume" in err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]


def test_resume_with_another_option_is_refused_naming_it(capsys, tmp_path):
    arguments = ("compare", "--out", tmp_path / "run", "--no-figure")
    assert run(capsys, *arguments, *OPTIONS)[0] == 0
    code, _, err = run(capsys, *arguments, "--resume", "--steps", 5)
    assert code == 2
    assert "another steps (4, now 5)" in err
    assert run(capsys, *arguments, "--resume")[0] == 0


def test_help_lists_commands_and_options(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "compare" in out
    code, out, _ = run(capsys, "compare", "--help")
    assert code == 0
    for option in (
        "--encodings",
        "--data",
        "--context",
        "--evaluate-lengths",
        "--steps",
        "--seeds",
        "--out",
        "--json",
    ):
        assert option in out


@pytest.mark.parametrize(("encoding", "sign"), [("ascii", "\\u2265"), ("utf-8", "\u2265")])
def test_a_terminal_that_knows_no_such_sign_does_not_end_a_command(monkeypatch, encoding, sign):
    monkeypatch.setitem(cli.COMMANDS, "doctor", lambda _: print("\u2265 45", "\udcff") or 0)
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["doctor"]) == 0
    assert terminal.buffer.getvalue().decode(encoding) == f"{sign} 45 \\udcff\n"


def test_help_loads_neither_tyro_nor_rich_nor_matplotlib():
    code = "import sys; from phasewise.cli import main; main(['--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not any(f"'{name}'" in done.stdout for name in ("tyro", "rich", "matplotlib", "phasewise.train"))


def interrupt(arguments, awaited):
    """Start a command, press Ctrl-C once a file that matches `awaited` is there; its stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "phasewise", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(awaited.parent.glob(awaited.name)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out) == (130, ""), err
    return err


def test_ctrl_c_keeps_what_is_done_and_resume_ends_as_if_never_interrupted(capsys, tmp_path):
    options = [*OPTIONS, "--steps", "200", "--checkpoint-every", "1000", "--evaluate-tokens", "30000"]
    options += ["--encodings", "pope", "--no-figure", "--json"]
    out, folder = tmp_path / "parts", tmp_path / "parts" / "runs" / "pope-seed0"
    resume = ["compare", "--out", str(out), "--resume"]

    err = interrupt(["compare", "--out", str(out), *options], folder / "metrics.jsonl")
    assert "interrupted at pope, seed 0: step " in err
    assert f"phasewise {' '.join(resume)}" in err
    assert "interrupted at pope, seed 0: evaluating" in interrupt(resume, folder / "checkpoint-00000200*")

    _, parts, _ = run(capsys, *resume, "--no-figure", "--json")
    _, whole, _ = run(capsys, "compare", "--out", tmp_path / "whole", *options)
    assert losses(parts) == losses(whole)


def losses(text):
    rows = Comparison.model_validate(json.loads(text)["values"]).rows
    return [(row.name, run.train_loss, run.measurements) for row in rows for run in row.runs]


def test_full_disk_is_one_line_with_the_way_on_and_exit_code_1(capsys, tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    code, out, err = run(capsys, "compare", "--out", tmp_path / "run", *OPTIONS, "--no-figure")
    assert (code, out) == (1, "")
    said = err.splitlines()[-1]
    assert said.startswith(f"phasewise: {tmp_path / 'run'} cannot be written to (")
    assert "No space left" in said
    assert said.endswith(f"go on with: phasewise compare --out {tmp_path / 'run'} --resume")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left", "f.json"),
            1,
            "cannot write f.json (No space left): make room",
        ),
        (OSError(errno.EFBIG, "File too large"), 1, "cannot write (File too large): make room"),
        (OSError(errno.EACCES, "Permission denied", "f.json"), 2, "cannot read or write f.json (Permission"),
    ],
)
def test_no_room_is_a_run_that_failed_and_other_trouble_with_files_is_bad_input(
    capsys, monkeypatch, error, code, said
):
    def failing(_arguments):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "bench", failing)
    ended, _, err = run(capsys, "bench")
    assert (ended, err.count("\n")) == (code, 1)
    assert said in err


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"]])
def test_reader_that_goes_away_is_no_traceback(arguments):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "phasewise", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_names_and_numbers_are_whole_in_a_narrow_terminal(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = run(capsys, "compare", "--out", tmp_path / "run", *OPTIONS, "--no-figure")
    assert code == 0
    (line,) = (line for line in out.splitlines() if "rope + yarn" in line)
    assert len(re.findall(r"\d\.\d{3}", line)) == 4


@pytest.mark.parametrize("folder", ["a[red]b", "a["])
def test_brackets_in_names_are_printed_as_they_are(capsys, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / folder / "red]c"
    texts.mkdir(parents=True)
    (texts / "text.txt").write_text("What dilates with the window is a power law. " * 99)
    data = f"text:{folder}/red]c"
    code, out, _ = run(capsys, "compare", "--data", data, "--out", f"{folder}/run", *OPTIONS, "--no-figure")
    assert (code, data in out) == (0, True)
    model = f"{folder}/run/runs/rope-seed0"
    lengths = ["--lengths", "16", "--tokens", "99", "--out", f"{folder}/evaluated", "--no-figure"]
    code, out, err = run(capsys, "evaluate", model, "--data", data, *lengths)
    assert (code, data in out.replace("\n", ""), data in err) == (0, True, True)
    code, out, _ = run(capsys, "inspect", model, "--data", data, "--tokens", "99")
    assert (code, data in out) == (0, True)
    code, out, _ = run(
        capsys, "profile", data, "--longest", "9", "--granularities", "bytes", "--out", f"{folder}/p"
    )
    assert (code, "text:red]c" in out) == (0, True)
