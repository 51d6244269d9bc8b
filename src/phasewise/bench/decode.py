"""What decoding costs on this GPU: `phasewise bench decode --out results/attention/decode-h200.json`.

One query a row against caches of raw keys, 8 rows, 32 query and 8 key heads: first the gate (outputs against the
float64 reference), then times, and bytes of keys and values a second as a share of what copying reads and writes in
the same run. Then, again beside ours, what others need: the kernels for many queries, which prepare every key anew at
each step, and torch's and flash-attn-4's attention on keys that were rotated before.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from phasewise.attention import attention
from phasewise.bench.subjects import check_widths, installed
from phasewise.bench.timing import IN_TURNS, side_by_side
from phasewise.bench.tunable import Subject, Trial
from phasewise.bench.tune import tune
from phasewise.bench.workers import keep_kernels
from phasewise.encodings import TAPA, Encoding, NoPE, PoPE, RoPE
from phasewise.fused import Call, Hardware, bodies, fused, obstacle
from phasewise.kernels import separable
from phasewise.kernels.table import Row
from phasewise.positions import Positions
from phasewise.record import ready, record
from phasewise.reference import reference

ROWS, HEADS, KEY_HEADS = 8, 32, 8
GATE_LENGTH = 1000
FEWEST_KEYS = 16  # of which our kernel takes one query
Inputs = tuple[Tensor, Tensor, Tensor]
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw(width: int, length: int, rows: int = ROWS) -> Inputs:
    """bf16 q `[rows, 32, 1, width]`, and k and v `[rows, 8, length, width]` as a cache holds them."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(rows, HEADS, 1, width)] + [(rows, KEY_HEADS, length, width)] * 2
    q, k, v = (torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes)
    return q, k, v


def ours(width: int) -> dict[str, tuple[Encoding, Run]]:
    """Each encoding with the attention of one query by our kernel."""
    torch.manual_seed(0)
    encodings: dict[str, Encoding] = {
        "nope": NoPE(),
        "rope": RoPE(head_dim=width),
        "pope": PoPE(num_heads=HEADS, head_dim=width, phase_init="uniform"),
        "tapa": TAPA(head_dim=width, alpha=0.1),
    }
    return {name: (encoding, partial(_ours, encoding.cuda())) for name, encoding in encodings.items()}


def others(width: int) -> dict[str, tuple[Encoding, Run]]:
    """What computes the same by other means, for `ours` to be measured beside."""
    found: dict[str, tuple[Encoding, Run]] = {
        f"{name}, keys prepared at each step": (encoding, partial(_prepared, encoding))
        for name, (encoding, _) in ours(width).items()
        if name != "nope"
    }
    found["sdpa on rotated keys"] = NoPE(), partial(scaled_dot_product_attention, enable_gqa=True)
    if installed("flash-attn-4"):
        plain = partial(separable.attend, scale=width**-0.5, causal=True, window=None, body="flash")
        found["flash-attn-4 on rotated keys"] = NoPE(), lambda q, k, v: plain(q, k, v)[0]
    return found


def _ours(encoding: Encoding, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, encoding, impl="triton")


def _prepared(encoding: Encoding, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    call = Call(q, k, v, encoding, None, causal=True, window=None, scale=None)
    here = Hardware.of(q)
    return fused(call, next(body for body in bodies(call, here) if obstacle(call, body, here) is None))[0]


def gate(name: str, encoding: Encoding, run: Run, width: int) -> float:
    """The relative error of the output against float64; raises above 1 % (bf16 operands cost 0.2 to 0.5 %)."""
    q, k, v = draw(width, GATE_LENGTH, rows=1)
    at = Positions.arange(GATE_LENGTH, device="cuda")
    truth, _ = reference(q.double(), k.double(), v.double(), encoding, at.narrow(GATE_LENGTH - 1, 1), at)
    error = ((run(q, k, v).double() - truth).norm() / truth.norm()).item()
    if not error < 0.01:
        raise AssertionError(f"{name} width {width} is {error:.2e} from the float64 reference")
    return error


def measure(subjects: dict[str, tuple[Encoding, Run]], width: int, length: int) -> list[dict[str, object]]:
    """One row per subject at a width and a number of keys, and one for each way of copying the keys."""
    q, k, v = draw(width, length)
    target = torch.empty_like(k)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(k),
        "copy by a kernel": lambda: torch.neg(k, out=target),
    }
    copying = tuple(calls)
    calls |= {name: partial(run, q, k, v) for name, (_, run) in subjects.items()}
    times = side_by_side(calls)
    moved = 2 * k.numel() * k.element_size()  # keys and values read, or keys read and written
    rates = {name: moved / took.median / 1e6 for name, took in times.items()}
    best = max(rates[name] for name in copying)
    return [
        {
            "subject": name, "width": width, "keys": length, "ms": asdict(took), "gb_per_s": rates[name],
            "share_of_copy": rates[name] / best,
        }
        for name, took in times.items()
    ]  # fmt: skip


def tunable(names: Sequence[str], widths: Sequence[int], keys: int) -> list[list[list[Subject]]]:
    """Rows of the launch table for kernels `decode.NAME`, decided by times with so many keys."""
    return [[[_tunable(name, width, keys)]] for width in widths for name in names]


def _tunable(name: str, width: int, keys: int) -> Subject:
    def make(length: int) -> Trial:
        q, k, v = draw(width, length)
        encoding, run = ours(width)[{"plain": "nope", "polar": "pope"}.get(name, name)]
        at = Positions.arange(length, device="cuda")
        last = at.narrow(length - 1, 1)
        truth, _ = reference(q[:1].double(), k[:1].double(), v[:1].double(), encoding, last, at)
        return Trial(partial(run, q, k, v), lambda: (run(q, k, v),), lambda: (truth,))

    return Subject(f"decode.{name}", width, width, (keys,), make, (tuple(candidates(name)),))


def candidates(name: str) -> Iterator[dict[str, int]]:
    """Tiles and registers, each with several numbers of programs for a multiprocessor.

    >>> sum(1 for _ in candidates("rope")), sum(1 for _ in candidates("polar"))
    (18, 6)
    """
    if name == "polar":
        rooms = ((2, 255), (3, 168), (4, 128))
        for (programs, registers), halved in itertools.product(rooms, (1, 2)):
            yield {"PROGRAMS": programs * halved, "num_warps": 4 // halved, "maxnreg": registers}
        return
    tiles = ((64, 4, 168), (64, 4, 128), (128, 8, 128), (64, 8, 128), (32, 4, 168), (32, 4, 255))
    for (block, warps, registers), programs in itertools.product(tiles, (2, 3, 4)):
        yield {
            "BLOCK_N": block, "PROGRAMS": programs, "STAGES": 3, "num_warps": warps, "maxnreg": registers,
        }  # fmt: skip


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="phasewise bench decode", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the record, a JSON file")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 16_384, 65_536])
    parser.add_argument(
        "--tune", nargs="+", choices=["plain", "rope", "polar", "tapa"], default=[],
        help="first rewrite these kernels' rows of the launch table for this GPU",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ValueError(
            "decoding is measured on a CUDA device and there is none; `phasewise bench cpu` needs none"
        )
    check_widths(options.widths)
    for keys in options.keys:
        if keys < FEWEST_KEYS:
            raise ValueError(f"decoding takes {FEWEST_KEYS} keys or more, not {keys}")
    ready(options.out)
    tuned: list[Row] = []
    if options.tune:
        keep_kernels()
        chains = partial(tunable, options.tune, options.widths, max(options.keys))
        tuned = tune(chains, options.out.with_name(f"{options.out.stem}-tune.json"))
    recipe = {
        "what": "attention of one query a row, bfloat16, encodings' own work included",
        "rows": ROWS, "heads": HEADS, "key_heads": KEY_HEADS, "seed": 0, "widths": options.widths, "keys": options.keys,
        "tuned": tuned,
        "samples": IN_TURNS,
        "bytes": "the faster of two ways of copying; keys and values count once, raw, and copies both ways",
    }  # fmt: skip
    table: list[dict[str, object]] = []
    errors: dict[str, float] = {}
    for drawn in (ours, others):
        for width in options.widths:
            subjects = drawn(width)
            for name, (encoding, run) in subjects.items():
                errors[f"{name} {width}"] = gate(name, encoding, run, width)
            for length in options.keys:
                rows = measure(subjects, width, length)
                table += rows
                for row in rows:
                    print(_line(row), flush=True)
                record(options.out, recipe=recipe, values={"gate": errors, "times": table}, device="cuda")
    print(f"gate: {len(errors)} implementations within bounds")
    return 0


def _line(row: dict) -> str:
    return (
        f"{row['width']:4d} {row['keys']:6d} {row['subject']:34s} {row['ms']['median'] * 1e3:9.1f} us "
        f"{row['gb_per_s']:6.0f} GB/s {row['share_of_copy']:5.2f} of copying"
    )


if __name__ == "__main__":
    sys.exit(main())
