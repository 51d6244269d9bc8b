"""What a call of attention asks of the CPU, forward and backward, on shapes too small to keep a GPU busy.

    python -m experiments.host_time results/attention/host-h200.json

A small model waits for the host, not for the device. Calls are enqueued one after another, with a synchronisation at
both ends of a round; "left" is how long the device still worked when the host was done, so that a time is the host's
where it is little of the round. The backward pass is that of one call at a time, as `torch.autograd.grad` has it.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phasewise import TAPA, NoPE, PoPE, RoPE, attention, choose
from phasewise.attention import Implementation
from phasewise.bench.timing import Time
from phasewise.device import usable
from phasewise.encodings import Encoding
from phasewise.record import record

ROWS, HEADS, LENGTH, WIDTH = 1, 8, 128, 64
IMPLEMENTATIONS: tuple[Implementation, ...] = ("flash", "cudnn", "triton", "sdpa")
WHAT = ("without gradients", "forward", "backward")


def encodings() -> dict[str, Encoding]:
    return {
        "none": NoPE(),
        "rope": RoPE(head_dim=WIDTH),
        "pope": PoPE(num_heads=HEADS, head_dim=WIDTH),
        "tapa": TAPA(head_dim=WIDTH),
    }


def subjects(qkv: list[Tensor], refused: dict[str, str]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Attention of each encoding by each implementation that takes it here; why not, for the others."""
    q, k, v = qkv
    for name, encoding in encodings().items():
        encoding = encoding.to(q.device)
        for impl in IMPLEMENTATIONS:
            try:
                choose(q, k, v, encoding, impl=impl)
            except ValueError as error:
                refused[f"{name} {impl}"] = str(error)
            else:
                yield f"{name} {impl}", partial(attention, q, k, v, encoding, impl=impl)


def timed(enqueue: Callable[[], object], calls: int, wait: Callable[[], None]) -> tuple[float, float]:
    """Microseconds of the host for each call, and of the device after the last of them for all."""
    wait()
    start = time.perf_counter()
    enqueue()
    done = time.perf_counter()
    wait()
    return 1e6 * (done - start) / calls, 1e6 * (time.perf_counter() - done)


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


def main(out: Path, device: torch.device, rounds: int, calls: int) -> None:
    torch.manual_seed(0)
    narrow = torch.bfloat16 if device.type == "cuda" else torch.float32
    leaves = [
        torch.randn(ROWS, HEADS, LENGTH, WIDTH, device=device, dtype=narrow, requires_grad=True)
        for _ in "qkv"
    ]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    refused: dict[str, str] = {}
    found = dict(subjects(leaves, refused))
    for name, call in found.items():
        start = time.perf_counter()
        a_round(call, leaves, 10, wait)
        print(f"{name}: warm after {time.perf_counter() - start:.1f} s", flush=True)
    samples: dict[str, list[dict]] = {name: [] for name in found}
    order, shuffle = list(found), random.Random(0).shuffle
    gc.disable()
    for number in range(rounds):
        shuffle(order)
        for name in order:
            samples[name].append(a_round(found[name], leaves, calls, wait))
            gc.collect()
        print(f"round {number + 1} of {rounds}", flush=True)
    values = {
        name: {
            what: {
                "us": vars(Time.of([one[what][0] for one in those])),
                "left_us": Time.of([one[what][1] for one in those]).median,
            }
            for what in WHAT
        }
        for name, those in samples.items()
    }
    for name, times in values.items():
        print(f"{name:12}", *(f"{what} {times[what]['us']['median']:.0f} us" for what in WHAT), flush=True)
    shape = {"rows": ROWS, "heads": HEADS, "length": LENGTH, "width": WIDTH, "dtype": str(narrow)}
    recipe = {**shape, "rounds": rounds, "calls": calls, "seeds": [0], "refused": refused}
    record(out, recipe=recipe, values=values, device=device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.host_time", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", type=usable, default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=50)
    options = parser.parse_args()
    main(options.out, options.device, options.rounds, options.calls)
