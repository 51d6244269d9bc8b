"""A process whose companions do not come says so, and can be ended."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from accelerate import PartialState

from phasewise.train.processes import join

ALONE = """
from phasewise.train import meeting
from phasewise.train.processes import join
meeting.QUIET = 0.5
join("cpu")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_process_that_waits_for_others_says_where_and_ctrl_c_ends_it(rank):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    waiting = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", ALONE],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stderr is not None
    said = waiting.stderr.readline()
    assert said == f"process {rank} of 2 waits at 127.0.0.1:{port} for the others; Ctrl-C ends it\n"
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(timeout=10) == -signal.SIGINT
    waiting.stderr.close()


@pytest.fixture
def launched(monkeypatch):
    """Set what a launcher would, None to take it away."""

    def launch(**changes):
        given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        given |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        for name, value in {**given, "MASTER_PORT": "29500", **changes}.items():
            monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)

    yield launch
    PartialState._reset_state()


@pytest.mark.parametrize(
    "changes", [{"MASTER_PORT": "99999"}, {"MASTER_PORT": "a port"}, {"MASTER_ADDR": None}]
)
def test_place_where_no_processes_can_meet_is_named_with_what_to_give(launched, changes):
    launched(**changes)
    with pytest.raises(
        ValueError, match=f"cannot meet at .*{next(iter(changes.values()))}.*: give all of them one"
    ):
        join("cpu")


@pytest.mark.parametrize("changes", [{"RANK": "2"}, {"RANK": "x"}, {"RANK": "-1"}, {"WORLD_SIZE": "two"}])
def test_rank_that_is_none_of_the_processes_is_refused_at_once(launched, changes):
    launched(**changes)
    with pytest.raises(ValueError, match="counted from 0; torchrun and accelerate launch"):
        join("cpu")
