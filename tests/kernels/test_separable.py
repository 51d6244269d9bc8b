"""Separable attention against softmax(scale <f(q), g(k)>) v, restated here in float64."""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import separable, tiles  # noqa: E402
from phasewise.kernels.library import separable as operator  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])


@dataclass(frozen=True)
class Case:
    """One attention call: sizes, mask and preparation."""

    queries: int
    keys: int
    width: int = 16
    v_width: int = 16
    heads: int = 2
    group: int = 1
    rows: int = 1
    causal: bool = True
    window: int | None = None
    preparation: str = "none"
    dtype: torch.dtype = torch.float32
    slopes: bool = False
    places: str | None = None
    body: str = "triton"

    def __str__(self) -> str:
        parts = [f"{self.queries}x{self.keys}", f"d{self.width}.{self.v_width}", f"h{self.heads}.{self.group}"]
        parts += [] if self.causal else ["full"]
        parts += [f"w{self.window}"] if self.window else []
        parts += [self.preparation] if self.preparation != "none" else []
        parts += [self.places] if self.places else []
        parts += ["slopes"] if self.slopes else []
        return "-".join([*parts, str(self.dtype).removeprefix("torch."), self.body])


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; positions always spelled out, `given` says whether the kernel gets them."""

    tensors: dict[str, Tensor]
    angles: tuple[Tensor, Tensor] | None
    slopes: Tensor | None
    index: tuple[Tensor, Tensor]
    segment: tuple[Tensor, Tensor]
    given: bool
    dout: Tensor
    dlse: Tensor


def places_of(case: Case) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    queries, keys = torch.arange(case.keys - case.queries, case.keys), torch.arange(case.keys)
    index, segment = [queries[None], keys[None]], [torch.zeros_like(queries)[None], torch.zeros_like(keys)[None]]
    if case.places == "far":
        index = [i + 1_000_003 for i in index]
    if case.places == "packed":
        # Documents of uneven length: places restart, the tail is padding.
        bounds = [0, case.keys // 3, case.keys // 3 + 1, case.keys - 3, case.keys]
        for number, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
            index[1][0, first:last] = torch.arange(last - first)
            segment[1][0, first:last] = number if number < 3 else -1
        index[0], segment[0] = index[1][:, -case.queries :].clone(), segment[1][:, -case.queries :].clone()
    if case.places == "left-padded":
        index, segment = [i.repeat(case.rows, 1) for i in index], [s.repeat(case.rows, 1) for s in segment]
        for row in range(case.rows):
            for at, marks in zip(index, segment, strict=True):
                marks[row, : 2 * row + 1] = -1
                at[row] -= 2 * row + 1
    if case.places == "shuffled":
        order = torch.randperm(case.keys, generator=torch.Generator().manual_seed(1))
        index = [i[:, order[order < i.shape[1]]] for i in index]
    return (index[0].to(DEVICE), index[1].to(DEVICE)), (segment[0].to(DEVICE), segment[1].to(DEVICE))


def inputs_of(case: Case, *, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed + case.queries + 7 * case.keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    def heads(count: int, length: int, width: int) -> Tensor:
        return normal(case.rows, length, count, width).to(case.dtype).transpose(1, 2)

    key_heads = case.heads // case.group
    tensors = {
        "q": heads(case.heads, case.queries, case.width),
        "k": heads(key_heads, case.keys, case.width),
        "v": heads(key_heads, case.keys, case.v_width),
    }
    index, segment = places_of(case)
    angles = None
    if case.preparation != "none":
        n = case.width // 2 if case.preparation == "rope" else case.width
        rates = 0.5 ** torch.arange(n, dtype=torch.float64, device=DEVICE)
        turns = [(i[..., None] * rates + math.pi).remainder(2 * math.pi) - math.pi for i in index]
        angles = (turns[0].float(), turns[1].float())
        if case.preparation != "rope":
            tensors["phase"] = normal(case.heads, case.width)
    slopes = 2.0 ** -torch.arange(1.0, case.heads + 1).to(DEVICE) if case.slopes else None
    shape = (case.rows, case.queries, case.heads, case.v_width)
    return Inputs(
        tensors, angles, slopes, index, segment, case.places is not None,
        normal(*shape).transpose(1, 2).to(case.dtype), normal(case.rows, case.heads, case.queries),
    )  # fmt: skip


def seen_by(case: Case, inputs: Inputs) -> Tensor:
    """[rows | 1, 1, T, S]: the mask, stated anew."""
    i, j = inputs.index[0][:, None, :, None], inputs.index[1][:, None, None, :]
    own, other = inputs.segment[0][:, None, :, None], inputs.segment[1][:, None, None, :]
    seen = (own == other) & (own >= 0)
    if case.causal:
        seen = seen & (j <= i)
    if case.window is not None:
        seen = seen & ((i - j).abs() < case.window)
    return seen


def exact(case: Case, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients by the equation in `dtype`."""
    leaves = {name: x.to(torch.float64 if dtype == torch.float64 else x.dtype) for name, x in inputs.tensors.items()}
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    if inputs.angles is not None:
        angle = [a.to(leaves.get("phase", q).dtype)[:, None] for a in inputs.angles]
        if case.preparation == "rope":
            q, k = (turned(x, a) for x, a in zip((q, k), angle, strict=True))
        else:
            q, k = polar(q, angle[0] - leaves["phase"][None, :, None], case), polar(k, angle[1], case)
    k, v = k.repeat_interleave(case.group, 1), v.repeat_interleave(case.group, 1)
    scores = q.to(v.dtype) @ k.to(v.dtype).transpose(-1, -2) * scale_of(case)
    if inputs.slopes is not None:
        distance = (inputs.index[0][:, None, :, None] - inputs.index[1][:, None, None, :]).abs()
        scores = scores - inputs.slopes[None, :, None, None].to(v.dtype) * distance.to(v.dtype)
    seen = seen_by(case, inputs)
    scores = scores.masked_fill(~seen, -math.inf)
    some = seen.any(-1, keepdim=True)
    p = torch.where(some, scores.masked_fill(~some, 0.0).softmax(-1), 0.0)
    out = p @ v
    lse = scores.masked_fill(~some, 0.0).logsumexp(-1)
    some = some.squeeze(-1).expand_as(lse)
    loss = (out * inputs.dout.to(out.dtype)).sum() + (torch.where(some, lse, 0.0) * inputs.dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"out": out, "lse": torch.where(some, lse.float(), -1e30).double(), **dict(zip(leaves, grads, strict=True))}


def scale_of(case: Case) -> float:
    return case.width**-0.5


def polar(x: Tensor, angle: Tensor, case: Case) -> Tensor:
    mu = {"softplus": torch.nn.functional.softplus, "relu": torch.relu, "identity": lambda y: y}[case.preparation](x)
    return torch.cat([mu * angle.cos(), mu * angle.sin()], -1)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def call(case: Case, inputs: Inputs, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    options = {"scale": scale_of(case), "causal": case.causal, "window": case.window, "body": case.body}
    options |= {"slopes": inputs.slopes}
    if inputs.given:
        options |= {"q_index": inputs.index[0], "k_index": inputs.index[1]}
        options |= {"q_segment": inputs.segment[0], "k_segment": inputs.segment[1]}
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    if inputs.angles is None:
        return separable.attend(q, k, v, **options)
    if case.preparation == "rope":
        return separable.rope(q, k, v, *inputs.angles, 1.0, **options)
    return separable.pope(q, k, v, *inputs.angles, tensors["phase"], magnitude=case.preparation, **options)


def fused(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors.items()}
    out, lse = call(case, inputs, leaves)
    loss = [out, lse], [inputs.dout, inputs.dlse]
    if case.body == "cudnn":
        loss = [out], [inputs.dout]
    grads = torch.autograd.grad(loss[0], list(leaves.values()), loss[1])
    return {"out": out, "lse": lse, **dict(zip(leaves, grads, strict=True))}


def holds(case: Case) -> None:
    """Every result is finite and within twice the error of the same equation in the inputs' precision."""
    inputs = inputs_of(case)
    if case.body == "cudnn":
        inputs = replace(inputs, dlse=torch.zeros_like(inputs.dlse))
    truth, eager, actual = exact(case, inputs, torch.float64), exact(case, inputs, case.dtype), fused(case, inputs)
    for name, expected in truth.items():
        assert actual[name].isfinite().all(), name
        error = (actual[name].double() - expected).abs().max()
        budget = 2 * (eager[name].double() - expected).abs().max()
        scale = expected[expected > -1e29].abs().max() if name == "lse" else expected.abs().max()
        rounding = torch.finfo(torch.float32 if name in ("lse", "phase") else case.dtype).eps
        assert error <= budget + 4 * rounding * scale, f"{name}: {error:.3e} > 2 x {budget / 2:.3e} + rounding"


SMALL = [
    Case(17, 17),
    Case(1, 33, group=2),
    Case(20, 37, width=24, v_width=40, group=2, dtype=torch.float16),
    Case(21, 21, causal=False),
    Case(35, 35, window=7),
    Case(18, 30, causal=False, window=5),
    Case(33, 20),
    Case(33, 33, places="packed", window=9),
    Case(19, 19, rows=2, places="left-padded"),
    Case(19, 19, places="shuffled"),
    Case(17, 33, places="far", slopes=True, group=2),
    Case(20, 20, slopes=True),
    Case(17, 17, preparation="softplus", group=2),
    Case(17, 30, preparation="relu", places="far", dtype=torch.float16),
    Case(15, 15, preparation="rope"),
]


STORED = [
    Case(37, 37, preparation="softplus", width=24, v_width=16),
    Case(33, 33, preparation="identity", causal=False, group=2),
    Case(17, 17, width=40, group=2),
]


def on_gpu() -> Iterator[Case]:
    """The matrix for a real GPU: lengths around the tiles, widths, masks, groups, dtypes and bodies."""
    half, full = torch.bfloat16, torch.float32
    for length in (1, 2, 15, 63, 111, 217, 1023, 1025, 4096):
        yield Case(length, length, width=64, v_width=64, preparation="softplus", dtype=half)
        yield Case(length, length, width=128, v_width=128, preparation="softplus", dtype=half)
        yield Case(length, length, width=64, v_width=64, preparation="rope", dtype=torch.float16, causal=False)
    for queries, keys in ((63, 217), (1, 1025), (111, 1023), (1024, 1088), (217, 63)):
        yield Case(queries, keys, width=64, v_width=64, preparation="softplus", dtype=half, group=2)
        yield Case(queries, keys, width=32, v_width=32, dtype=full, slopes=True)
    for width, v_width in ((16, 16), (24, 40), (80, 80), (96, 64), (160, 128), (256, 256), (64, 256)):
        yield Case(217, 217, width=width, v_width=v_width, heads=8, group=8, dtype=half)
        yield Case(217, 217, width=width, v_width=v_width, preparation="softplus", dtype=torch.float16)
        yield Case(111, 111, width=width, v_width=v_width, preparation="softplus", dtype=full)
    for places in ("packed", "left-padded", "shuffled", "far"):
        for window in (None, 100):
            yield Case(511, 511, width=64, v_width=64, rows=2 if places == "left-padded" else 1, heads=4, group=2,
                       preparation="softplus", places=places, window=window, dtype=half)  # fmt: skip
    for window in (1, 64, 300):
        yield Case(777, 777, width=64, v_width=64, window=window, dtype=half, preparation="rope")
        yield Case(777, 777, width=64, v_width=64, window=window, dtype=half, causal=False, rows=2)
    for body in ("flash", "cudnn"):
        for width in (64, 128):
            for preparation in ("none", "rope", "softplus"):
                yield Case(1025, 1025, width=width, v_width=width, heads=4, rows=2, preparation=preparation,
                           dtype=half, body=body)  # fmt: skip
    yield Case(300, 1025, width=64, v_width=64, heads=4, group=2, preparation="softplus", dtype=half, body="flash")
    yield Case(1025, 1025, width=64, v_width=64, window=100, preparation="softplus", dtype=half, body="flash")


def needed(case: Case) -> None:
    if case.body == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    if case.body != "triton":
        # Other people's kernels refuse torch's deterministic mode, or ask it for what they do anyway.
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("case", list(on_gpu()), ids=str)
def test_gpu_matrix_is_within_twice_the_eager_error(case):
    needed(case)
    holds(case)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("body", ["triton", "flash", "cudnn"])
@pytest.mark.parametrize("width", [64, 128])
def test_gpu_backward_repeats_its_bits(body, width):
    case = Case(4096, 4096, width=width, v_width=width, heads=16, rows=2, preparation="softplus",
                dtype=torch.bfloat16, body=body)  # fmt: skip
    needed(case)
    inputs = inputs_of(case)
    first, *others = (fused(case, inputs) for _ in range(4))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_gpu_tensors_past_2_to_the_31_elements():
    heads, width, window, tail = 16, 128, 64, 256
    length = 2**31 // (heads * width) + 1000
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (1, length, heads, width)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = separable.attend(q, k, v, scale=0.1, causal=True, window=window)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    last = slice(length - tail - window, length)
    ends = [x[:, :, last].detach().double().requires_grad_() for x in (q, k, v)]
    place = torch.arange(tail + window, device=DEVICE)
    ahead = place[:, None] - place
    scores = (0.1 * ends[0] @ ends[1].transpose(-1, -2)).masked_fill((ahead < 0) | (ahead >= window), -math.inf)
    expected = scores.softmax(-1) @ ends[2]
    exact_grads = torch.autograd.grad(expected, ends, dout[:, :, last].double())
    for actual, right in zip((out, *grads), (expected, *exact_grads), strict=True):
        part, right = actual[:, :, -tail + window :].double(), right[:, :, -tail + window :]
        assert (part - right).norm() < 0.01 * right.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("width", [64, 128])
def test_gpu_graphs_capture_forward_and_backward(width):
    case = Case(512, 512, width=width, v_width=width, preparation="softplus", dtype=torch.bfloat16)
    inputs = inputs_of(case)
    expected = fused(case, inputs)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fused(case, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused(case, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(expected[name], captured[name]) for name in expected)


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
    actual, expected = fused(case, replace(inputs, tensors=spread)), fused(case, replace(inputs, tensors=same))
    assert torch.equal(actual["out"], expected["out"])
    assert torch.equal(actual["q"], expected["q"])
    assert torch.equal(plain["k"], fused(case, inputs)["k"])


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


@pytest.mark.parametrize("case", [Case(9, 9, preparation="softplus"), Case(9, 12, window=5)], ids=str)
def test_operator_passes_opcheck(case):
    results = torch.library.opcheck(operator, operator_arguments(case))
    assert set(results.values()) == {"SUCCESS"}


def test_second_order_gradients_raise():
    case = Case(9, 9, width=8, v_width=8, heads=1)
    inputs = inputs_of(case)
    q, k, v = (x.detach().requires_grad_() for x in inputs.tensors.values())
    out, _ = separable.attend(q, k, v, scale=1.0, causal=True, window=None)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second-order"):
        torch.autograd.grad(dq.sum(), q)


def test_unsupported_says_what_would_work():
    call = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "qk_width": 256, "v_width": 128,
            "queries": 64, "keys": 64, "causal": True}  # fmt: skip
    assert separable.unsupported("triton", **call) is None
    assert separable.unsupported("cudnn", **call) is None
    refused = {
        ("triton", "dtype", torch.float64): "float32, float16 and bfloat16",
        ("triton", "qk_width", 20): "multiples of 8",
        ("triton", "capability", (7, 5)): "8.0",
        ("cudnn", "keys", 65): "as many queries as keys",
        ("cudnn", "window", 5): "no window",
        ("cudnn", "placed", True): "triton does",
        ("flash", "dtype", torch.float32): "float16 and bfloat16",
        ("flash", "qk_width", 512): "up to 256",
        ("flash", "device", "cpu"): "CUDA",
    }
    for (body, name, value), words in refused.items():
        assert words in separable.unsupported(body, **{**call, name: value})


def test_bad_arguments_raise():
    q = torch.randn(1, 1, 4, 8, device=DEVICE)
    with pytest.raises(ValueError, match="scale"):
        separable.attend(q, q, q, scale=0.0, causal=True, window=None)
    with pytest.raises(ValueError, match="float32"):
        separable.attend(q, q, q, scale=1.0, causal=True, window=None, slopes=torch.ones(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="float64"):
        separable.attend(q.double(), q.double(), q.double(), scale=1.0, causal=True, window=None)
