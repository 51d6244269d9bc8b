"""What attention costs on this CPU: `phasewise bench cpu --out results/cpu`.

Writes attention.json, the time of PoPE and NoPE against RoPE through sdpa, and reference-memory.json, the
peak memory of the blocked reference by length. Letters: T places, H heads, D head dim.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from phasewise.attention import attention
from phasewise.encodings import TAPA, Encoding, NoPE, PoPE, RoPE
from phasewise.interrupt import unheard
from phasewise.record import ready, record

SEED = 0
HEADS, HEAD_DIM, LENGTH = 8, 64, 2048
PAIRS = 21
POPE_LIMIT = 1.7  # times RoPE
MEMORY_LENGTHS = (2048, 4096, 8192, 16384)
MEMORY_HEADS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="phasewise bench cpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the records")
    out = parser.parse_args(arguments).out
    ready(out / "attention.json")
    for name, measure in (("attention", attention_times), ("reference-memory", reference_memory)):
        recipe, values = measure()
        record(out / f"{name}.json", recipe=recipe, values=values)
        print(f"{out / name}.json")
    return 0


def attention_times() -> tuple[dict[str, object], dict[str, object]]:
    """Times of each encoding through sdpa paired with RoPE's, once its output has passed the gate."""
    rope = RoPE(head_dim=HEAD_DIM)
    values: dict[str, object] = {"limit_pope_forward": POPE_LIMIT}
    encodings = {"nope": NoPE(), "pope": PoPE(num_heads=HEADS, head_dim=HEAD_DIM)}
    q, k, v = _inputs(HEADS, LENGTH)
    for encoding in (rope, *encodings.values()):
        _gate(q[:, :, -256:], k, v, encoding)
    for name, encoding in encodings.items():
        for direction, run in (("forward", _forward), ("forward_backward", _forward_backward)):
            row = _paired(partial(run, q, k, v, encoding), partial(run, q, k, v, rope))
            values[f"{name}_{direction}"] = asdict(row)
            low, high = row.ratio_quartiles
            print(f"{name} {direction}: {row.median_ms:.1f} ms, rope {row.rope_median_ms:.1f} ms,", end=" ")
            print(f"ratio {row.ratio_median:.2f} (quartiles {low:.2f} to {high:.2f})")
    recipe = {
        "what": "attention(impl='sdpa'), causal, no positions given, the encoding's own work included",
        "batch": 1,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "length": LENGTH,
        "dtype": "float32",
        "pairs": PAIRS,
        "seeds": [SEED],
        "ratio": "each run over the RoPE run next to it; median and quartiles over the pairs",
    }
    return recipe, values


def reference_memory() -> tuple[dict[str, object], dict[str, object]]:
    """Peak memory that TAPA through the reference adds, forward and backward, in a fresh process each."""
    peaks = {}
    for length in MEMORY_LENGTHS:
        with unheard():
            pool = multiprocessing.get_context("spawn").Pool(1)
        with pool:
            peaks[length] = pool.apply(_peak_mebibytes, (length,))
        scores = MEMORY_HEADS * length**2 * 4 / 2**20
        print(f"reference, {length} places: {peaks[length]:.0f} MiB; all scores at once {scores:.0f} MiB")
    first, last = MEMORY_LENGTHS[0], MEMORY_LENGTHS[-1]
    recipe = {
        "what": "attention(impl='reference') with TAPA, forward and backward, one fresh process a length",
        "measured": "peak resident memory over that before the inputs were made (Linux: VmHWM)",
        "batch": 1,
        "heads": MEMORY_HEADS,
        "head_dim": HEAD_DIM,
        "dtype": "float32",
        "seeds": [SEED],
    }
    values = {
        "peak_mebibytes": {str(length): round(peak, 1) for length, peak in peaks.items()},
        "growth": peaks[last] / peaks[first],
        "length_growth": last / first,
    }
    return recipe, values


def _inputs(heads: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    q, k, v = (
        torch.randn(1, heads, length, HEAD_DIM, generator=generator).requires_grad_() for _ in range(3)
    )
    return q, k, v


def _forward(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding) -> None:
    with torch.no_grad():
        attention(q, k, v, encoding, impl="sdpa")


def _forward_backward(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding) -> None:
    out = attention(q, k, v, encoding, impl="sdpa")
    torch.autograd.grad(out, (q, k, v), grad_outputs=out.detach())


@torch.no_grad()
def _gate(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding) -> None:
    """No time without a right answer: at most twice the float32 reference's error against float64."""
    exact = attention(q.double(), k.double(), v.double(), encoding, impl="reference")
    eager = (attention(q, k, v, encoding, impl="reference") - exact).abs().max()
    error = (attention(q, k, v, encoding, impl="sdpa") - exact).abs().max()
    rounding = exact.abs().max() * torch.finfo(torch.float32).eps
    if error > 2 * eager + rounding:
        raise RuntimeError(
            f"{encoding.kind} through sdpa is off by {error:.1e}, the reference by {eager:.1e}: not timed"
        )


@dataclass(frozen=True)
class Paired:
    """Medians of two things timed in turn, and of the ratio of each pair."""

    median_ms: float
    rope_median_ms: float
    ratio_median: float
    ratio_quartiles: tuple[float, float]


def _paired(run: Callable[[], None], rope: Callable[[], None]) -> Paired:
    run()
    rope()
    own, others = [], []
    for pair in range(PAIRS):
        both = [(run, own), (rope, others)]
        for measured, times in both if pair % 2 else reversed(both):
            start = time.perf_counter()
            measured()
            times.append((time.perf_counter() - start) * 1e3)
    low, median, high = statistics.quantiles([a / b for a, b in zip(own, others, strict=True)], n=4)
    return Paired(statistics.median(own), statistics.median(others), median, (low, high))


def _peak_mebibytes(length: int) -> float:
    encoding = TAPA(head_dim=HEAD_DIM)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak so far, that of the imports, is forgotten
    before = _peak_kibibytes()
    q, k, v = _inputs(MEMORY_HEADS, length)
    out = attention(q, k, v, encoding, impl="reference")
    out.backward(torch.ones_like(out))
    return (_peak_kibibytes() - before) / 1024


def _peak_kibibytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


if __name__ == "__main__":
    sys.exit(main())
