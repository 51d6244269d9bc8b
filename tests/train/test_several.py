"""Several processes train what one trains: gloo on the CPU, in the environment that torchrun gives."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phasewise.model.folder import load
from phasewise.train.checkpoint import ALONE

from .several import job

pytestmark = pytest.mark.slow
SHARDINGS = ("replicated", "sharded")
BUDGET = {"steps": 6, "batch_size": 4, "checkpoint_every": 2}


def together(*jobs, program="tests.train.several"):
    """Run jobs in two processes of a program; what they said of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank in ("0", "1"):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "error", "-m", program, json.dumps(jobs)]
        running.append(
            subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first == second
    return first


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs, by name; one start of two processes does what needs two."""
    at = tmp_path_factory.mktemp("runs")
    job(ALONE, str(at / "alone"), 0, BUDGET)
    jobs = []
    for sharding in SHARDINGS:
        given = {**BUDGET, "sharding": sharding}
        job(ALONE, str(at / f"{sharding} from one"), 3, given)
        jobs += [
            (str(at / sharding), 0, given),
            (str(at / f"{sharding} in parts"), 0, {**given, "accumulate": 2}),
            (str(at / f"{sharding} sharing rows"), 0, {**given, "context_processes": 2}),
            (str(at / f"{sharding} from one"), 0, given),
            (str(at / f"{sharding} from two"), 3, given),
            (str(at / f"{sharding} in two sittings"), 3, given),
            (str(at / f"{sharding} in two sittings"), 0, given),
        ]
    narrow = {**BUDGET, "precision": "bfloat16", "accumulate": 2}
    jobs += [
        (str(at / "resharded"), 0, {**BUDGET, "sharding": "resharded"}),
        (str(at / "resharded by block"), 0, {**BUDGET, "sharding": "resharded"}, 1),
        (str(at / "sharded by block"), 0, {**BUDGET, "sharding": "sharded"}, 1),
        (str(at / "resharded sharing rows"), 0, {**BUDGET, "sharding": "resharded", "context_processes": 2}),
        *(
            (str(at / f"{sharding} in bfloat16"), 0, {**narrow, "sharding": sharding})
            for sharding in SHARDINGS
        ),
        (str(at / "sharded and measured"), 0, {**BUDGET, "sharding": "sharded", "evaluate_every": 1}),
    ]
    said = together(*jobs)
    assert [text for text in said if "interrupted" in text] == ["interrupted at step 3 of 6"] * 4
    for sharding in SHARDINGS:
        job(ALONE, str(at / f"{sharding} from two"), 0, {**BUDGET, "sharding": sharding})
    return at


def metric(folder: Path, name: str):
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path):
    return metric(folder, "loss")


def close(folder, to):
    """Equal but for the order in which gradients are summed."""
    assert losses(folder) == pytest.approx(losses(to), rel=2e-6)
    mine, other = load(folder / "model").state_dict(), load(to / "model").state_dict()
    for name, weight in other.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("how", ["", " in parts"])
def test_two_processes_train_what_one_trains(runs, sharding, how):
    close(runs / f"{sharding}{how}", runs / "alone")


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_two_processes_that_share_every_row_train_what_one_trains(runs, sharding):
    # The last loss and gradient are those of weights that five shared steps made. Gradients themselves are held
    # to float64's rounding in tests/model/test_parallel.py.
    for name, rel in (("loss", 2e-6), ("gradient_norm", 2e-5)):
        mine, other = (metric(runs / run, name) for run in (f"{sharding} sharing rows", "alone"))
        assert mine == pytest.approx(other, rel=rel)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("before", ["one", "two"])
def test_run_resumes_with_another_number_of_processes(runs, sharding, before):
    close(runs / f"{sharding} from {before}", runs / "alone")


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_resumed_processes_repeat_the_uninterrupted_ones_to_the_last_digit(runs, sharding):
    assert losses(runs / f"{sharding} in two sittings") == losses(runs / sharding)


@pytest.mark.parametrize(
    "how",
    ["resharded", "resharded by block", "resharded sharing rows", "sharded by block", "sharded and measured"],
)
def test_weights_are_the_same_however_often_and_however_many_at_once_they_are_gathered(runs, how):
    plain = "sharded sharing rows" if "rows" in how else "sharded"
    assert losses(runs / how) == losses(runs / plain)


def test_matrices_that_travel_in_bfloat16_train_what_autocast_makes_of_whole_ones(runs):
    # Of three steps: later a last digit of float32 may have turned one of bfloat16.
    for name in ("loss", "gradient_norm"):
        sharded, replicated = (metric(runs / f"{sharding} in bfloat16", name) for sharding in SHARDINGS[::-1])
        assert sharded[:3] == pytest.approx(replicated[:3], rel=1e-6)


def test_processes_wait_for_what_the_first_does_alone_longer_than_their_communication_would():
    assert together(program="tests.train.patient") == "waited"
