"""What attention costs on this GPU: `python -m phasewise.bench.attention --out results/attention/h200.json`.

Every implementation that is installed, at each width and length, 32 768 tokens in all: first the gate (output and
gradients against the float64 reference), then times forward and forward with backward, achieved TFLOP/s, peak
memory, and ratios to plain attention by flash-attn-4 and by cuDNN, all measured in the same run.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from phasewise.bench.timing import peak_memory, side_by_side
from phasewise.encodings import TAPA, Encoding, NoPE, PoPE, RoPE
from phasewise.encodings.base import angles
from phasewise.frequencies import Geometric
from phasewise.kernels import separable, tapa
from phasewise.kernels.library import BODIES, Body
from phasewise.positions import Positions
from phasewise.record import record
from phasewise.reference import reference

TOKENS = 32_768
HEADS = 16
GATE_LENGTH = 384
BASELINES = {
    "flash-attn-4": "plain flash-attn-4",
    "cudnn": "plain sdpa-cudnn",
    "flash-attention-2": "plain flash-attention-2",
}
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """An implementation under test: `run(q, k, v)` computes causal attention under `encoding`."""

    name: str
    encoding: Encoding
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    qk_width: int
    leaves: tuple[Tensor, ...] = ()


def subjects(width: int, length: int) -> Iterator[Subject]:
    """What is installed, for heads of `width` and sequences of `length`."""
    scale = width**-0.5
    flash = any(package.metadata["Name"] == "flash-attn-4" for package in metadata.distributions())
    bodies: list[Body] = [body for body in BODIES if body != "flash" or flash]
    index = torch.arange(length, device="cuda")[None]

    def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def flash_attn_4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    yield Subject("plain flash-attention-2", NoPE(), flash_attention_2, width)
    yield Subject("plain sdpa-cudnn", NoPE(), sdpa_cudnn, width)
    if flash:
        # As its users call it: the backward adds atomically. "plain flash" below is its deterministic mode.
        yield Subject("plain flash-attn-4", NoPE(), flash_attn_4, width)
    for body in bodies:
        run = partial(separable.attend, scale=scale, causal=True, window=None, body=body)
        yield Subject(f"plain {body}", NoPE(), lambda q, k, v, run=run: run(q, k, v)[0], width)
    rope = RoPE(head_dim=width).cuda()
    angle = angles(index, Geometric(base=10_000.0).rates(width // 2, device="cuda"))
    for body in bodies:
        turn = partial(separable.rope, scale=scale, causal=True, window=None, body=body)
        yield Subject(
            f"rope {body}", rope, lambda q, k, v, run=turn: run(q, k, v, angle, angle, 1.0)[0], width
        )
    pope = PoPE(num_heads=HEADS, head_dim=width, phase_init="uniform").cuda()
    wide = angles(index, Geometric(base=10_000.0).rates(width, device="cuda"))
    for body in bodies:
        expand = partial(
            separable.pope, magnitude="softplus", scale=scale, causal=True, window=None, body=body
        )
        yield Subject(
            f"pope {body}",
            pope,
            lambda q, k, v, run=expand: run(q, k, v, wide, wide, pope.phase)[0],
            2 * width,
            (pope.phase,),
        )
    joint = TAPA(head_dim=width, alpha=0.1)
    yield Subject(
        "tapa triton",
        joint,
        lambda q, k, v: tapa.attend(
            q, k, v, alpha=0.1, amplitude_dim=joint.amplitude_dim, causal=True, window=None
        )[0],
        width,
    )


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


def wanted(subject: Subject, only: str) -> bool:
    """Whether a subject is measured: those named, and the baselines always."""
    return only in subject.name or subject.name in BASELINES.values()


def measure(width: int, length: int, only: str = "") -> list[dict[str, object]]:
    """One row per subject at a width and a length."""
    rows = TOKENS // length
    inputs, gradient = draw(width, length, rows)
    forward, both, found = {}, {}, {}
    for subject in subjects(width, length):
        if not wanted(subject, only):
            continue

        def run(subject: Subject = subject) -> Tensor:
            return subject.run(*inputs.values())

        def train(subject: Subject = subject) -> object:
            return torch.autograd.grad(
                subject.run(*inputs.values()), [*inputs.values(), *subject.leaves], gradient
            )

        found[subject.name] = subject
        forward[subject.name], both[subject.name] = torch.no_grad()(run), train
    memory = {name: peak_memory(call) for name, call in both.items()}
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m phasewise.bench.attention", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the record, a JSON file")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--only", default="", help="subjects whose name contains this, and the baselines")
    options = parser.parse_args()
    errors = {}
    for width in options.widths:
        for subject in subjects(width, GATE_LENGTH):
            if not wanted(subject, options.only):
                continue
            errors[f"{subject.name} {width}"] = gate(subject, width)
    print(f"gate: {len(errors)} implementations within bounds")
    table = []
    for width in options.widths:
        for length in options.lengths:
            rows = measure(width, length, options.only)
            table += rows
            for row in rows:
                print(_line(row), flush=True)
    recipe = {
        "what": "causal attention, bfloat16, encodings' own work included",
        "tokens": TOKENS, "heads": HEADS, "seed": 0, "widths": options.widths, "lengths": options.lengths,
        "samples": "3 rounds of 7 replays of a CUDA graph, all subjects in turn",
    }  # fmt: skip
    record(options.out, recipe=recipe, values={"gate": errors, "times": table}, device="cuda")


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
    main()
