"""Folders are held by one process at a time, and nothing else of the library asks for a system with locks."""

import subprocess
import sys

import pytest

from phasewise.lock import hold
from phasewise.train.folder import begin
from phasewise.train.recipe import RunRecipe

POSIX = ("fcntl", "resource", "pwd", "grp", "termios")
HIDE = f"import sys; sys.modules.update(dict.fromkeys({POSIX}));"


def test_file_that_another_holds_is_refused_in_the_words_given(tmp_path):
    with (tmp_path / "x").open("w") as first, (tmp_path / "x").open() as second:
        hold(first.fileno(), "wait for it")
        with pytest.raises(ValueError, match="wait for it"):
            hold(second.fileno(), "wait for it")
    with (tmp_path / "x").open() as third:
        hold(third.fileno(), "wait for it")


def test_system_without_locks_is_named_and_leaves_no_recipe_behind(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with (
        pytest.raises(ValueError, match="POSIX locks, which this system lacks"),
        begin(tmp_path / "run", RunRecipe()),
    ):
        pass
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_import_needs_no_module_of_posix_alone():
    """torch is imported first: what it asks of the system is its own."""
    modules = "phasewise, phasewise.cli, phasewise.train.run, phasewise.data"
    code = f"import torch, tyro, rich, accelerate; {HIDE} import {modules}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
