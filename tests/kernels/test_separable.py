"""Separable attention against softmax(scale <f(q), g(k)>) v, in the interpreter or on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import separable, tiles
from phasewise.kernels.library import separable as operator
from phasewise.kernels.library import separable_backward
from tests.kernels.separable_oracle import DEVICE, GPU, Case, call, fused, holds, inputs_of

pytestmark = [pytest.mark.gpu] if GPU else []

SMALL = [
    Case(17, 17),
    Case(1, 33, group=2),
    Case(20, 37, width=24, v_width=40, group=2, dtype=torch.float16),
    Case(21, 21, causal=False),
    Case(35, 35, window=7),
    Case(18, 30, causal=False, window=5),
    Case(33, 20),
    Case(33, 33, places="packed", window=9),
    Case(19, 19, rows=2, places="left-padded", preparation="softplus"),
    Case(19, 19, places="shuffled"),
    Case(17, 33, places="far", slopes=True, group=2),
    Case(20, 20, slopes=True),
    Case(17, 17, preparation="softplus", group=2),
    Case(17, 30, preparation="relu", places="far", dtype=torch.float16),
    Case(15, 15, preparation="rope"),
]


STORED = [
    Case(37, 37, preparation="softplus", width=16, v_width=24),
    Case(37, 37, preparation="softplus", width=24, v_width=16),
    Case(33, 33, preparation="identity", causal=False, group=2),
    Case(17, 17, width=40, group=2),
    Case(65, 65, preparation="softplus", width=8, v_width=8, rows=2),
    Case(65, 65, preparation="softplus", width=8, v_width=8, group=2, causal=False),
    Case(129, 129, width=8, v_width=8, heads=3),
]


@pytest.mark.skipif(GPU, reason="small tiles, for the interpreter; the matrix of the GPU has its own")
@pytest.mark.parametrize("case", STORED, ids=str)
def test_stored_score_gradients_give_the_same_gradients(case, monkeypatch):
    choose = tiles.launch

    def launch(kernel: str, x: Tensor, **sizes: int) -> dict:
        return {"body": "stored"} if kernel.endswith(".backward") else choose(kernel, x, **sizes)

    monkeypatch.setattr(tiles, "launch", launch)
    holds(case)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_output_and_gradients_are_within_twice_the_eager_error(case):
    holds(case)


def test_rows_that_see_nothing_give_zero_finite_and_no_gradient():
    case = Case(20, 12, causal=True)
    inputs = inputs_of(case)
    actual = fused(case, inputs)
    assert (actual["out"][:, :, :8] == 0).all()
    assert (actual["lse"][:, :, :8] == -1e30).all()
    assert (actual["q"][:, :, :8] == 0).all()
    assert all(x.isfinite().all() for x in actual.values())


@pytest.mark.parametrize(("rows", "queries", "keys"), [(1, 0, 5), (1, 5, 0), (0, 5, 5)])
def test_nothing_to_attend_to_gives_zero_and_gradients_laid_out_as_promised(rows, queries, keys):
    case = Case(queries, keys, rows=rows)
    leaves = [x.detach().contiguous().requires_grad_() for x in inputs_of(case).tensors.values()]
    out, lse = separable.attend(*leaves, scale=0.25, causal=True, window=None)
    assert out.shape == (*leaves[0].shape[:3], leaves[2].shape[3])
    assert not out.any()
    assert (lse == -1e30).all()
    arguments = (*(x.detach() for x in leaves), out.detach(), lse.detach(), out.detach(), None, *(None,) * 8,
                 "none", 1.0, 0.25, True, None, "triton")  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        promised = separable_backward(
            *(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments)
        )
    for x, fake in zip(separable_backward(*arguments), promised, strict=True):
        assert (x.shape, x.stride()) == (fake.shape, fake.stride())
        assert not x.any()


def test_a_packed_document_does_not_change_its_neighbour():
    case = Case(33, 33, places="packed")
    inputs = inputs_of(case)
    first = case.keys // 3
    out, _ = call(case, inputs, inputs.tensors)
    changed = {name: x.clone() for name, x in inputs.tensors.items()}
    for x in changed.values():
        x[:, :, :first] = 1e3
    other, _ = call(case, inputs, changed)
    assert torch.equal(out[:, :, first:], other[:, :, first:])


def test_two_backward_passes_give_the_same_bits():
    case = Case(33, 33, preparation="softplus", width=8, v_width=8)
    inputs = inputs_of(case)
    first, second = fused(case, inputs), fused(case, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_strides_do_not_matter():
    case = Case(17, 17)
    inputs = inputs_of(case)
    plain = fused(case, replace(inputs, tensors={n: x.contiguous() for n, x in inputs.tensors.items()}))
    spread = {name: torch.stack([x, x], -1)[..., 0] for name, x in inputs.tensors.items()}
    spread["v"] = inputs.tensors["v"][:, :1].expand(-1, 2, -1, -1)
    same = {**inputs.tensors, "v": inputs.tensors["v"][:, :1].repeat(1, 2, 1, 1)}
    actual, expected = (
        fused(case, replace(inputs, tensors=spread)),
        fused(case, replace(inputs, tensors=same)),
    )
    assert torch.equal(actual["out"], expected["out"])
    assert torch.equal(actual["q"], expected["q"])
    assert torch.equal(plain["k"], fused(case, inputs)["k"])


def test_a_copy_has_the_strides_of_its_shape_where_there_is_one_row_or_head():
    memory = torch.arange(121, dtype=torch.float16, device=DEVICE)
    misaligned = memory[1:].as_strided((1, 1, 5, 24), (7, 3, 24, 1))
    descriptor = tiles.describe(misaligned, 16, 32)
    assert descriptor.strides == [120, 120, 24, 1]
    assert torch.equal(descriptor.base, misaligned)


def test_strides_of_angles_phase_and_slopes_do_not_matter():
    case = Case(17, 17, preparation="softplus", slopes=True)
    inputs = inputs_of(case)
    q, k, v, phase = (x.detach() for x in inputs.tensors.values())
    assert inputs.angles is not None
    heads = phase.shape[0]
    dense = (*inputs.angles, phase, torch.arange(1.0, heads + 1, device=DEVICE))
    spread = (*(x.mT.contiguous().mT for x in dense[:3]), dense[3].repeat_interleave(2)[::2])
    results = []
    for q_angle, k_angle, turn, slopes in (dense, spread):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)] + [turn.detach().requires_grad_()]
        out, _ = separable.pope(
            *leaves[:3], q_angle, k_angle, leaves[3], magnitude="softplus", scale=0.25, causal=True,
            window=None, slopes=slopes,
        )  # fmt: skip
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def operator_arguments(case: Case) -> tuple:
    inputs = inputs_of(case)
    leaves = [x.detach().requires_grad_() for x in inputs.tensors.values()]
    angles = (None, None) if inputs.angles is None else inputs.angles
    phase = leaves[3] if len(leaves) > 3 else None
    return (*leaves[:3], *angles, phase, None, None, None, None, None,
            case.preparation, 1.0, 0.25, True, case.window, "triton")  # fmt: skip


def test_compiles_whole_with_dynamic_lengths():
    seen = []

    def count(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        seen.append(graph)
        return graph

    compiled = torch.compile(
        lambda q, k, v: separable.attend(q, k, v, scale=0.25, causal=True, window=None)[0],
        fullgraph=True, dynamic=True, backend=count,
    )  # fmt: skip
    for length in (9, 12, 17):
        case = Case(length, length)
        tensors = inputs_of(case).tensors
        assert torch.equal(compiled(**tensors), call(case, inputs_of(case), tensors)[0])
    assert len(seen) == 1


@pytest.mark.parametrize(
    "case",
    [Case(9, 9, preparation="softplus"), Case(9, 9, preparation="rope"), Case(9, 12, window=5)],
    ids=str,
)
def test_operator_passes_opcheck(case):
    results = torch.library.opcheck(operator, operator_arguments(case))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("preparation", ["rope", "softplus"])
def test_recomputation_gives_the_same_gradients(preparation):
    case = Case(17, 17, preparation=preparation, width=8, v_width=8)
    inputs = inputs_of(case)
    found = []
    for recompute in (False, True):
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors.items()}

        def run(leaves: dict[str, Tensor] = leaves) -> Tensor:
            return call(case, inputs, leaves)[0]

        out = checkpoint(run, use_reentrant=False) if recompute else run()
        found.append(torch.autograd.grad(out, list(leaves.values()), inputs.dout))
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))


def test_second_order_gradients_raise():
    case = Case(9, 9, width=8, v_width=8, heads=1)
    inputs = inputs_of(case)
    q, k, v = (x.detach().requires_grad_() for x in inputs.tensors.values())
    out, _ = separable.attend(q, k, v, scale=1.0, causal=True, window=None)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dq.sum(), q)


def test_unsupported_says_what_would_work():
    call = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "qk_width": 256, "v_width": 128,
            "queries": 64, "keys": 64, "causal": True}  # fmt: skip
    assert separable.unsupported("triton", **call) is None
    assert separable.unsupported("cudnn", **call) is None
    assert separable.unsupported("cudnn", **{**call, "qk_width": 128, "capability": (10, 0)}) is None
    refused = {
        ("triton", "dtype", torch.float64): "float32, float16 and bfloat16",
        ("triton", "qk_width", 0): "from 1",
        ("triton", "qk_width", 516): "up to 512",
        ("triton", "capability", (7, 5)): "8.0",
        ("cudnn", "keys", 65): "as many queries as keys",
        ("cudnn", "capability", (10, 0)): "above 128 on compute capability 9.0 alone",
        ("cudnn", "capability", (12, 0)): "above 128",
        ("cudnn", "window", 5): "no window",
        ("cudnn", "placed", True): "triton does",
        ("flash", "dtype", torch.float32): "float16 and bfloat16",
        ("flash", "qk_width", 512): "up to 256",
        ("flash", "device", "cpu"): "CUDA",
        ("flash", "rows", 65_536): "triton takes more",
        ("cudnn", "heads", 65_536): "triton takes more",
    }
    assert "2 keys" in separable.unsupported("cudnn", **{**call, "queries": 1, "keys": 1})
    before = {"causal": False, "window": 5, "queries": 65}
    assert "window that is not causal" in separable.unsupported("flash", **{**call, **before})
    for (body, name, value), words in refused.items():
        assert words in separable.unsupported(body, **{**call, name: value})


def test_bad_arguments_raise():
    q = torch.randn(1, 1, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="scale"):
        separable.attend(q, q, q, scale=0.0, causal=True, window=None)
    with pytest.raises(ValueError, match="float32"):
        separable.attend(
            q, q, q, scale=1.0, causal=True, window=None, slopes=torch.ones(1, dtype=torch.float64)
        )
    angle = torch.zeros(1, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match=r"phase must be float32, not torch\.bfloat16"):
        separable.pope(
            q, q, q, angle, angle, torch.zeros(1, 8, dtype=torch.bfloat16, device=DEVICE),
            magnitude="relu", scale=1.0, causal=True, window=None,
        )  # fmt: skip
    with pytest.raises(ValueError, match="float64"):
        separable.attend(q.double(), q.double(), q.double(), scale=1.0, causal=True, window=None)
