"""Implementations of attention before they are measured: held to the reference, and compiled, many at a time.

Compilers take most of the time that a benchmark does. Their kernels stay on disk, where the process that measures
finds them.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from phasewise.bench.subjects import HEADS, Subject, forget_sizes, subjects
from phasewise.bench.workers import MOST_PROCESSES, PATIENCE, Lost, outcomes
from phasewise.kernels.packages import flash_obstacle
from phasewise.positions import Positions
from phasewise.reference import reference

TOKENS = 32_768
GATE_LENGTH = 384
Inputs = dict[str, Tensor]


class Visit(NamedTuple):
    """An implementation at a width and a length: the gate's, or one at which it is to be measured."""

    subject: str
    width: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.subject} {self.width}" + (f" {self.length}" if self.length != GATE_LENGTH else "")


def visited(visits: Sequence[Visit]) -> Iterator[tuple[Visit, dict[str, float] | str]]:
    """Each visit with the errors at the gate, none at other lengths, or why it failed, as they are done."""
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, len(visits))
    loading = partial(flash_obstacle, "phasewise.kernels.flash_ahead")  # which this process will need
    for visit, found in outcomes(
        visit_once, deque(sorted(visits, key=turn)), processes=processes, seconds=PATIENCE, meanwhile=loading
    ):
        why = found.reason if isinstance(found, Lost) else found
        if isinstance(why, str):
            print(f"{visit.name} is not measured: {why}", flush=True)
        yield visit, why


def turn(visit: Visit) -> tuple[bool, bool]:
    """The gate first, whose kernels all others need; in it what needs other compilers than Triton's."""
    quick = not any(slow in visit.subject for slow in ("flash", "flex", "PoPE-pytorch"))
    return visit.length != GATE_LENGTH, quick


def visit_once(visit: Visit) -> dict[str, float] | str:
    """What `visited` gives of a visit."""
    forget_sizes()
    try:
        subject = next(s for s in subjects(visit.width, visit.length) if s.name == visit.subject)
        if visit.length == GATE_LENGTH:
            return gate(subject, visit.width)
        inputs, gradient = draw(visit.width, visit.length, TOKENS // visit.length)
        with torch.no_grad():
            subject.run(*inputs.values())
        torch.autograd.grad(subject.run(*inputs.values()), [*inputs.values(), *subject.leaves], gradient)
        torch.cuda.synchronize()
    except Exception as error:  # of anybody's code; the others are measured all the same
        return reason(error)
    return {}


def draw(width: int, length: int, rows: int, heads: int = HEADS, *, seed: int = 0) -> tuple[Inputs, Tensor]:
    """bf16 q, k, v `[rows, heads, length, width]`, stored place by place, and a gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = [
        torch.randn(rows, length, heads, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    *inputs, gradient = (x.transpose(1, 2) for x in drawn)
    return {name: x.requires_grad_() for name, x in zip("qkv", inputs, strict=True)}, gradient


def gate(subject: Subject, width: int) -> dict[str, float]:
    """Relative errors of output and gradients against float64; raises above 1 % (bf16 operands cost 0.2 to 0.5 %).

    The finer bound, twice the error of eager in the same precision, is held by the kernels' own tests.
    """
    inputs, gradient = draw(width, GATE_LENGTH, 1)
    at = Positions.arange(GATE_LENGTH, device="cuda")
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected, _ = reference(exact["q"], exact["k"], exact["v"], subject.encoding, at, at)
    truth = (expected, *torch.autograd.grad(expected, list(exact.values()), gradient.double()))
    output = subject.run(*inputs.values())
    actual = (output, *torch.autograd.grad(output, list(inputs.values()), gradient))
    errors = {}
    for name, mine, right in zip(("out", "dq", "dk", "dv"), actual, truth, strict=True):
        error = ((mine.double() - right).norm() / right.norm()).item()
        if not error < 0.01:
            raise AssertionError(
                f"{subject.name} width {width}: {name} is {error:.2e} from the float64 reference"
            )
        errors[name] = error
    return errors


def reason(error: Exception) -> str:
    """What an implementation failed with, in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
