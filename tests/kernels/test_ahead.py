"""Queries and keys prepared beside flash-attn-4's forward: for whom, and with the results of preparing them before."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import ahead
from phasewise.kernels.ahead import Plan
from phasewise.kernels.packages import flash_obstacle
from tests.kernels.separable_oracle import GPU, Case, call, holds, inputs_of

runs = (
    GPU and torch.cuda.get_device_capability()[0] == 9 and flash_obstacle("phasewise.kernels.flash") is None
)
hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not runs, reason="needs a Hopper GPU and flash-attn-4 of the version it is written for"
    ),
]
HALF = torch.bfloat16
FEW = {"rope": Plan(3, 2, 2), "softplus": Plan(0, 5, 2)}


def planned(
    monkeypatch,
    *,
    body="flash",
    programs=16,
    queries=2048,
    keys=2048,
    heads=16,
    group=1,
    rows=16,
    width=64,
    v_width=64,
    **view,
):
    monkeypatch.setattr(ahead, "launch", lambda *_, **__: {"programs": programs, "tiles": 8})
    monkeypatch.setattr(ahead, "multiprocessors", lambda _: 132)
    like = {"dtype": HALF, "device": "meta"}
    q = torch.empty(rows, heads, queries, width, **like)
    k = torch.empty(rows, heads // group, keys, width, **like)
    v = torch.empty(rows, heads // group, keys, v_width, **like)
    view = {"angles": width // 2, "preparation": "rope", "causal": True, "window": None} | view
    return ahead.plan(body, q, k, v, view.pop("angles"), view.pop("preparation"), **view)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (8, 8, 16)),
        ({"queries": 8192, "keys": 8192}, (8, 8, 4)),
        ({"queries": 300, "rows": 64}, (2, 14, 64)),
        ({"group": 4}, (13, 3, 4)),
        ({"group": 16, "programs": 2}, (1, 1, 1)),
        ({"preparation": "softplus", "angles": 64}, (0, 16, 16)),
        ({"body": "hopper", "group": 4}, (13, 3, 16)),
        (
            {"body": "hopper", "preparation": "softplus", "angles": 64, "queries": 1500, "rows": 64},
            (8, 8, 16),
        ),
        ({"body": "hopper", "width": 24, "angles": 12, "v_width": 24}, (8, 8, 16)),
    ],
)
def test_programs_are_shared_out_by_work_and_heads_at_a_time_keep_the_device_busy(
    monkeypatch, sizes, expected
):
    assert planned(monkeypatch, **sizes) == expected


@pytest.mark.parametrize(
    "reason",
    [
        {"causal": False},
        {"window": 100},
        {"keys": 1024},
        {"angles": 16},
        {"width": 24, "angles": 12},
        {"width": 24, "angles": 24, "preparation": "softplus"},
        {"v_width": 24},
        {"rows": 3},
        {"heads": 15, "group": 3},
        {"programs": 0},
    ],
)
def test_other_calls_have_theirs_prepared_before(monkeypatch, reason):
    assert planned(monkeypatch, **reason) is None


def tensors(
    queries, keys, width, preparation, *, heads=8, group=1, rows=2, dtype=HALF, angle_rows=1, phased=True,
    device="cuda",
):  # fmt: skip
    generator = torch.Generator(device).manual_seed(queries + keys + width)

    def normal(count, length):
        shape = (rows, length, count, width)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).transpose(1, 2)

    n = width // 2 if preparation == "rope" else width
    angle = (torch.rand(angle_rows, keys, n, generator=generator, device=device) * 2 - 1) * math.pi
    phased = phased and preparation != "rope"
    phase = None if not phased else -2 * math.pi * torch.rand(heads, n, device=device)
    return (
        normal(heads, queries), normal(heads // group, keys), normal(heads // group, keys),
        angle[:, keys - queries :].contiguous(), angle, phase,
    )  # fmt: skip


def beside(given, preparation, plan):
    from phasewise.kernels import flash_ahead

    settings = {"preparation": preparation, "factor": 1.5, "scale": 0.125}
    out, lse, q, k = flash_ahead.forward(*given, plan=plan, **settings)
    return (out, lse, k) if q is None else (out, lse, k, q)


def before(given, preparation):
    from phasewise.kernels import prepare

    q, k, _, q_angle, k_angle, phase = given
    if preparation == "rope":
        return prepare.rotate(q, k, q_angle, k_angle, 1.5)
    return prepare.polar(q, k, q_angle, k_angle, phase, preparation)


def plans(preparation):
    if preparation == "rope":
        return Plan(1, 1, 1), Plan(30, 10, 4), Plan(66, 66, 64)
    return Plan(0, 1, 1), Plan(0, 40, 4), Plan(0, 132, 64)


CALLS = [
    (1, 1, 64, "rope", {}),
    (700, 700, 64, "softplus", {}),
    (2049, 2049, 128, "rope", {}),
    (2049, 2049, 128, "softplus", {}),
    (100, 900, 64, "relu", {}),
    (513, 513, 96, "rope", {}),
    (700, 700, 64, "rope", {"group": 4}),
    (333, 500, 64, "softplus", {"heads": 16, "group": 16, "rows": 3}),
    (63, 63, 96, "softplus", {"angle_rows": 2}),
    (300, 300, 128, "identity", {"phased": False, "dtype": torch.float16}),
    (700, 700, 128, "rope", {"dtype": torch.float16, "heads": 6}),
]
MATRIX = [
    *CALLS,
    (300, 1025, 128, "softplus", {"group": 8, "angle_rows": 2}),
    (100, 300, 64, "softplus", {"heads": 64, "group": 64, "rows": 1}),
]


def poisoned(x, width):
    """`prepare.expanded_like` where memory is not zero by chance."""
    from phasewise.kernels import prepare

    return prepare.expanded_like(x, width).fill_(torch.nan)


@pytest.mark.parametrize(("queries", "keys", "width", "preparation", "options"), MATRIX)
class TestOnHopper:
    pytestmark = hopper

    def test_what_is_prepared_is_within_one_rounding_and_attention_is_that_of_one_after_the_other(
        self, queries, keys, width, preparation, options, monkeypatch
    ):
        from phasewise.kernels import flash, flash_ahead

        monkeypatch.setattr(flash_ahead, "expanded_like", poisoned)
        given = tensors(queries, keys, width, preparation, **options)
        exact = before([None if x is None else x.float() for x in given], preparation)
        expanded, _ = before(given, preparation)
        for plan in plans(preparation):
            out, lse, *made = beside(given, preparation, plan)
            for actual, right in zip(made, reversed(exact), strict=False):
                assert actual.isfinite().all()
                bound = torch.finfo(actual.dtype).eps * right.abs() + 2e-5 * right.abs().max()
                assert ((actual.float() - right).abs() <= bound).all()
            k, *rotated = made
            (q,) = rotated or [expanded]
            expected = flash.forward(q, k, given[2], scale=0.125, causal=True, window=None)
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])


CASES = [
    Case(217, 217, width=64, v_width=64, preparation="rope", rows=3, dtype=HALF, body="flash"),
    Case(63, 217, width=64, v_width=64, heads=4, group=2, preparation="softplus", dtype=torch.float16, body="flash"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
class TestTheOperator:
    pytestmark = hopper

    def test_is_within_twice_the_eager_error_with_gradients(self, case, monkeypatch):
        monkeypatch.setattr(ahead, "plan", lambda *_, **__: FEW[case.preparation])
        holds(case)


@pytest.mark.parametrize("preparation", ["rope", "softplus"])
class TestRepeatedly:
    pytestmark = hopper

    def given(self, preparation):
        return tensors(2048, 2048, 64, preparation, heads=16, rows=4)

    def test_bits_are_the_same_call_after_call(self, preparation):
        given = self.given(preparation)
        first = beside(given, preparation, plans(preparation)[1])
        for _ in range(20):
            assert all(map(torch.equal, beside(given, preparation, plans(preparation)[1]), first))

    def test_a_graph_replays_it(self, preparation):
        given = self.given(preparation)
        expected = beside(given, preparation, plans(preparation)[1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = beside(given, preparation, plans(preparation)[1])
        for _ in range(3):
            for x in captured:
                x.fill_(torch.nan)
            graph.replay()
            assert all(map(torch.equal, captured, expected))

    def test_a_compiled_caller_gets_it_whole(self, preparation, monkeypatch):
        monkeypatch.setattr(ahead, "plan", lambda *_, **__: FEW[preparation])
        case = Case(217, 217, width=64, v_width=64, preparation=preparation, dtype=HALF, body="flash")
        inputs = inputs_of(case)
        compiled = torch.compile(lambda tensors: call(case, inputs, tensors), fullgraph=True)
        for actual, right in zip(compiled(inputs.tensors), call(case, inputs, inputs.tensors), strict=True):
            assert torch.equal(actual, right)

    def test_two_streams_at_once_do_not_meet(self, preparation):
        given = self.given(preparation)
        expected = beside(given, preparation, plans(preparation)[2])
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = []
        torch.cuda.synchronize()
        for _ in range(5):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(beside(given, preparation, plans(preparation)[2]))
        torch.cuda.synchronize()
        assert all(all(map(torch.equal, result, expected)) for result in results)
