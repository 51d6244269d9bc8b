"""Ctrl-C as a question asked between steps, so that no step is ever left half done."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Work stopped between two steps at the user's wish, with everything done so far on the disk."""


class Terminated(Interrupted):
    """The same, at the wish of a scheduler that sent SIGTERM."""


@contextmanager
def interruptible(number: signal.Signals = signal.SIGINT) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed (or the signal came); a second one acts at once.

    Outside the main thread, where no signal arrives, the function always says no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = threading.Event()
    before = signal.getsignal(number)

    def note(_number: int, _frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(number, before)

    signal.signal(number, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(number, before)
