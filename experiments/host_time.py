"""What a call of attention asks of the CPU, forward and backward, on shapes too small to keep a GPU busy.

    python -m experiments.host_time results/attention/host-h200.json

A small model waits for the host, not for the device. Calls are enqueued one after another, with a synchronisation at
both ends of a round; "left" is how long the device still worked when the host was done, so that a time is the host's
where it is little of the round. The processor's time leaves out what other programs took of the clock's. The backward
pass is that of one call at a time, as `torch.autograd.grad` has it.
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from phasewise import TAPA, NoPE, PoPE, RoPE, attention, choose
from phasewise.attention import Implementation
from phasewise.bench.timing import Time
from phasewise.device import usable
from phasewise.record import record

ROWS, HEADS, LENGTH, WIDTH = 1, 8, 128, 64
IMPLEMENTATIONS: tuple[Implementation, ...] = ("flash", "cudnn", "triton", "sdpa")
WHAT = ("without gradients", "forward", "backward")


def subjects(qkv: list[Tensor], refused: dict[str, str]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Attention of each encoding by each implementation that takes it here; why not, for the others."""
    q, k, v = qkv
    encodings = {
        "rope": RoPE(head_dim=WIDTH),
        "pope": PoPE(num_heads=HEADS, head_dim=WIDTH).to(q.device),
        "none": NoPE(),
        "tapa": TAPA(head_dim=WIDTH),
    }
    for impl, (name, encoding) in product(IMPLEMENTATIONS, encodings.items()):
        try:
            choose(q, k, v, encoding, impl=impl)
        except ValueError as error:
            refused[f"{name} {impl}"] = str(error)
        else:
            yield f"{name} {impl}", partial(attention, q, k, v, encoding, impl=impl)


def timed(enqueue: Callable[[], object], calls: int, wait: Callable[[], None]) -> dict[str, float]:
    """Microseconds for each call, by the clock and of the processor; and of the device after the last, for all."""
    wait()
    start, busy = time.perf_counter(), time.process_time()
    enqueue()
    done, busy = time.perf_counter(), time.process_time() - busy
    wait()
    return {
        "us": 1e6 * (done - start) / calls,
        "processor_us": 1e6 * busy / calls,
        "left_us": 1e6 * (time.perf_counter() - done),
    }


def a_round(call: Callable[[], Tensor], leaves: list[Tensor], calls: int, wait: Callable[[], None]) -> dict:
    """One round of a subject: times of all three kinds."""
    outs: list[Tensor] = []
    gradient = torch.ones_like(call())

    def forward() -> None:
        outs.extend(call() for _ in range(calls))

    def inference() -> None:
        with torch.no_grad():
            for _ in range(calls):
                call()

    def backward() -> None:
        for out in outs:
            torch.autograd.grad(out, leaves, gradient)

    return dict(zip(WHAT, (timed(each, calls, wait) for each in (inference, forward, backward)), strict=True))


def measured(call: Callable[[], Tensor], leaves: list[Tensor], rounds: int, calls: int) -> dict:
    """Medians and quartiles of a subject's rounds, once it is compiled."""
    wait = torch.cuda.synchronize if leaves[0].is_cuda else lambda: None
    a_round(call, leaves, 10, wait)
    found = []
    for _ in range(rounds):
        gc.collect()
        found.append(a_round(call, leaves, calls, wait))
    return {
        what: {name: vars(Time.of([one[what][name] for one in found])) for name in found[0][what]}
        for what in WHAT
    }


def main(out: Path, device: torch.device, rounds: int, calls: int) -> None:
    torch.manual_seed(0)
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float32
    leaves = [
        torch.randn(ROWS, HEADS, LENGTH, WIDTH, device=device, dtype=narrow, requires_grad=True)
        for _ in "qkv"
    ]
    shape = {"rows": ROWS, "heads": HEADS, "length": LENGTH, "width": WIDTH, "dtype": str(narrow)}
    refused: dict[str, str] = {}
    recipe = {**shape, "rounds": rounds, "calls": calls, "seeds": [0], "refused": refused}
    values = {}
    gc.disable()
    for name, call in subjects(leaves, refused):
        start = time.perf_counter()
        times = values[name] = measured(call, leaves, rounds, calls)
        took = ", ".join(
            f"{what} {times[what]['us']['median']:.0f} ({times[what]['processor_us']['median']:.0f})"
            for what in WHAT
        )
        print(f"{name:12} {took} us (done in {time.perf_counter() - start:.1f} s)", flush=True)
        record(out, recipe=recipe, values=values, device=device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.host_time", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", type=usable, default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=30)
    options = parser.parse_args()
    main(options.out, options.device, options.rounds, options.calls)
