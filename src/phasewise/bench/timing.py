"""Times of GPU work: CUDA graph replays between events, in rounds, medians with their spread."""

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

SLOW, SLOW_ROUNDS = 80.0, 3
JUDGED_AFTER = 2  # rounds
IN_TURNS = (
    "9 rounds of 3 replays of a CUDA graph, all subjects in turn, in an order drawn anew for each round; "
    f"{SLOW_ROUNDS} rounds of 1 for what takes more than {SLOW:.0f} ms"
)
"""How `side_by_side` samples, for records."""


@dataclass(frozen=True)
class Time:
    """Milliseconds: the median of all samples and their first and third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: list[float]) -> "Time":
        """From at least two samples.

        >>> Time.of([1.0, 2.0, 4.0])
        Time(median=2.0, low=1.0, high=4.0)
        """
        low, median, high = statistics.quantiles(samples, n=4)
        return cls(median, low, high)


def side_by_side(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = 9, repeats: int = 3, behind: float = math.inf
) -> dict[str, Time]:
    """Times of several calls on the current CUDA device, taken in turns so that drift falls on all alike.

    Each call is captured into a CUDA graph and replayed: the time is the device's, without launches from Python. A
    device that meets its power limit is slowed by what ran before, so each round has an order of its own. What takes
    more than SLOW milliseconds is in the first SLOW_ROUNDS rounds alone, and replayed once there. behind: by what share
    a call's fastest sample may be behind the slowest of the fastest call's, after two rounds, to be measured on.
    """
    graphs = {name: _captured(call) for name, call in calls.items()}
    slow = {name for name, graph in graphs.items() if _replayed(graph, 1)[0] > SLOW}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(graphs)
    shuffle = random.Random(0).shuffle
    for turn in range(rounds):
        if turn == JUDGED_AFTER:
            order = near(samples, behind)
        shuffle(order)
        for name in order:
            if name not in slow:
                graphs[name].replay()
                samples[name] += _replayed(graphs[name], repeats)
            elif turn < SLOW_ROUNDS:
                samples[name] += _replayed(graphs[name], 1)
    return {name: Time.of(times) for name, times in samples.items()}


def near(samples: Mapping[str, list[float]], behind: float) -> list[str]:
    """Calls whose fastest sample is not further behind the slowest of the fastest call's than that share of it.

    >>> near({"a": [1.0, 1.1], "b": [1.2, 1.3], "c": [1.3, 1.2, 9.0]}, 0.1)
    ['a', 'b', 'c']
    >>> near({"a": [1.0, 1.1], "b": [1.2, 1.3], "c": [1.22, 1.3]}, 0.1)
    ['a', 'b']
    """
    fastest = min(samples.values(), key=statistics.median)
    return [name for name, times in samples.items() if min(times) <= (1 + behind) * max(fastest)]


def _replayed(graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
    """Milliseconds that each of some replays takes."""
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes of device memory at the peak of a second call, what was held before it included."""
    call()  # what is made once, such as FlexAttention's mask, is no part of it
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
