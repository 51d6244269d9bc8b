"""flash-attn-4's kernels, launched by ourselves, give its interface's bits; one kernel serves all lengths."""

import inspect

import pytest
import torch

from phasewise.kernels.packages import flash_obstacle
from phasewise.reference import EMPTY_LSE
from tests.kernels.separable_oracle import GPU, Case, holds

MODULE = "phasewise.kernels.flash"
runs = GPU and torch.cuda.get_device_capability()[0] == 9 and flash_obstacle(MODULE) is None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not runs, reason="needs a Hopper GPU and flash-attn-4 of the version it is written for"
    ),
]
HALF = torch.bfloat16


def tensors(queries, keys, width, *, heads=4, group=1, rows=2):
    generator = torch.Generator("cuda").manual_seed(queries + keys)

    def normal(count, length):
        shape = (rows, length, count, width)
        return torch.randn(shape, generator=generator, device="cuda", dtype=HALF).transpose(1, 2)

    q, dout = normal(heads, queries), normal(heads, queries)
    return q, normal(heads // group, keys), normal(heads // group, keys), dout


@pytest.mark.parametrize(
    ("queries", "keys", "width", "options"),
    [
        (1, 1, 64, {}),
        (111, 111, 64, {}),
        (1025, 1025, 64, {"group": 2}),
        (300, 1025, 128, {"group": 4, "rows": 1}),
        (700, 700, 64, {"group": 3, "heads": 6}),
        (217, 217, 96, {}),
        (217, 217, 256, {}),
        (513, 513, 128, {"causal": False}),
        (777, 777, 64, {"window": 100}),
        (300, 400, 128, {"window": 64, "causal": False, "group": 2}),
    ],
)
def test_output_and_gradients_are_those_of_its_interface(queries, keys, width, options, monkeypatch):
    from flash_attn.cute import interface

    from phasewise.kernels import flash, flash_backward

    monkeypatch.setattr(flash, "launch", lambda *_, **__: {"queries": 0})
    view = {"causal": options.pop("causal", True), "window": options.pop("window", None)}
    q, k, v, dout = tensors(queries, keys, width, **options)
    out, lse = flash.forward(q, k, v, scale=0.125, **view)
    into = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    dlse = torch.randn_like(lse) if width == 64 else None
    flash_backward.backward(q, k, v, out, lse, dout, dlse, into[1:], scale=0.125, **view).write(into[0])

    left, right = flash.sides_of(**view)
    theirs = {
        "softmax_scale": 0.125,
        "causal": view["causal"],
        "window_size_left": left,
        "window_size_right": right,
    }
    placewise = [x.transpose(1, 2) for x in (q, k, v, dout)]
    with flash.quiet():
        expected, their_lse = interface._flash_attn_fwd(*placewise[:3], return_lse=True, **theirs)[:2]
        grads = interface._flash_attn_bwd(
            *placewise[:3], expected, placewise[3], their_lse, deterministic=True, dlse=dlse, **theirs
        )
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(lse, their_lse)
    for mine, right in zip(into, grads, strict=True):
        assert torch.equal(mine.transpose(1, 2), right)


def test_a_row_whose_window_shows_nothing_gives_zero_and_a_finite_log_sum_exp():
    from phasewise.kernels import flash, flash_backward

    view = {"causal": True, "window": 50}
    q, k, v, dout = tensors(300, 100, 64)
    out, lse = flash.forward(q, k, v, scale=0.125, **view)
    into = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    flash_backward.backward(q, k, v, out, lse, dout, None, into[1:], scale=0.125, **view).write(into[0])
    blind = 200  # query t sits at t - 200
    assert (lse[..., :blind] == EMPTY_LSE).all()
    assert (lse[..., blind:] > -100).all()
    assert not out[:, :, :blind].any()
    assert not into[0][:, :, :blind].any()
    assert all(x.isfinite().all() for x in (out, lse, *into))


@pytest.mark.parametrize(
    ("queries", "keys", "width", "options"),
    [
        (700, 700, 64, {"heads": 16, "rows": 8}),
        (300, 1025, 64, {"heads": 32, "group": 8, "rows": 8}),
        (2048, 2048, 128, {"heads": 16, "rows": 4}),
        (700, 63, 64, {"heads": 32, "rows": 8}),
    ],
)
def test_programs_that_stay_for_many_tiles_give_the_same_bits_every_time(
    queries, keys, width, options, monkeypatch
):
    from flash_attn.cute import interface

    from phasewise.kernels import flash, prepare

    def poisoned(x, width):
        return prepare.expanded_like(x, width).fill_(torch.nan)

    monkeypatch.setattr(flash, "expanded_like", poisoned)
    q, k, v, _ = tensors(queries, keys, width, **options)
    seen = {"scale": 0.125, "causal": True, "window": None}
    with flash.quiet():
        expected, their_lse = interface._flash_attn_fwd(
            *(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=0.125, causal=True, return_lse=True
        )[:2]
    flash.forward(q, k, v, **seen)  # compiles
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        replayed = flash.forward(q, k, v, **seen)
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        graph.replay()
        with torch.cuda.stream(stream):
            beside = flash.forward(q, k, v, **seen)
        torch.cuda.synchronize()
        for out, lse in (replayed, beside):
            assert torch.equal(out.transpose(1, 2), expected)
            assert torch.equal(lse, their_lse.clamp_min(EMPTY_LSE))


CASES = [
    Case(length, length, width=64, v_width=64, preparation=preparation, dtype=HALF, body="flash")
    for length in (1, 2, 15, 111, 1023)
    for preparation in ("rope", "softplus", "none")
] + [
    Case(
        513, 513, width=64, v_width=64, heads=4, group=2, rows=2, preparation="rope", dtype=HALF, body="flash"
    ),
    Case(217, 63, width=64, v_width=64, preparation="rope", dtype=HALF, body="flash"),
    Case(63, 217, width=128, v_width=128, preparation="rope", dtype=torch.float16, body="flash"),
    Case(217, 217, width=96, v_width=64, preparation="softplus", dtype=HALF, body="flash"),
    Case(217, 63, width=64, v_width=64, preparation="softplus", dtype=HALF, body="flash"),
    Case(217, 217, width=24, v_width=40, preparation="rope", dtype=HALF, body="flash"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_length_is_within_twice_the_eager_error(case):
    holds(case)


def turned(x, angle):
    first, second = x.chunk(2, -1)
    cos, sin = angle[:, None].double().cos(), angle[:, None].double().sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def test_keys_turned_back_where_their_gradient_is_made_are_more_exact_than_after_it_was_rounded(monkeypatch):
    from phasewise.kernels import flash_backward, separable

    length, width = 300, 128
    q, k, v, dout = tensors(length, length, width)
    angle = (torch.rand(2, length, width // 2, device="cuda") * 2 - 1) * torch.pi
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    scores = 0.125 * turned(exact[0], angle) @ turned(exact[1], angle).transpose(-1, -2)
    hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ exact[2]
    right = torch.autograd.grad(expected, exact, dout.double())

    def gradients():
        out, _ = separable.rope(
            *leaves, angle, angle, 1.0, scale=0.125, causal=True, window=None, body="flash"
        )
        return torch.autograd.grad(out, leaves, dout)

    here = gradients()
    monkeypatch.setattr(flash_backward, "_turns", lambda *_: False)
    after = gradients()
    assert torch.equal(here[0], after[0])
    assert torch.equal(here[2], after[2])
    assert (here[1] - right[1]).norm() < (after[1] - right[1]).norm()


def test_a_kernel_from_disk_gives_the_bits_of_one_that_was_just_compiled(tmp_path, monkeypatch):
    import quack.cache

    from phasewise.kernels import flash

    monkeypatch.setattr(quack.cache, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(quack.cache, "CACHE_ENABLED", True)
    make = inspect.unwrap(flash.compiled_forward)
    q, k, v, _ = tensors(300, 300, 64)

    def run():
        monkeypatch.setattr(flash, "compiled_forward", flash.kept(make))
        return flash.forward(q, k, v, scale=0.125, causal=True, window=None)

    compiled = run()
    (kept,) = tmp_path.rglob("*.o")
    written = kept.stat().st_mtime_ns
    assert all(torch.equal(x, y) for x, y in zip(run(), compiled, strict=True))
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")] == [written]
