"""What attention costs on this GPU: `phasewise bench attention --out results/attention/h200.json`.

Every implementation that is installed, at each width and length, 32 768 tokens in all: first the gate (output and
gradients against the float64 reference), then times forward and forward with backward, achieved TFLOP/s, peak
memory, and ratios to plain attention by flash-attn-4 and by cuDNN, all measured in the same run.
"""

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phasewise.bench.subjects import HEADS, Subject, check_widths, forget_sizes, subjects
from phasewise.bench.timing import IN_TURNS, peak_memory, side_by_side
from phasewise.bench.tunable import chains
from phasewise.bench.tune import tune
from phasewise.bench.visits import GATE_LENGTH, TOKENS, Visit, draw, reason, visited
from phasewise.bench.workers import keep_kernels
from phasewise.record import ready, record

BASELINES = {
    "flash-attn-4": "plain flash-attn-4",
    "cudnn": "plain sdpa-cudnn",
    "flash-attention-2": "plain flash-attention-2",
}
NOTES = {
    "plain flash": (
        "'plain flash-attn-4' is flash_attn_func with its defaults, 'flash' our route: its forward in programs that "
        "stay, its backward in the deterministic mode"
    ),
    "pope PoPE-pytorch": "PoPE-pytorch tunes its tiles up to 2048 tokens, and keeps them beyond",
}
"""For records with times of these."""


@dataclass(frozen=True)
class Selection:
    """Which subjects to measure: those whose name holds one of `only` and none of `without`; baselines always."""

    only: tuple[str, ...] = ("",)
    without: tuple[str, ...] = ()

    def of(self, width: int, length: int, refused: Collection[str] = ()) -> list[Subject]:
        """The chosen subjects at a width and a length, without those that are refused there or at the gate."""

        def chosen(name: str) -> bool:
            if any(Visit(name, width, n).name in refused for n in (GATE_LENGTH, length)):
                return False
            if name in BASELINES.values():
                return True
            return any(part in name for part in self.only) and not any(part in name for part in self.without)

        return [subject for subject in subjects(width, length) if chosen(subject.name)]

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
    forget_sizes()
    rows = TOKENS // length
    inputs, gradient = draw(width, length, rows)
    forward, both, found = {}, {}, {}
    for subject in selection.of(width, length, refused):

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
            refused[Visit(name, width, length).name] = reason(error)
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="phasewise bench attention", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the record, a JSON file")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--only", nargs="+", default=[""], help="subjects whose name holds one of these")
    parser.add_argument("--without", nargs="+", default=[], help="no subject whose name holds one of these")
    parser.add_argument(
        "--tune", nargs="*", metavar="PART",
        help="first rewrite this GPU's rows of the launch table, or those of a stage (tiles, bodies, orders) or of "
        "kernels and widths, as 'separable.forward 128 64', that hold a PART",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ValueError(
            "attention is measured on a CUDA device and there is none; `phasewise bench cpu` needs none"
        )
    check_widths(options.widths)
    for length in options.lengths:
        if not 1 <= length <= TOKENS:
            raise ValueError(f"lengths must be from 1 to the {TOKENS} tokens of a measurement, not {length}")
    ready(options.out)
    keep_kernels()
    selection = Selection(tuple(options.only), tuple(options.without))
    selection.check(options.widths[0])
    if options.tune is not None:
        journal = options.out.with_name(f"{options.out.stem}-tune.json")
        tune(partial(chains, options.widths, options.lengths), journal, only=options.tune or [""])
    visits = [
        Visit(subject.name, width, length)
        for length in dict.fromkeys((GATE_LENGTH, *options.lengths))
        for width in options.widths
        for subject in selection.of(width, GATE_LENGTH)
    ]
    found = dict(visited(visits))
    refused = {visit.name: why for visit in visits if isinstance(why := found[visit], str)}
    errors = {v.name: found[v] for v in visits if v.length == GATE_LENGTH and v.name not in refused}
    if not errors:
        name, why = next(iter(refused.items()))
        raise ValueError(f"no implementation passed the gate; {name}: {why}")
    print(f"gate: {len(errors)} implementations within bounds", flush=True)
    recipe = {
        "what": "causal attention, bfloat16, encodings' own work included",
        "tokens": TOKENS, "heads": HEADS, "seed": 0, "widths": options.widths, "lengths": options.lengths,
        "samples": IN_TURNS,
    }  # fmt: skip
    notes = [
        note for name, note in NOTES.items() if any(f"{name} {width}" in errors for width in options.widths)
    ]
    if notes:
        recipe["note"] = "; ".join(notes)
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
