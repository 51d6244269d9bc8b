"""The backward in one pass for separable scores: what it serves, and on a GPU that it is the equation."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import tiles
from tests.kernels.separable_oracle import GPU, Case, fused, holds, inputs_of

pytestmark = [pytest.mark.gpu] if GPU else []
needs_hopper = pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
half, short = torch.bfloat16, torch.float16


@pytest.fixture
def made(monkeypatch):
    """How often the one pass is taken, where it can be."""
    from phasewise.kernels import library

    choose, backward, calls = tiles.launch, library._joint_backward, []

    def launch(kernel: str, x: Tensor, **sizes: int) -> dict:
        return {"body": "joint"} if kernel.endswith(".backward") else choose(kernel, x, **sizes)

    monkeypatch.setattr(tiles, "launch", launch)
    monkeypatch.setattr(library, "_joint_backward", lambda *a, **k: (calls.append(a), backward(*a, **k))[1])
    return calls


@pytest.mark.parametrize(
    "case",
    [
        Case(20, 20, causal=False),
        Case(20, 20),
        Case(20, 30),
        Case(20, 20, 32, 64, preparation="softplus"),
        Case(20, 20, 64, 128, preparation="softplus"),
        Case(20, 20, 128, 64, preparation="rope"),
    ],
    ids=str,
)
def test_what_the_one_pass_does_not_serve_goes_another_way(case, made):
    holds(case)
    assert made == []


CASES = [
    *(Case(n, n, 64, 64, preparation="softplus", dtype=half) for n in (1, 63, 64, 65, 127, 129, 1000, 2049)),
    *(Case(n, n, 64, 64, heads=6, group=3, rows=2, preparation="softplus", dtype=half) for n in (65, 500)),
    Case(300, 300, 64, 64, preparation="relu", dtype=short),
    Case(1023, 1023, 64, 64, rows=3, preparation="softplus", dtype=short),
    *(Case(n, n, 64, 64, heads=4, group=2, preparation="rope", dtype=half) for n in (1, 333)),
    *(Case(n, n, 128, 128, heads=4, group=2, preparation="rope", dtype=half) for n in (64, 333)),
    Case(700, 700, 64, 64, dtype=short),
    Case(700, 700, 128, 128, heads=4, rows=2, dtype=half),
]


@needs_hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_gradient_is_the_equation(case, made):
    holds(case)
    assert len(made) == 1


@needs_hopper
@pytest.mark.parametrize(
    "case",
    [
        Case(4096, 4096, 64, 64, heads=16, rows=2, preparation="softplus", dtype=half),
        Case(8192, 8192, 64, 64, heads=8, group=4, preparation="softplus", dtype=half),
        Case(2048, 2048, 64, 64, heads=16, rows=4, preparation="rope", dtype=half),
        Case(2048, 2048, 128, 128, heads=16, rows=4, dtype=half),
    ],
    ids=str,
)
def test_repeats_give_the_same_bits_in_whatever_order_programs_come(case, made):
    inputs = inputs_of(case)
    first, *others = (fused(case, inputs) for _ in range(4))
    assert made
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@needs_hopper
def test_what_memory_held_before_does_not_matter(made):
    case = Case(777, 777, 64, 64, heads=4, rows=2, preparation="softplus", dtype=half)
    inputs = inputs_of(case)
    clean = fused(case, inputs)
    torch.cuda.empty_cache()
    for _ in range(3):
        dirty = [torch.full((n,), float("nan"), device="cuda") for n in (2**20, 2**22, 2**24)]
        del dirty
        after = fused(case, inputs)
        assert all(torch.equal(clean[name], after[name]) for name in clean)
    assert made
