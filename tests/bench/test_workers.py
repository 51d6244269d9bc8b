import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import deque

import pytest

from phasewise.bench.workers import Lost, outcomes


def work(task):
    if task == "raise":
        raise ValueError("no such thing")
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "hang":
        time.sleep(600)
    return task, os.getpid()


@pytest.mark.slow
def test_tasks_that_raise_die_or_hang_are_lost_and_the_others_done():
    tasks = deque(["raise", "die", "hang", "one", "two"])
    started = time.monotonic()
    found = dict(outcomes(work, tasks, processes=2, seconds=15))
    assert time.monotonic() - started < 90
    assert found["raise"] == Lost("ValueError: no such thing")
    assert found["die"] == Lost("its process ended with -9")
    assert found["hang"] == Lost("no end in 15 s")
    assert [found[name][0] for name in ("one", "two")] == ["one", "two"]


def test_a_process_serves_many_tasks_and_tasks_may_be_added_meanwhile():
    tasks = deque([1])
    served = []
    for task, (_, process) in outcomes(work, tasks, processes=1, seconds=60):
        served.append((task, process))
        if task < 3:
            tasks.append(task + 1)
    assert [task for task, _ in served] == [1, 2, 3]
    assert len({process for _, process in served}) == 1


def test_a_process_that_ended_while_it_had_no_task_is_replaced():
    tasks = deque(["first"])
    for task, (_, process) in outcomes(work, tasks, processes=1, seconds=60):
        if task == "first":
            os.kill(process, signal.SIGKILL)
            while process in [child.pid for child in multiprocessing.active_children()]:
                time.sleep(0.01)
            tasks.append("second")
    assert task == "second"


STARTING = """
import sys, time
from collections import deque
from operator import neg
from phasewise.bench import cpu
from phasewise.bench.workers import outcomes

if __name__ == "__mp_main__":
    print("begins", flush=True)
    time.sleep(60)
if __name__ == "__main__":
    try:
        RUN
    except KeyboardInterrupt:
        sys.exit(130)
"""


LOADING = """
import sys, time
from phasewise.bench import visits

def load(_module):
    print("begins", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    visits.flash_obstacle = load
    try:
        list(visits.visited([visits.Visit("any", 64, 384)]))
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize(
    "text",
    [
        STARTING.replace("RUN", "list(outcomes(neg, deque([1]), processes=1, seconds=60))"),
        STARTING.replace("RUN", "cpu.reference_memory()"),
        LOADING,
    ],
    ids=["processes", "memory", "kernels"],
)
def test_ctrl_c_while_something_begins_is_heard_at_once_and_by_the_parent_alone(text, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(text)
    command = [sys.executable, str(program)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=10)
    assert process.returncode == 130
    assert said == ""
