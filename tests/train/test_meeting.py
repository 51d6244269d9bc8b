"""A process whose companions do not come says so, and can be ended."""

import os
import signal
import socket
import subprocess
import sys

import pytest

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
