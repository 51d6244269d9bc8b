import json
import shutil
import subprocess
from pathlib import Path

import pytest

from phasewise import record as module
from phasewise.record import commit, ready, record


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "__init__.py").write_text("first")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_what_is_written_is_what_is_returned_and_says_where_it_came_from(tmp_path):
    path = tmp_path / "table" / "row.json"
    written = record(path, recipe={"seeds": [0, 1]}, values={"loss": 1.25})
    assert json.loads(path.read_text()) == written
    assert set(written) == {"values", "recipe", "commit", "dirty", "device", "versions", "date"}
    assert {"python", "torch"} <= set(written["versions"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_a_value_json_cannot_say_is_refused_and_the_old_file_stays(tmp_path, value):
    path = tmp_path / "row.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="finite JSON"):
        record(path, recipe={}, values={"loss": value})
    assert path.read_text() == "old"


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "row.json"
    path.write_text("old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record(path, recipe={}, values={})
    assert [file.name for file in tmp_path.iterdir()] == ["row.json"]
    assert path.read_text() == "old"


def test_a_place_that_takes_no_record_is_known_before_the_work(tmp_path):
    ready(tmp_path / "new" / "found.json")
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(IsADirectoryError):
        ready(tmp_path)
    with pytest.raises(OSError, match="not-there"):
        ready(Path("/proc/not-there/found.json"))


def test_a_clean_checkout_gives_its_commit_and_an_edit_makes_it_dirty(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert commit(checkout) == {"commit": head, "dirty": False}
    (checkout / "__init__.py").write_text("second")
    assert commit(checkout) == {"commit": head, "dirty": True}


def test_outside_a_checkout_the_commit_is_unknown(tmp_path):
    assert commit(tmp_path) == {"commit": "unknown", "dirty": None}


def test_a_copy_lying_untracked_inside_another_checkout_is_not_that_commit(checkout):
    installed = checkout / "environment"
    installed.mkdir()
    shutil.copy(checkout / "__init__.py", installed)
    assert commit(installed) == {"commit": "unknown", "dirty": None}
