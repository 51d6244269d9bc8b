"""Ctrl-C as a question asked between steps, so that no step is ever left half done."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from pathlib import Path
from time import monotonic
from types import FrameType

SAME_WISH = 1.0
"""Seconds within which a second signal is the first one again, as where a terminal and a launcher both send it."""


class Interrupted(Exception):
    """Work stopped between two steps at the user's wish, with everything done so far on the disk."""


class Terminated(Interrupted):
    """The same, at the wish of a scheduler that sent SIGTERM."""


@contextmanager
def starting() -> Iterator[None]:
    """Let Ctrl-C end the command line at once and without a traceback while its packages are loaded.

    Any other program that imports the package keeps its own handler. Python loads a package before a line of
    its command line runs, and calls the program "-m" until `python -m` has found it.
    """
    commanded = Path(*sys.argv[:1]).name in ("-m", "phasewise")
    unset = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with at_once() if commanded and unset else nullcontext():
        yield


@contextmanager
def at_once() -> Iterator[None]:
    """Let Ctrl-C end the program at once, where Python would hear of it too late or has nothing to keep."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unheard() -> Iterator[None]:
    """Let processes begun within the block never hear Ctrl-C, which a terminal sends to all: it is this one's to hear.

    It is heard at the end of the block.
    """
    resource_tracker.ensure_running()  # which multiprocessing would begin with its first process, and hear signals then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interruptible(number: signal.Signals = signal.SIGINT) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed (or the signal came); a later second one acts at once.

    Outside the main thread, where no signal arrives, the function always says no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed, first = threading.Event(), 0.0
    before = signal.getsignal(number)

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if not pressed.is_set():
            first = monotonic()
            pressed.set()
        elif monotonic() - first > SAME_WISH:
            signal.signal(number, before)
            signal.raise_signal(number)

    signal.signal(number, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(number, before)


@contextmanager
def stoppable(agreed: Callable[[bool], bool] = bool) -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed or SIGTERM came.

    Interrupted, raised within the block, leaves it as Terminated if that was for SIGTERM. agreed: makes one
    answer of those of several processes, which all ask.
    """
    with interruptible() as pressed, interruptible(signal.SIGTERM) as told:
        try:
            yield lambda: pressed() or told()
        except Interrupted as error:
            raise (Terminated if agreed(told()) else Interrupted)(str(error)) from error
