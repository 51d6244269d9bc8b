"""Queries and keys prepared beside our own forward for Hopper: as preparing them before does."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import ahead, hopper_ahead, table
from phasewise.kernels.ahead import Plan
from tests.kernels.separable_oracle import GPU, Case, call, holds, inputs_of
from tests.kernels.test_ahead import CALLS, before, poisoned, tensors

HALF = torch.bfloat16
FEW = Plan(3, 2, 2)
no_hopper = not GPU or torch.cuda.get_device_capability() != (9, 0)
hopper = [pytest.mark.gpu, pytest.mark.skipif(no_hopper, reason="needs compute capability 9.0")]


@pytest.mark.skipif(GPU, reason="in Triton's interpreter, without a GPU")
@pytest.mark.parametrize(
    ("queries", "keys", "preparation", "options"),
    [
        (19, 40, "softplus", {"group": 2, "angle_rows": 2}),
        (300, 300, "relu", {"rows": 1, "heads": 3, "phased": False}),
        (1, 7, "rope", {"heads": 34, "group": 17, "rows": 1}),
        (70, 70, "rope", {}),
    ],
)
def test_few_programs_prepare_all_and_count_it(queries, keys, preparation, options, monkeypatch):
    monkeypatch.setattr(hopper_ahead, "ELEMENTS", 512)
    given = tensors(queries, keys, 16, preparation, dtype=torch.float32, device="cpu", **options)
    q, k, _, q_angle, k_angle, phase = given
    settings = {"preparation": preparation, "factor": 1.5}
    expected = before(given, preparation)
    for programs in (Plan(1, 1, 1), FEW, Plan(40, 40, 1)):
        *made, awaited = hopper_ahead.prepare(q, k, q_angle, k_angle, phase, programs, **settings)
        assert all(map(torch.equal, made, expected))
        drawn, *done = awaited.counts.tolist()
        assert drawn == 0
        assert set(done) == {awaited.units}
        assert awaited.heads == q.shape[0] * q.shape[1] // len(done)
    same, made, _ = hopper_ahead.prepare(q, k, q_angle, k_angle, phase, Plan(0, 3, 1), **settings)
    assert same is q
    assert torch.equal(made, expected[1])


def beside(given, preparation, plan):
    settings = {"preparation": preparation, "factor": 1.5, "scale": 0.125}
    return hopper_ahead.forward(*given, plan=plan, **settings)


def one_after_the_other(given, preparation):
    from phasewise.kernels import hopper_forward

    q, k = before(given, preparation)
    return *hopper_forward.forward(q, k, given[2], scale=0.125, causal=True), q, k


MATRIX = [
    *CALLS,
    (300, 1025, 128, "softplus", {"heads": 24, "group": 3, "angle_rows": 2}),
    (217, 217, 40, "softplus", {"heads": 7}),
]


@pytest.mark.parametrize(("queries", "keys", "width", "preparation", "options"), MATRIX)
class TestOnHopper:
    pytestmark = hopper

    def test_bits_are_those_of_one_after_the_other_but_for_a_rounding_of_rotations_where_memory_is_nan(
        self, queries, keys, width, preparation, options, monkeypatch
    ):
        from phasewise.kernels import hopper_forward

        given = tensors(queries, keys, width, preparation, **options)
        expected = before(given, preparation)
        monkeypatch.setattr(hopper_ahead, "expanded_like", poisoned)
        for plan in (Plan(1, 1, 1), Plan(20, 20, 4), Plan(66, 66, 64)):
            *attended, q, k = beside(given, preparation, plan)
            right = hopper_forward.forward(q, k, given[2], scale=0.125, causal=True)
            assert all(map(torch.equal, attended, right))
            for made, other in zip((q, k), expected, strict=True):
                other = other.float()
                rounding = torch.finfo(made.dtype).eps * other.abs() + 2e-5 * other.abs().max()
                assert ((made.float() - other).abs() <= (preparation == "rope") * rounding).all()


class TestStrides:
    pytestmark = hopper

    def test_strided_tensors_are_read_as_they_are_and_values_by_channels_copied_first(self):
        _, _, _, *turned = tensors(300, 300, 64, "softplus")
        wide = torch.randn(2, 300, 3, 8, 160, device="cuda", dtype=HALF)
        q, k, v = (wide[:, :, part, :, 8:72].transpose(1, 2) for part in range(3))
        for values in (v, wide[:, :, 2, :, ::2].transpose(1, 2)):
            given = (q, k, values, *turned)
            expected = one_after_the_other(given, "softplus")
            assert all(map(torch.equal, beside(given, "softplus", FEW), expected))


@pytest.fixture
def chosen(monkeypatch):
    """Our forward for Hopper is taken, with few programs beside it."""
    choose = table.chosen

    def always(kernel, *call):
        return {"body": "hopper"} if kernel == "separable.triton.forward" else choose(kernel, *call)

    monkeypatch.setattr(table, "chosen", always)
    monkeypatch.setattr(ahead, "plan", lambda *_, **__: FEW)


CASES = [
    Case(217, 217, width=64, v_width=64, preparation="rope", rows=3, dtype=HALF),
    Case(63, 217, width=64, v_width=64, heads=4, group=2, preparation="softplus", dtype=torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("chosen")
class TestTheOperator:
    pytestmark = hopper

    def test_is_within_twice_the_eager_error_with_gradients(self, case):
        holds(case)

    def test_a_compiled_caller_gets_it_whole(self, case):
        inputs = inputs_of(case)
        compiled = torch.compile(lambda tensors: call(case, inputs, tensors), fullgraph=True)
        assert all(map(torch.equal, compiled(inputs.tensors), call(case, inputs, inputs.tensors)))


@pytest.mark.parametrize("preparation", ["rope", "softplus"])
class TestRepeatedly:
    pytestmark = hopper

    def given(self, preparation):
        return tensors(2048, 2048, 64, preparation, heads=16, rows=4)

    def test_bits_are_the_same_call_after_call_and_beside_another_stream(self, preparation):
        given = self.given(preparation)
        expected = beside(given, preparation, FEW)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        results = []
        for _ in range(8):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(beside(given, preparation, Plan(20, 20, 4)))
        torch.cuda.synchronize()
        assert all(all(map(torch.equal, result, expected)) for result in results)

    def test_a_graph_replays_it(self, preparation):
        given = self.given(preparation)
        expected = beside(given, preparation, FEW)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = beside(given, preparation, FEW)
        for _ in range(3):
            for x in captured:
                x.fill_(torch.nan)
            graph.replay()
            assert all(map(torch.equal, captured, expected))
