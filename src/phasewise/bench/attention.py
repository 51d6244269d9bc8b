"""What attention costs on this GPU: `phasewise bench attention --out results/attention/h200.json`.

Every implementation that is installed, at each width and length, 32 768 tokens in all: first the gate (output and
gradients against the float64 reference), then times forward and forward with backward, achieved TFLOP/s, peak
memory, and ratios to plain attention by flash-attn-4 and by cuDNN, all measured in the same run.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phasewise.bench.subjects import HEADS, Subject, subjects
from phasewise.bench.timing import IN_TURNS, peak_memory, side_by_side
from phasewise.bench.tunable import stages
from phasewise.bench.tune import tune
from phasewise.positions import Positions
from phasewise.record import ready, record
from phasewise.reference import reference

TOKENS = 32_768
GATE_LENGTH = 384
BASELINES = {
    "flash-attn-4": "plain flash-attn-4",
    "cudnn": "plain sdpa-cudnn",
    "flash-attention-2": "plain flash-attention-2",
}
Inputs = dict[str, Tensor]


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


@dataclass(frozen=True)
class Selection:
    """Which subjects to measure: those whose name holds one of `only` and none of `without`; baselines always."""

    only: tuple[str, ...] = ("",)
    without: tuple[str, ...] = ()

    def of(self, width: int, length: int) -> list[Subject]:
        """The chosen subjects at a width and a length."""

        def chosen(name: str) -> bool:
            return any(part in name for part in self.only) and not any(part in name for part in self.without)

        return [s for s in subjects(width, length) if s.name in BASELINES.values() or chosen(s.name)]

    def check(self, width: int) -> None:
        """Raise ValueError for a part of `only` that no subject's name holds."""
        names = [subject.name for subject in subjects(width, GATE_LENGTH)]
        for part in self.only:
            if not any(part in name for name in names):
                raise ValueError(
                    f"no implementation here has {part!r} in its name; there are {', '.join(names)}"
                )


def measure(
    width: int, length: int, selection: Selection, refused: dict[str, str]
) -> list[dict[str, object]]:
    """One row per subject at a width and a length; refused: those without one, and why, to which it adds."""
    torch.compiler.reset()  # a compiled function serves a few sizes only
    rows = TOKENS // length
    inputs, gradient = draw(width, length, rows)
    forward, both, found = {}, {}, {}
    for subject in selection.of(width, length):
        if f"{subject.name} {width}" in refused:
            continue

        def run(subject: Subject = subject) -> Tensor:
            return subject.run(*inputs.values())

        def train(subject: Subject = subject) -> object:
            return torch.autograd.grad(
                subject.run(*inputs.values()), [*inputs.values(), *subject.leaves], gradient
            )

        found[subject.name] = subject
        forward[subject.name], both[subject.name] = torch.no_grad()(run), train
    memory: dict[str, int] = {}
    for name, call in list(both.items()):
        try:
            memory[name] = peak_memory(call)
        except Exception as error:
            refused[f"{name} {width} {length}"] = reason(error)
            del forward[name], both[name], found[name]
    times, both_times = side_by_side(forward), side_by_side(both)
    table = []
    for name, subject in found.items():
        pairs = length * (length + 1) // 2 * rows * HEADS
        work = {"forward": 2 * pairs * (subject.qk_width + width)}
        work["both"] = work["forward"] + 2 * pairs * (3 * subject.qk_width + 2 * width)
        row: dict[str, object] = {"subject": name, "width": width, "length": length, "rows": rows}
        for kind, by_name in (("forward", times), ("both", both_times)):
            took = by_name[name]
            row[f"{kind}_ms"] = asdict(took)
            row[f"{kind}_tflops"] = work[kind] / took.median / 1e9
            for baseline, plain in BASELINES.items():
                if plain in by_name:
                    row[f"{kind}_to_{baseline}"] = took.median / by_name[plain].median
        row["peak_bytes"] = memory[name]
        table.append(row)
    return table


def reason(error: Exception) -> str:
    """What an implementation failed with, in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="phasewise bench attention", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the record, a JSON file")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--only", nargs="+", default=[""], help="subjects whose name holds one of these")
    parser.add_argument("--without", nargs="+", default=[], help="no subject whose name holds one of these")
    parser.add_argument(
        "--tune", nargs="*", metavar="PART",
        help="first rewrite this GPU's rows of the launch table, or those of kernels whose name holds a PART",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ValueError(
            "attention is measured on a CUDA device and there is none; `phasewise bench cpu` needs none"
        )
    for length in options.lengths:
        if not 1 <= length <= TOKENS:
            raise ValueError(f"lengths must be from 1 to the {TOKENS} tokens of a measurement, not {length}")
    ready(options.out)
    if options.tune is not None:
        journal = options.out.with_name(f"{options.out.stem}-tune.json")
        tune(partial(stages, options.widths, options.lengths), journal, only=options.tune or [""])
    selection = Selection(tuple(options.only), tuple(options.without))
    selection.check(options.widths[0])
    errors: dict[str, dict[str, float]] = {}
    refused: dict[str, str] = {}
    for width in options.widths:
        torch.compiler.reset()
        for subject in selection.of(width, GATE_LENGTH):
            name = f"{subject.name} {width}"
            try:
                errors[name] = gate(subject, width)
            except Exception as error:  # of anybody's code; the others are measured all the same
                refused[name] = reason(error)
                print(f"{name} is not measured: {refused[name]}", flush=True)
    print(f"gate: {len(errors)} implementations within bounds", flush=True)
    recipe = {
        "what": "causal attention, bfloat16, encodings' own work included",
        "tokens": TOKENS, "heads": HEADS, "seed": 0, "widths": options.widths, "lengths": options.lengths,
        "samples": IN_TURNS,
    }  # fmt: skip
    table: list[dict[str, object]] = []
    for width in options.widths:
        for length in options.lengths:
            rows = measure(width, length, selection, refused)
            table += rows
            for row in rows:
                print(_line(row), flush=True)
            values = {"gate": errors, "refused": refused, "times": table}
            record(options.out, recipe=recipe, values=values, device="cuda")
    for name, why in refused.items():
        print(f"{name}: {why}", file=sys.stderr)
    return 1 if refused else 0


def _line(row: dict) -> str:
    ratios = " ".join(
        f"{row[f'forward_to_{name}']:.2f}/{row[f'both_to_{name}']:.2f}"
        for name in BASELINES
        if f"both_to_{name}" in row
    )
    return (
        f"{row['width']:4d} {row['length']:6d} {row['subject']:26s} {row['forward_ms']['median']:8.3f} ms "
        f"{row['forward_tflops']:4.0f} TF {row['both_ms']['median']:8.3f} ms {row['both_tflops']:4.0f} TF "
        f"{row['peak_bytes'] / 2**20:7.0f} MiB  {ratios}"
    )


if __name__ == "__main__":
    sys.exit(main())
