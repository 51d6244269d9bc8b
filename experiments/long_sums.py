"""Does a weight's gradient, summed over a quarter million tokens on the tensor cores, come out too short?

    python -m experiments.long_sums results/parallel/h200/long-sums.json

Gradient norms grow with the number of GPUs that share a row (docs/parallel.md). If an accumulator rounds toward zero
at each step, a sum shrinks the more, the longer it is, and one that is split into parts, each summed by itself and all
added in float32 afterwards, shrinks less. So a bfloat16 product over many tokens is held against float64, whole and
in parts: of terms of both signs, and of positive ones, whose sum grows with every step.
"""

import argparse
from itertools import product
from pathlib import Path

import torch

from phasewise.record import record

LENGTHS, PARTS, WIDTH = (65_536, 262_144), (1, 2, 4), 1024


def summed(x: torch.Tensor, y: torch.Tensor, parts: int, *, rounded: bool) -> torch.Tensor:
    """x^T y over all places, each part's product in bfloat16 (rounded, as under autocast) or float32."""
    kind = torch.bfloat16 if rounded else torch.float32
    pairs = zip(x.chunk(parts), y.chunk(parts), strict=True)
    products = [torch.mm(a.T, b, out_dtype=kind) for a, b in pairs]
    return torch.stack([product.float() for product in products]).sum(0)


def main(out: Path) -> None:
    device = torch.device("cuda")
    values = []
    for length, positive in product(LENGTHS, (False, True)):
        torch.manual_seed(0)
        x, y = (torch.randn(length, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(2))
        if positive:
            x, y = x.abs(), y.abs()
        pieces = zip(x.split(8192), y.split(8192), strict=True)
        exact = torch.stack([a.double().T @ b.double() for a, b in pieces]).sum(0)
        for rounded, parts in product((False, True), PARTS):
            found = summed(x, y, parts, rounded=rounded).double()
            along = ((found * exact).sum() / exact.square().sum() - 1).item()
            norm = (found.norm() / exact.norm() - 1).item()
            case = {"length": length, "positive": positive, "parts": parts, "rounded": rounded}
            values.append({**case, "norm_error": norm, "error_along_it": along})
            print(values[-1], flush=True)
    record(out, recipe={"width": WIDTH, "seeds": [0]}, values=values, device=device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.long_sums", description=__doc__)
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
