import signal
import subprocess
import sys
from functools import partial

import pytest

from phasewise import interrupt
from phasewise.interrupt import Interrupted, Terminated, interruptible, stoppable

send = partial(signal.raise_signal, signal.SIGINT)


def test_signal_other_than_ctrl_c_can_be_asked_for():
    with interruptible(signal.SIGTERM) as told:
        assert not told()
        signal.raise_signal(signal.SIGTERM)
        assert told()


def test_signal_that_a_launcher_passes_on_at_once_is_the_same_wish_and_a_later_one_acts(monkeypatch):
    now = 100.0
    monkeypatch.setattr(interrupt, "monotonic", lambda: now)
    with interruptible() as pressed:
        send()
        now += 0.5
        send()
        assert pressed()
        now += 0.6
        with pytest.raises(KeyboardInterrupt):
            send()
    with pytest.raises(KeyboardInterrupt):
        send()


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Terminated)])
def test_work_that_stops_says_for_which_signal(number, kind):
    def work():
        with stoppable() as stop:
            assert not stop()
            signal.raise_signal(number)
            if stop():
                raise Interrupted("step 3")

    with pytest.raises(kind, match="step 3") as error:
        work()
    assert error.type is kind


PROGRAM = "import sys; from phasewise.cli import main; sys.exit(main())"


@pytest.mark.parametrize(("name", "silent"), [(None, True), ("phasewise", True), ("mine.py", False)])
def test_ctrl_c_while_packages_load_ends_the_command_line_alone_without_a_traceback(name, silent, tmp_path):
    started = ["-m", "phasewise"] if name is None else [str(tmp_path / name)]
    if name is not None:
        (tmp_path / name).write_text(PROGRAM)
    command = [sys.executable, "-X", "importtime", *started]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "torch._C" not in (line := process.stderr.readline()):
            assert line, "the program ended before torch was loaded"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert ("KeyboardInterrupt" not in said) == silent
