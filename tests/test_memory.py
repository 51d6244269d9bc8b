"""Memory that runs out is one line with a remedy, in every command, before the system kills the process."""

import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from phasewise import cli, memory
from phasewise.cli import COMMANDS, main

GIB = 2**30
ASKED = 2**50


def of_torch(_arguments):
    torch.empty(ASKED, dtype=torch.uint8)


def of_numpy(_arguments):
    np.ones(ASKED, dtype=np.uint8)


def of_python(_arguments):
    bytearray(ASKED)


def of_cuda(_arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1048576.00 GiB. GPU 0 has a total of")


def wrapped(arguments):
    try:
        of_torch(arguments)
    except RuntimeError as error:
        raise ValueError("the weights in x cannot be loaded") from error


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("failing", [of_torch, of_numpy, of_python, of_cuda, wrapped])
def test_memory_that_runs_out_is_one_line_and_exit_code_2_in_every_command(
    capsys, monkeypatch, command, failing
):
    monkeypatch.setitem(cli.COMMANDS, command, failing)
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert said.startswith("phasewise: not enough memory")
    assert said.endswith("; choose a smaller model, batch, context or length, or a device with more\n")
    assert (f"{ASKED // GIB:.4g} GiB more were asked for" in said) == (failing is not of_python)


def test_other_errors_of_the_program_stay_what_they_are(monkeypatch):
    def broken(_arguments):
        raise RuntimeError("shapes differ")

    monkeypatch.setitem(cli.COMMANDS, "compare", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["compare"])


def test_process_holds_to_the_memory_of_the_machine_and_to_a_smaller_bound_of_its_own(monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(memory, "_machine", lambda: 5 * 2**40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with memory.within_machine():
        assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 5 * 2**40
        with memory.within_machine():
            monkeypatch.setattr(memory, "_machine", lambda: 6 * 2**40)
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 5 * 2**40
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_model_too_large_for_the_machine_is_refused_without_a_traceback(tmp_path):
    sizes = ["--width", "16384", "--layers", "256", "--heads", "8", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "phasewise", "compare", "--out", str(tmp_path / "run"), *sizes],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the stacks of many would count
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (5 * GIB // 4, 5 * GIB // 4)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("phasewise: not enough memory: 1 GiB more were asked for;")
