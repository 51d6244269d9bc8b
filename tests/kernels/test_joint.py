"""The backward in one pass for separable scores: what it serves, and on a GPU that it is the equation."""

from multiprocessing import get_context
from threading import Barrier
from time import monotonic

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import joint, tapa_turns, tiles
from tests.kernels.separable_oracle import GPU, Case, fused, holds, inputs_of, needs_hopper

pytestmark = [pytest.mark.gpu] if GPU else []
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


@pytest.mark.parametrize("length", [1, 63, 64, 65, 129, 1000, 1025])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (2, 2), (6, 2), (6, 3), (16, 16), (12, 4)])
@pytest.mark.parametrize("together", [1, 2, 3, 16])
def test_programs_one_after_another_never_wait_and_a_heads_order_is_its_own(
    length, heads, key_heads, together, monkeypatch
):
    """The least that a device grants: a program that has begun is run, in whatever order programs begin."""
    for name, function in (("minimum", min), ("maximum", max), ("cdiv", tiles.ceil_div), ("where", chosen)):
        monkeypatch.setattr(joint.gl, name, function)
    monkeypatch.setattr(joint, "turn_of", tapa_turns.turn_of.fn)
    key_tiles, block_m, block_n = tiles.ceil_div(length, 128), 64, 128
    turns = {(head, m): 0 for head in range(heads) for m in range(0, length, block_m)}
    for ticket in range(heads * key_tiles):
        head, tile, way = tapa_turns.work_of.fn(ticket, heads, together, key_tiles, 2 - key_heads % 2)
        assert way == (head % key_heads % 2 if key_heads % 2 == 0 else 0)
        low, _, count = tapa_turns.queries_of.fn(tile, length, length, block_m, block_n)
        for m in range(low, low + count * block_m, block_m)[:: 1 - 2 * way]:
            assert turns[head, m] == joint.turn_in.fn(1 - 2 * way, tile, m, length, block_m, block_n)
            turns[head, m] += 1
    assert turns == {(head, m): (min(m + block_m, length) - 1) // block_n + 1 for head, m in turns}


def chosen(condition: bool, one: int, other: int) -> int:
    """Gluon's choice of numbers as Python's."""
    return one if condition else other


@needs_hopper
@pytest.mark.slow
def test_bits_repeat_beside_other_processes():
    widths = [(128, 128), (128, 128), (128, 64), (64, 64)]
    spawn = get_context("spawn")
    start = spawn.Barrier(len(widths))
    processes = [spawn.Process(target=repeat, args=(*pair, start)) for pair in widths]
    for process in processes:
        process.start()
    end = monotonic() + 240
    for process in processes:
        process.join(max(0.0, end - monotonic()))
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(widths)


def repeat(width: int, v_width: int, start: Barrier) -> None:
    """The same call 100 times, at once with other processes; of any statistics of rows."""
    generator = torch.Generator("cuda").manual_seed(0)

    def call(rows: int) -> tuple[Tensor, ...]:
        q, k, v, dout, lse2, delta = drawn[rows]
        into = torch.empty_like(k), torch.empty_like(v)
        options = {"scale": width**-0.5, "by_channels": width > v_width}
        return joint.backward(q, k, v, dout, lse2, delta, into, **options), *into

    def draw(rows: int) -> list[Tensor]:
        shapes = [(rows, 16, 1024, columns) for columns in (width, width, v_width, v_width)]
        wide = [torch.randn(shape, generator=generator, device="cuda", dtype=half) for shape in shapes]
        level = torch.randn(2, rows, 16, 1024, generator=generator, device="cuda")
        return [*wide, level[0] + 10, level[1]]

    drawn = {rows: draw(rows) for rows in (1, 64)}
    call(1)
    torch.cuda.synchronize()
    start.wait(200)
    first = call(64)
    for _ in range(100):
        assert all(torch.equal(*pair) for pair in zip(first, call(64), strict=True))
