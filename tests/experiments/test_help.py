"""Every experiment says what it is and what it takes, and does nothing else when asked."""

import runpy
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"
RUN = sorted(path.stem for path in EXPERIMENTS.glob("*.py") if "__main__" in path.read_text())


def run(name):
    try:
        runpy.run_module(f"experiments.{name}", run_name="__main__")
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed")


@pytest.mark.filterwarnings("ignore:'experiments:RuntimeWarning")  # runpy's, of modules that tests imported
@pytest.mark.parametrize("name", RUN)
def test_help_is_the_description_and_ends_there(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        run(name)
    assert end.value.code == 0
    assert f"{name} [-h]" in capsys.readouterr().out
