"""Of several processes the first says what all would say; what one alone knows is said by that one, by its rank."""

import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from phasewise.cli import together
from phasewise.cli.terminal import leave
from phasewise.cli.together import speaker


@pytest.fixture
def of_two(monkeypatch):
    """Be one of two processes beside a launcher's store; the function changes which."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    monkeypatch.setattr(together, "PATIENCE", timedelta(seconds=0.2))
    for name, value in {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    yield lambda rank: monkeypatch.setenv("RANK", str(rank))
    del store


def test_process_alone_speaks_for_itself():
    assert speaker("no such corpus") == "phasewise"


def test_common_error_is_said_by_the_first_and_another_by_who_has_it(of_two, capsys):
    of_two(1)
    assert speaker("cuda:1 is out of memory") == "phasewise, process 1"
    of_two(0)
    assert leave("no such corpus", 2) == 2
    of_two(1)
    assert leave("no such corpus", 2) == 2
    assert leave("cuda:1 is out of memory", 2) == 2
    assert capsys.readouterr().err == (
        "phasewise: no such corpus\nphasewise, process 1: cuda:1 is out of memory\n"
    )


def test_launcher_without_a_store_hides_nothing(of_two, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    of_two(1)
    assert speaker("no such corpus") == "phasewise, process 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [(["--data", "austin"], "phasewise: no corpus"), (["--colour", "red"], "Unrecognized options: --colour")],
)
def test_two_processes_of_torchrun_say_what_is_wrong_once(tmp_path, options, said):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        *launcher,
        "-m",
        "phasewise",
        "train",
        "--out",
        str(tmp_path / "run"),
        "--device",
        "cpu",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.count(said) == 1, done.stderr
    assert "phasewise, process" not in done.stderr
