import signal
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
