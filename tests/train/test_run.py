import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from phasewise.cli import main
from phasewise.model.folder import load
from phasewise.train import trackers
from phasewise.train.checkpoint import saved
from phasewise.train.recipe import RunRecipe
from phasewise.train.run import RECIPES, Report, read_recipe
from phasewise.train.sizes import SIZES

MODEL = ["--width", "16", "--layers", "1", "--heads", "2", "--encoding", "pope", "--device", "cpu"]
BUDGET = ["--context", "16", "--batch-size", "2", "--steps", "6", "--warmup", "1"]
OPTIONS = [*MODEL, *BUDGET, "--evaluate-every", "3", "--evaluate-tokens", "200"]


def train(capsys, *arguments):
    """Exit code, stdout and stderr of the command."""
    try:
        code = main(["train", *map(str, arguments)])
    except SystemExit as stopped:
        code = stopped.code
    return code, *capsys.readouterr()


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_train_writes_a_model_and_says_what_it_came_to(capsys, tmp_path):
    out = tmp_path / "run"
    code, said, err = train(capsys, "--out", out, *OPTIONS)
    assert code == 0, err
    lines, result = metrics(out), Report.model_validate_json((out / "report.json").read_bytes()).values
    assert [("validation_loss" in line) for line in lines] == [False, False, True] * 2
    assert result.validation_loss == lines[5]["validation_loss"]
    assert result.best_validation_loss == min(lines[2]["validation_loss"], lines[5]["validation_loss"])
    assert result.tokens == 6 * 2 * 16
    assert result.tokens_per_second == pytest.approx(result.tokens / result.seconds)
    model = load(out / "model")
    assert model.parameter_count == result.parameters
    assert model.config.encodings[0].kind == "pope"
    for wanted in (f"{result.parameters:,} parameters", f"loss {result.loss:.4f}", "tokens/s", "report.json"):
        assert wanted in said


def test_json_is_the_one_thing_on_stdout_and_a_finished_run_is_read_back(capsys, tmp_path):
    out = tmp_path / "run"
    _, first, _ = train(capsys, "--out", out, *OPTIONS, "--json")
    code, again, _ = train(capsys, "--out", out, "--resume", "--json")
    assert code == 0
    assert json.loads(first) == json.loads(again) == json.loads((out / "report.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "7B"], "--size: unknown size '7B'; choose from 10M, 25M"),
        (["--encoding", "fire"], "--encoding: unknown kind 'fire'; choose from 'nope'"),
        (["--encoding", '{"kind": "pope", "alpha": 1}'], "--encoding: pope.alpha: Extra inputs"),
        (["--schedule", "line"], "--schedule: unknown kind 'line'; choose from 'cosine'"),
        (["--heads", "7"], "width 384 does not divide into 7 heads"),
        (["--accumulate", "3"], "batch_size 16 does not divide into 1 processes x accumulate 3: choose"),
        (["--recipe", "nowhere"], "no recipe 'nowhere': give a file, whose name ends in .json, or one of"),
        (["--context", "1000000"], "a context of 1000000 needs a document of 1000001 tokens"),
        (["--tracker", "ledger"], "unknown tracker 'ledger'; choose from tensorboard, wandb, trackio"),
        (["--resume"], "holds no run to resume"),
        (["--resume", "--recipe", "austen-10m"], "has its recipe already: leave out --recipe"),
        (["--device", "toaster"], "device 'toaster' cannot be used here"),
        (["--warmup", "450"], "warmup 450 leaves nothing of steps 450"),
    ],
)
def test_bad_input_is_one_line_with_a_remedy_and_exit_code_2(capsys, tmp_path, arguments, said):
    code, out, err = train(capsys, "--out", tmp_path / "run", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_recipe_file_with_an_unknown_field_is_told_which_there_are(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"size": "10M", "learning_rat": 1e-4}')
    code, _, err = train(capsys, "--out", tmp_path / "run", "--recipe", path)
    assert code == 2
    assert "has unknown fields learning_rat; there are accumulate, " in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Invalid JSON: EOF"),
        ("[1]", "Input should be an object"),
        ('{"steps": -3}', "steps: Input should be greater than or equal to 1"),
        ('{"warmup": 450}', "warmup 450 leaves nothing of steps 450"),
    ],
)
def test_file_that_is_no_recipe_is_named(tmp_path, content, said):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path} is not a recipe: {said}"):
        read_recipe(str(path))


def test_damaged_report_is_named_and_deleting_it_has_it_made_again(capsys, tmp_path):
    out = tmp_path / "run"
    train(capsys, "--out", out, *OPTIONS)
    values = Report.model_validate_json((out / "report.json").read_bytes())
    (out / "report.json").write_text("{}")
    code, _, err = train(capsys, "--out", out, "--resume")
    assert code == 2
    assert (
        "report.json is not a report of train (values: Field required): delete it to have it made again"
        in err
    )
    (out / "report.json").unlink()
    assert train(capsys, "--out", out, "--resume")[0] == 0
    assert Report.model_validate_json((out / "report.json").read_bytes()) == values


def test_recipe_is_overridden_by_options_and_saved_whole(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"dropout": 0.1, "steps": 100, "encoding": {"kind": "tapa", "alpha": 0.2}}))
    options = [*MODEL[:6], *BUDGET, "--schedule", "wsd", "--device", "cpu"]
    assert train(capsys, "--out", tmp_path / "run", "--recipe", path, *options)[0] == 0
    begun = json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe"]
    assert (begun["dropout"], begun["steps"], begun["encoding"]["alpha"]) == (0.1, 6, 0.2)
    assert begun["schedule"] == {"kind": "wsd", "decay": 0.2}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.json")))
def test_every_recipe_of_the_package_can_be_read_by_its_name(name):
    assert read_recipe(name) == RunRecipe.model_validate_json((RECIPES / f"{name}.json").read_text())


def test_sizes_have_the_parameters_of_their_names():
    for name, shape in SIZES.items():
        number, unit = float(name[:-1]), {"M": 1e6, "B": 1e9}[name[-1]]
        layers = 12 * shape.layers * shape.width**2
        total = layers + (50_257 * shape.width if shape.tied else 0)
        assert total == pytest.approx(number * unit, rel=0.07), name


def test_a_field_that_the_size_sets_is_changed_alone():
    plain, changed = (RunRecipe(**given).training(vocab_size=50257).model for given in ({}, {"layers": 2}))
    assert changed == plain.model_copy(update={"layers": 2})
    with pytest.raises(ValidationError, match="6 heads do not divide among 4 kv_heads"):
        RunRecipe(kv_heads=4)


def test_resume_with_another_field_is_refused_but_placement_may_change(capsys, tmp_path):
    out = tmp_path / "run"
    assert train(capsys, "--out", out, *OPTIONS)[0] == 0
    (out / "report.json").unlink()
    code, _, err = train(capsys, "--out", out, "--resume", "--learning-rate", "1e-3")
    assert code == 2
    assert "another learning_rate (0.005, now 0.001): resume it as begun" in err
    assert train(capsys, "--out", out, "--resume", "--accumulate", "2", "--device", "cpu")[0] == 0


def test_folder_with_something_else_is_refused_and_left_alone(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    code, _, err = train(capsys, "--out", tmp_path, *OPTIONS)
    assert code == 2
    assert "already exists: choose another folder" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_corpus_that_changed_since_the_run_began_is_named(capsys, tmp_path):
    text, out = tmp_path / "mine.txt", tmp_path / "run"
    text.write_text("what is old " * 200)
    options = [*MODEL, *BUDGET, "--data", f"text:{text}"]
    assert train(capsys, "--out", out, *options)[0] == 0
    (out / "report.json").unlink()
    text.write_text("what is new " * 200)
    code, _, err = train(capsys, "--out", out, "--resume")
    assert code == 2
    assert f"has changed since {out} was begun: choose another folder, or the data as it was" in err


def test_checkpoint_with_a_damaged_file_is_named_and_the_one_before_goes_on(capsys, tmp_path):
    out, whole = tmp_path / "run", tmp_path / "whole"
    options = [*OPTIONS, "--checkpoint-every", "2"]
    assert train(capsys, "--out", out, *options)[0] == train(capsys, "--out", whole, *options)[0] == 0
    (out / "report.json").unlink()
    before, last = saved(out)
    (part,) = last.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    code, _, err = train(capsys, "--out", out, "--resume")
    assert code == 2
    assert (
        f"{last} is damaged ({part.name} is not what was written): delete it to go on from {before.name}"
        in err
    )
    shutil.rmtree(last)
    assert train(capsys, "--out", out, "--resume")[0] == 0
    assert metrics(out) == metrics(whole)


def test_missing_tracker_package_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None if name == "wandb" else object())
    code, _, err = train(capsys, "--out", tmp_path / "run", *OPTIONS, "--tracker", "wandb")
    assert code == 2
    assert "the tracker wandb needs wandb: pip install wandb" in err
    assert not (tmp_path / "run").exists()


def test_trackers_are_told_settings_and_steps_and_finished(capsys, tmp_path, monkeypatch):
    told = []

    class Tracker:
        def store_init_configuration(self, values):
            told.append(("settings", values))

        def log(self, values, step):
            told.append((step, values))

        def finish(self):
            told.append(("finish", None))

    monkeypatch.setattr(trackers, "require_trackers", lambda names: None)
    monkeypatch.setattr("phasewise.train.run.require_trackers", lambda names: None)
    monkeypatch.setattr(trackers, "_start", lambda name, out: Tracker())
    assert train(capsys, "--out", tmp_path / "run", *OPTIONS, "--tracker", "trackio")[0] == 0
    assert [what for what, _ in told] == ["settings", 1, 2, 3, 4, 5, 6, "finish"]
    assert told[0][1]["model.encoding.kind"] == "pope"
    assert {"loss", "learning_rate", "gradient_norm", "tokens_per_second"} <= set(told[3][1])
    assert all(math.isfinite(value) for values in (told[3][1],) for value in values.values())


def start(out, *options):
    command = [sys.executable, "-m", "phasewise", "train", "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(process, ready):
    while not ready():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


LONG = [*MODEL, *BUDGET[:4], "--steps", "300", "--warmup", "10", "--checkpoint-every", "1000"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 0, "terminated"), (signal.SIGINT, 130, "inter")]
)
def test_signal_keeps_the_step_and_resume_ends_as_if_it_never_came(capsys, tmp_path, number, code, word):
    out, whole = tmp_path / "parts", tmp_path / "whole"
    process = start(out, *LONG)
    until(process, lambda: (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size > 500)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == code, err
    assert f"{word}" in err
    assert f"phasewise train --out {out} --resume" in err
    assert len(saved(out)) == 1
    assert train(capsys, "--out", out, "--resume")[0] == train(capsys, "--out", whole, *LONG)[0] == 0
    assert metrics(out) == metrics(whole)


@pytest.mark.slow
def test_process_killed_in_the_middle_of_a_checkpoint_goes_on_from_the_one_before(capsys, tmp_path):
    out, whole = tmp_path / "parts", tmp_path / "whole"
    options = [*LONG, "--steps", "60", "--checkpoint-every", "20"]
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        "from phasewise.train import checkpoint\n"
        "count, written = iter(range(1, 100)), checkpoint.file_sha256\n"
        "def sha256(path):\n"
        "    if 'partial' in str(path) and next(count) == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return written(path)\n"
        "checkpoint.file_sha256 = sha256\n"
        "from phasewise.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, str(script), "train", "--out", str(out), *options]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    assert [path.name[:19] for path in saved(out)] == ["checkpoint-00000020"]
    assert (out / "checkpoint.partial").exists()
    assert train(capsys, "--out", out, "--resume")[0] == train(capsys, "--out", whole, *options)[0] == 0
    assert metrics(out) == metrics(whole)
    assert not (out / "checkpoint.partial").exists()


def test_full_disk_is_one_line_with_the_way_on_and_exit_code_1(capsys, tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        code, out, err = train(capsys, "--out", tmp_path / "run", *OPTIONS)
    assert (code, out) == (1, "")
    assert "cannot be written to (" in err
    assert "No space left" in err
    assert err.endswith(f"go on with: phasewise train --out {tmp_path / 'run'} --resume\n")
    assert train(capsys, "--out", tmp_path / "run", "--resume")[0] == 0


def test_disk_that_is_full_at_the_start_leaves_no_run(capsys, tmp_path, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", no_space)
        code, _, err = train(capsys, "--out", tmp_path / "run", *OPTIONS)
    assert code == 2
    assert "cannot be written (No space left on device): choose another --out" in err
    assert train(capsys, "--out", tmp_path / "run", *OPTIONS)[0] == 0


def test_validation_that_cannot_be_measured_is_refused_before_anything_is_written(capsys, tmp_path):
    options = [*MODEL, *BUDGET, "--evaluate-every", "3", "--evaluate-tokens", "3"]
    code, _, err = train(capsys, "--out", tmp_path / "run", *options)
    assert code == 2
    assert "the longest one in the validation split of austen (within any limit_tokens) has 4" in err
    assert not (tmp_path / "run").exists()
