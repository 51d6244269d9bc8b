"""TAPA's one-pass backward: who waits for whom, what it serves and, on a GPU, that it is the equation."""

import math
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from phasewise.kernels import tapa, tapa_backward, tapa_joint, tapa_turns  # noqa: E402
from phasewise.kernels.table import launch_table  # noqa: E402
from phasewise.kernels.tapa_score import BEFORE, Score  # noqa: E402
from tests.kernels.test_tapa import DEVICE, GPU, definition, float32_definition, inputs  # noqa: E402

pytestmark = [pytest.mark.gpu] if GPU else []
SCORE = Score(amplitude_dim=32, scale=1.0, unit=1.0, linear=False, causal=True, window=None)


SIZES = [(1, 1), (63, 63), (64, 64), (65, 65), (129, 129), (1000, 1000)]  # queries and keys
SHORTER = [(1, 2), (1, 700), (15, 64), (63, 127), (64, 65), (65, 128), (200, 201), (200, 1000), (128, 1024)]
BLOCKS = [(64, 64), (32, 64), (64, 128), (128, 64)]


@pytest.fixture
def on_numbers(monkeypatch):
    """Gluon's functions of numbers as Python's."""
    monkeypatch.setattr(tapa_turns.gl, "minimum", min)
    monkeypatch.setattr(tapa_turns.gl, "maximum", max)
    monkeypatch.setattr(tapa_turns.gl, "cdiv", triton.cdiv)


@pytest.mark.usefixtures("on_numbers")
@pytest.mark.parametrize(("queries", "keys"), SIZES + SHORTER)
@pytest.mark.parametrize(("block_m", "block_n"), BLOCKS)
@pytest.mark.parametrize(("heads", "together"), [(1, 1), (1, 512), (7, 3), (6, 3), (2, 16)])
def test_programs_one_after_another_never_wait(queries, keys, block_m, block_n, heads, together):
    """The least that a device grants: a program that has begun is run, in whatever order programs begin."""
    key_tiles = triton.cdiv(keys, block_n)
    starts = range(0, queries, block_m)
    turns = {(head, m): 0 for head in range(heads) for m in starts}
    for ticket in range(heads * key_tiles):
        head, tile, _ = tapa_turns.work_of.fn(ticket, heads, together, key_tiles, 1)
        low, _, count = tapa_turns.queries_of.fn(tile, queries, keys, block_m, block_n)
        for m in range(low, low + count * block_m, block_m):
            turn = tapa_turns.turn_of.fn(tile, m, queries, keys, block_m, block_n)
            assert turns[head, m] == turn
            turns[head, m] = turn + 1
    last_seen = [min(m + block_m, queries) - 1 + keys - queries for m in starts]
    expected = [place // block_n + 1 for place in last_seen]
    assert turns == {(head, m): n for head in range(heads) for m, n in zip(starts, expected, strict=True)}


@pytest.mark.usefixtures("on_numbers")
@pytest.mark.parametrize(("queries", "keys"), SIZES + SHORTER)
@pytest.mark.parametrize(("block_m", "block_n"), BLOCKS)
def test_a_tile_of_keys_meets_the_queries_that_see_it_and_masks_those_that_see_a_part(
    queries, keys, block_m, block_n
):
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    for tile, columns in enumerate(seen.split(block_n, 1)):
        tiles = columns.split(block_m)
        meets = [m for m, rows in enumerate(tiles) if rows.any()]
        low, near, count = tapa_turns.queries_of.fn(tile, queries, keys, block_m, block_n)
        assert list(range(low // block_m, low // block_m + count)) == meets
        assert low % block_m == 0
        assert all(tiles[m].all() for m in meets[near:])
        assert columns.shape[1] < block_n or not any(tiles[m].all() for m in meets[:near])
        gap = low + keys - queries - (tile * block_n + block_n - 1)
        assert gap - 8 >= -BEFORE, "the table of powers has an entry for every difference"


def test_the_queries_gradient_is_read_where_threads_have_put_it(monkeypatch):
    monkeypatch.setattr(tapa_joint, "HELD", [8, 256])
    matrix = torch.arange(64 * 32).view(64, 32)
    stored = tapa_joint.as_held.fn(matrix).flatten()
    rows, columns = torch.arange(64)[:, None], torch.arange(32)
    assert torch.equal(stored[tapa_joint.held_at.fn(rows, columns)], matrix)


@pytest.mark.parametrize(
    ("score", "width", "v_width", "queries", "keys", "serves"),
    [
        (SCORE, 64, 64, 96, 96, True),
        (replace(SCORE, amplitude_dim=64), 128, 128, 96, 96, True),
        (replace(SCORE, amplitude_dim=16), 64, 64, 96, 96, False),
        (SCORE, 64, 32, 96, 96, False),
        (SCORE, 64, 64, 1024, 1500, True),
        (SCORE, 64, 64, 1023, 1500, False),
        (SCORE, 64, 64, 1500, 1499, False),
        (replace(SCORE, linear=True), 64, 64, 96, 96, False),
        (replace(SCORE, causal=False), 64, 64, 96, 96, False),
        (replace(SCORE, window=50), 64, 64, 96, 96, False),
    ],
)
def test_one_pass_serves_the_static_causal_case_at_the_widths_it_is_written_for(
    monkeypatch, score, width, v_width, queries, keys, serves
):
    monkeypatch.setattr(tapa_backward, "launch", lambda *_, **__: {"body": "joint", "queries": 1024})
    q, k, v = inputs(queries, keys, width=width, v_width=v_width, dtype=torch.float16)
    assert tapa_backward.one_pass(q, k, v, None, score) is serves


def gradients(function, tensors, **options):
    """Gradients by q, k and v of a fixed functional of outputs and log-sum-exps; alpha takes none."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*leaves, causal=True, window=None, **options)
    generator = torch.Generator().manual_seed(7)
    by_out = torch.randn(out.shape, generator=generator).to(DEVICE, tensors[0].dtype)
    by_lse = torch.randn(lse.shape, generator=generator).to(DEVICE)
    loss = (out.double() * by_out.double()).sum() + (lse.double() * by_lse.double()).sum()
    return [x.double() for x in torch.autograd.grad(loss, leaves)]


def one_pass_gradients(monkeypatch, tensors, **options):
    """`gradients` of the kernel, after a check that it was this one that made them."""
    for row in launch_table()["rows"]:
        if row["kernel"] == "tapa.chunks":
            monkeypatch.setitem(row["meta"], "queries", 1)
    calls = []
    backward = tapa_joint.backward
    monkeypatch.setattr(tapa_joint, "backward", lambda *given: (calls.append(given), backward(*given)))
    result = gradients(tapa.attend, tensors, **options)
    assert len(calls) == 1
    return result


needs_hopper = pytest.mark.skipif(
    not GPU or "H200" not in torch.cuda.get_device_name(), reason="its rows of the launch table are an H200's"
)


@needs_hopper
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(length, torch.bfloat16) for length in (1, 2, 63, 64, 65, 111, 217, 1023, 1025, 2048)]
    + [(length, torch.float16) for length in (217, 1025)],
)
def test_every_gradient_is_the_equation_at_odd_lengths(monkeypatch, length, dtype, width):
    assert_within_budget(monkeypatch, inputs(length, width=width, v_width=width, dtype=dtype), width)


@needs_hopper
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    "options",
    [{"alpha": 0.5}, {"alpha": 0.0, "two_pi": False}, {"alpha": 1.0, "two_pi": False, "scale": 0.3}],
)
def test_every_gradient_is_the_equation_for_every_option(monkeypatch, options, width):
    tensors = inputs(700, heads=6, groups=2, batch=2, width=width, v_width=width, dtype=torch.bfloat16)
    assert_within_budget(monkeypatch, tensors, width, **options)


@needs_hopper
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("queries", "keys", "dtype"),
    [(queries, 333, torch.bfloat16) for queries in (1, 15, 63, 64, 65, 200, 332)]
    + [(64, 65, torch.bfloat16), (64, 128, torch.bfloat16), (65, 1024, torch.bfloat16)]
    + [(1000, 1500, torch.bfloat16), (200, 333, torch.float16)],
)
def test_every_gradient_is_the_equation_for_queries_that_are_the_last_of_the_keys(
    monkeypatch, queries, keys, dtype, width
):
    tensors = inputs(queries, keys, width=width, v_width=width, dtype=dtype)
    assert_within_budget(monkeypatch, tensors, width)


@needs_hopper
@pytest.mark.parametrize("width", [64, 128])
def test_grouped_heads_and_rows_keep_apart_for_queries_that_are_the_last_of_the_keys(monkeypatch, width):
    tensors = inputs(150, 700, heads=6, groups=2, batch=2, width=width, v_width=width, dtype=torch.bfloat16)
    assert_within_budget(monkeypatch, tensors, width, alpha=0.5)


def assert_within_budget(monkeypatch, tensors, width, **options):
    """Twice the error of float32 arithmetic on the same inputs and two roundings, as for every kernel of TAPA."""
    options = {"alpha": 0.1, "amplitude_dim": width // 2, **options}
    exact = gradients(definition, tensors, **options)
    eager = gradients(float32_definition, tensors, **options)
    ours = one_pass_gradients(monkeypatch, tensors, **options)
    rounding = 2 * torch.finfo(tensors[0].dtype).eps
    flow = math.sqrt(tensors[0].shape[:3].numel() * width)
    for name, e, f, o in zip(("dq", "dk", "dv"), exact, eager, ours, strict=True):
        assert o.isfinite().all(), name
        error, budget = (o - e).norm(), 2 * (f - e).norm() + rounding * max(e.norm().item(), flow)
        assert error <= budget, f"{name}: {error:.3g} > {budget:.3g}"


@needs_hopper
@pytest.mark.parametrize("queries", [200, 4000, 8192])
@pytest.mark.parametrize("width", [64, 128])
def test_repeats_give_the_same_bits_however_many_programs_add(monkeypatch, width, queries):
    tensors = inputs(queries, 8192, heads=8, groups=8, width=width, v_width=width, dtype=torch.bfloat16)
    options = {"alpha": 0.1, "amplitude_dim": width // 2}
    first = one_pass_gradients(monkeypatch, tensors, **options)
    for _ in range(4):
        again = gradients(tapa.attend, tensors, **options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@needs_hopper
def test_strides_do_not_matter_in_one_pass(monkeypatch):
    tensors = inputs(200, heads=2, groups=2, width=64, v_width=64, dtype=torch.bfloat16)
    options = {"alpha": 0.1, "amplitude_dim": 32}
    plain = one_pass_gradients(monkeypatch, tensors, **options)
    wide = torch.cat(tensors, -1).transpose(1, 2).contiguous().transpose(1, 2)
    sliced = gradients(tapa.attend, wide.split(64, 3), **options)
    turned = gradients(tapa.attend, [x.mT.contiguous().mT for x in tensors], **options)
    for a, b, c in zip(plain, sliced, turned, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
