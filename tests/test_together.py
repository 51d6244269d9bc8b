"""Of several processes the first says what all would say; what one alone knows is said by that one, by its rank."""

import os
import socket
import subprocess
import sys
import time
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


def test_process_whose_rank_is_no_number_can_still_say_so(monkeypatch):
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert speaker("RANK is 'x'") == "phasewise"


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


def started(rank, size, port, *arguments):
    """A process that trains, in the environment that torchrun gives."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    command = [sys.executable, "-m", "phasewise", "train", "--device", "cpu", *map(str, arguments)]
    environment = os.environ | {name: str(value) for name, value in environment.items()}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
def test_process_whose_companion_dies_ends_with_one_line_and_the_way_on(tmp_path):
    out = tmp_path / "a run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = ["--width", 16, "--layers", 1, "--heads", 2, "--context", 16, "--batch-size", 2, "--warmup", 1]
    left, killed = (
        started(rank, 2, port, "--out", out, "--steps", 10**6, "--checkpoint-every", 5, *small)
        for rank in (0, 1)
    )
    try:
        until = time.monotonic() + 120
        while not any(out.glob("checkpoint-0*")) and time.monotonic() < until:
            time.sleep(0.05)
        killed.kill()
        _, err = left.communicate(timeout=60)
    finally:
        for process in (left, killed):
            process.kill()
            process.communicate()
    assert left.returncode == 1, err
    assert "Traceback" not in err
    said = err.splitlines()[-1]
    assert said.startswith("phasewise: another process has ended before its work was done")
    assert said.endswith(f"go on with: phasewise train --out '{out}' --resume")


@pytest.mark.slow
def test_processes_that_cannot_meet_name_the_address_and_the_remedy(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        alone = started(0, 1, port, "--out", tmp_path / "run")
        _, err = alone.communicate(timeout=120)
    assert alone.returncode == 2
    assert "Traceback" not in err
    assert f"phasewise: the processes cannot meet at 127.0.0.1:{port} (" in err
    assert not (tmp_path / "run").exists()
