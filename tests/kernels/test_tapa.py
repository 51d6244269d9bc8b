"""TAPA's kernel against its equation, restated here in float64, and against its own promises.

On a GPU the whole matrix runs; without one, small sizes in Triton's interpreter.
"""

import math

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from phasewise.kernels import tapa, tapa_score  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter's bfloat16 products are wrong
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
DEFAULTS = {"alpha": 0.1, "amplitude_dim": 16, "causal": True, "window": None}


@pytest.fixture(autouse=True)
def nan_filled_memory():
    """What nobody writes reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def definition(
    q, k, v, *, alpha, amplitude_dim, causal, window, phase="quadratic", two_pi=True, scale=None,
    q_index=None, q_segment=None, k_index=None, k_segment=None, dtype=torch.float64,
):  # fmt: skip
    """The paper's score, softmax and average, with every step in `dtype`."""
    T, S = q.shape[2], k.shape[2]
    i = torch.arange(S - T, S, device=q.device)[None] if q_index is None else q_index
    j = torch.arange(S, device=q.device)[None] if k_index is None else k_index
    i_segment = torch.zeros_like(i) if q_segment is None else q_segment
    j_segment = torch.zeros_like(j) if k_segment is None else k_segment
    gap = i[:, None, :, None] - j[:, None, None, :]
    seen = (i_segment[:, None, :, None] == j_segment[:, None, None, :]) & (i_segment[:, None, :, None] >= 0)
    seen = seen & (gap >= 0) if causal else seen
    seen = seen if window is None else seen & (gap.abs() < window)

    group = q.shape[1] // k.shape[1]
    q = q.to(dtype)
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    amplitude = q[..., :amplitude_dim] @ k[..., :amplitude_dim].mT
    q_phase, k_phase = q[..., amplitude_dim:], k[..., amplitude_dim:]
    if phase == "quadratic":
        product = q_phase @ k_phase.mT
    else:
        product = q_phase.sum(-1)[..., :, None] + k_phase.sum(-1)[..., None, :]
    alpha = torch.as_tensor(alpha, device=q.device).to(dtype)
    power = torch.where(gap == 0, 0.0, gap.abs().clamp(min=1).to(dtype) ** alpha)
    factor = (2 * math.pi if two_pi else 1.0) / math.sqrt(q_phase.shape[-1])
    scores = (
        amplitude * (amplitude_dim**-0.5 if scale is None else scale) * torch.cos(factor * power * product)
    )
    scores = scores.masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return weights @ v, scores.logsumexp(-1).masked_fill(empty[..., 0], -1e30)


def float32_definition(q, k, v, **options):
    """The equation in float32 on the CPU: a GPU's matrix products of float32 may carry more digits than that."""
    options = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    out, lse = definition(q.cpu(), k.cpu(), v.cpu(), dtype=torch.float32, **options)
    return out.to(q.device), lse.to(q.device)


def inputs(T, S=None, *, heads=2, groups=1, width=32, v_width=16, batch=1, dtype=HALF, seed=0):
    S = T if S is None else S
    generator = torch.Generator().manual_seed(seed + 1000 * T + S)
    shapes = [(batch, heads, T, width), (batch, groups, S, width), (batch, groups, S, v_width)]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def functional(out: Tensor, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A fixed weighted sum of outputs and log-sum-exps, and the latter with 0 for rows that see nothing."""
    generator = torch.Generator().manual_seed(7)
    by_out = torch.randn(out.shape, generator=generator).to(out.device, dtype)
    by_lse = torch.randn(lse.shape, generator=generator).to(out.device)
    lse = torch.where(lse.detach() > -1e29, lse, 0.0)
    return (out.double() * by_out.double()).sum() + (lse.double() * by_lse.double()).sum(), lse


def gradients(function, tensors, alpha, options):
    """Output, log-sum-exp and the gradients of `functional` by q, k, v and alpha."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    options = {name: value for name, value in options.items() if name != "alpha"}
    alpha = torch.tensor(alpha, dtype=torch.float32, device=DEVICE, requires_grad=True)
    out, lse = function(*leaves, alpha=alpha, **options)
    loss, lse = functional(out, lse, leaves[0].dtype)
    return [x.detach().double() for x in (out, lse, *torch.autograd.grad(loss, (*leaves, alpha)))]


def alpha_terms(tensors, alpha, options, dtype):
    """What each query and key add to the gradient of alpha."""
    (batch, heads, T, _), S = tensors[0].shape, tensors[1].shape[2]
    options = {name: value for name, value in options.items() if name != "alpha"}
    each = torch.full((batch, heads, T, S), alpha, dtype=torch.float32, device=DEVICE, requires_grad=True)
    out, lse = definition(*tensors, alpha=each, dtype=dtype, **options)
    return torch.autograd.grad(functional(out, lse, tensors[0].dtype)[0], each)[0].double()


def assert_within_budget(tensors, alpha=0.1, attend=tapa.attend, **options):
    """At most twice the error of float32 arithmetic on the same inputs, plus two roundings to the dtype.

    One of the weights or score gradients that enter a product, one of its result.
    """
    options = {**DEFAULTS, **options}
    exact = gradients(definition, tensors, alpha, options)
    eager = gradients(float32_definition, tensors, alpha, options)
    ours = gradients(attend, tensors, alpha, options)
    rounding = 2 * torch.finfo(tensors[0].dtype).eps
    flow = tensors[0].shape[:3].numel() ** 0.5 * tensors[2].shape[3] ** 0.5
    # Gradients are differences of terms as large as what flows in and cannot be rounder than those; alpha's is one
    # sum of terms of both signs, so the error of its terms tells more than that of the sum.
    sizes = [max(e.norm().item(), flow) for e in exact]
    errors = [(f - e).norm() for f, e in zip(eager, exact, strict=True)]
    terms = alpha_terms(tensors, alpha, options, torch.float64)
    sizes[5] = terms.abs().sum()
    errors[5] = (alpha_terms(tensors, alpha, options, torch.float32) - terms).norm()
    names = ("out", "lse", "dq", "dk", "dv", "dalpha")
    for name, e, o, eager_error, size in zip(names, exact, ours, errors, sizes, strict=True):
        assert o.isfinite().all(), name
        error, budget = (o - e).norm(), 2 * eager_error + rounding * size
        assert error <= budget, f"{name}: {error:.3g} > {budget:.3g} (size {size:.3g})"


LENGTHS = [1, 2, 15, 63, 111, 217, 1023, 1025, 4096] if GPU else [1, 2, 15, 47]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_every_gradient_are_the_equation_at_odd_lengths(length, dtype):
    assert_within_budget(inputs(length, width=64 if GPU else 32, v_width=64 if GPU else 16, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((90, 90, {}), {"causal": False}),
        ((33, 97, {}), {}),
        ((33, 70, {}), {"causal": False, "window": 20}),
        ((70, 33, {}), {}),
        ((90, 90, {}), {"window": 33}),
        ((20, 20, {"heads": 4, "groups": 2, "batch": 2}), {}),
        ((90, 90, {}), {"alpha": 0.5}),
        ((90, 90, {}), {"alpha": 0.0, "two_pi": False}),
        ((90, 90, {}), {"alpha": 1.0, "two_pi": False, "scale": 0.3}),
        ((60, 60, {}), {"phase": "linear"}),
        ((40, 40, {"width": 40, "v_width": 24}), {"amplitude_dim": 24}),
        ((40, 40, {"width": 24, "v_width": 40}), {"amplitude_dim": 8}),
    ],
    ids=str,
)
def test_output_and_every_gradient_are_the_equation_for_every_option(shape, options, dtype):
    T, S, sizes = shape
    sizes = {"heads": 1, **sizes}
    if not GPU and dtype == torch.float32 and options.get("window"):
        pytest.skip("the same code as float16's, covered there; this one runs on a GPU")
    assert_within_budget(inputs(T, S, dtype=dtype, **sizes), **options)


@pytest.mark.skipif(not GPU, reason="the widths that need a GPU's speed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "v_width", "amplitude_dim"), [(16, 16, 8), (96, 96, 48), (128, 128, 64), (256, 256, 128)]
)
def test_output_and_every_gradient_are_the_equation_at_every_width(width, v_width, amplitude_dim, dtype):
    assert_within_budget(
        inputs(333, heads=4, groups=2, width=width, v_width=v_width, dtype=dtype), amplitude_dim=amplitude_dim
    )


def packed(lengths: list[int]) -> tuple[Tensor, Tensor]:
    index = torch.cat([torch.arange(n) for n in lengths])
    segment = torch.cat([torch.full((n,), s) for s, n in enumerate(lengths)])
    return index[None].to(DEVICE), segment[None].to(DEVICE)


def test_packed_documents_with_padding_are_the_equation():
    index, segment = packed([20, 45, 7, 11])
    segment = torch.where(segment == 3, -1, segment)
    at = {"q_index": index, "q_segment": segment, "k_index": index, "k_segment": segment}
    tensors = inputs(83, heads=1)
    assert_within_budget(tensors, **at)
    out, lse = tapa.attend(*tensors, **DEFAULTS, **at)
    assert (out[:, :, 72:] == 0).all()
    assert (lse[:, :, 72:] == -1e30).all()


def test_nothing_of_one_document_reaches_another():
    index, segment = packed([20, 28])
    at = {"q_index": index, "q_segment": segment, "k_index": index, "k_segment": segment}
    tensors = inputs(48, heads=1)
    other = [torch.cat([x[:, :, :20] + 1, x[:, :, 20:]], 2) for x in tensors]
    first, second = (gradients(tapa.attend, x, 0.1, {**DEFAULTS, **at}) for x in (tensors, other))
    for a, b in zip(first[:5], second[:5], strict=True):
        assert torch.equal(a[:, :, 20:], b[:, :, 20:])


@pytest.mark.parametrize("start", [1_000_003, 2**40 + 1])
def test_only_relative_place_matters_however_far_out(start):
    tensors = inputs(50, heads=1)
    index = torch.arange(50, device=DEVICE)[None]
    near, far = (
        gradients(tapa.attend, tensors, 0.1, {**DEFAULTS, "q_index": index + s, "k_index": index + s})
        for s in (0, start)
    )
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


def test_distances_beyond_a_million_are_the_equation():
    index = torch.cat([torch.arange(16), 1_000_000 + torch.arange(16), 2**33 + torch.arange(3)])[None].to(
        DEVICE
    )
    assert_within_budget(inputs(35, heads=1), alpha=0.3, q_index=index, k_index=index)


def test_static_places_are_the_places_they_stand_for():
    tensors = inputs(40, 60, heads=1)
    index = torch.arange(60, device=DEVICE)[None]
    static = gradients(tapa.attend, tensors, 0.1, DEFAULTS)
    given = gradients(tapa.attend, tensors, 0.1, {**DEFAULTS, "q_index": index[:, 20:], "k_index": index})
    for a, b in zip(static, given, strict=True):
        assert (a - b).norm() <= 4 * torch.finfo(HALF).eps * b.norm() + 1e-6


def test_rows_that_see_nothing_give_zero_and_take_no_gradient():
    tensors = inputs(20, heads=1)
    segment = torch.full((1, 20), -1, device=DEVICE)
    out, _, dq, dk, dv, dalpha = gradients(tapa.attend, tensors, 0.1, {**DEFAULTS, "k_segment": segment})
    assert not any(x.any() for x in (out, dq, dk, dv, dalpha))
    assert (tapa.attend(*tensors, **DEFAULTS, k_segment=segment)[1] == -1e30).all()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 0, 5), (1, 5, 0), (0, 5, 5)])
def test_nothing_to_attend_to_gives_zero_and_no_gradient(batch, queries, keys):
    tensors = inputs(queries, keys, batch=batch)
    out, lse = tapa.attend(*tensors, **DEFAULTS)
    assert out.shape == (batch, 2, queries, 16)
    assert not out.any()
    assert (lse == -1e30).all()
    for x, grad in zip(tensors, gradients(tapa.attend, tensors, 0.1, DEFAULTS)[2:5], strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


def test_a_group_of_heads_reads_its_key_head():
    q, k, v = inputs(20, heads=6, groups=2)
    out, _ = tapa.attend(q, k, v, **DEFAULTS)
    repeated, _ = tapa.attend(q, *(x.repeat_interleave(3, 1) for x in (k, v)), **DEFAULTS)
    assert torch.equal(out, repeated)


def test_strides_do_not_matter():
    q, k, v = inputs(20, heads=2, groups=2, width=32, v_width=32)
    plain = gradients(tapa.attend, (q, k, v), 0.1, DEFAULTS)
    wide = torch.cat([q, k, v], -1).transpose(1, 2).contiguous().transpose(1, 2)
    sliced = gradients(tapa.attend, wide.split(32, 3), 0.1, DEFAULTS)
    turned = gradients(tapa.attend, [x.mT.contiguous().mT for x in (q, k, v)], 0.1, DEFAULTS)
    for a, b, c in zip(plain, sliced, turned, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_repeat_gives_the_same_bits():
    tensors = inputs(1025 if GPU else 40, heads=4 if GPU else 1)
    first, second = (gradients(tapa.attend, tensors, 0.1, DEFAULTS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32] + ([torch.bfloat16] if GPU else []))
def test_huge_inputs_stay_finite(dtype):
    q, k, v = inputs(24, heads=1, dtype=dtype)
    index = torch.arange(24, device=DEVICE)[None] * 1_000_000
    for x in gradients(
        tapa.attend, (q * 1e4, k * 1e4, v), 0.5, {**DEFAULTS, "q_index": index, "k_index": index}
    ):
        assert x.isfinite().all()


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0, 2.5])
def test_the_table_of_powers_holds_each_distance_and_the_one_before_it(alpha):
    keys, before = 700, tapa_score.BEFORE
    table = tapa_score.power_table(torch.tensor(alpha, device=DEVICE), 1.5, keys)
    gap = torch.arange(-before, keys + before).double()
    for place, d in enumerate((gap, gap - 1)):
        exact = torch.where(d > 0, 1.5 * d.clamp(min=1) ** alpha, 0.0)
        found = table.view(torch.float32)[place::2].cpu().double()
        assert ((found - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact).all()


@triton.jit
def series_probe(
    out_ptr, reach_ptr, alpha_ptr, first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FAST: tl.constexpr
):
    alpha = tl.load(alpha_ptr)
    rows = first + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    powers = tapa_score.power_series(rows, columns, BLOCK_N // 2, BLOCK_N / 2, alpha, 1.0, FAST)
    tl.store(out_ptr + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + columns[None, :], powers)
    tl.store(reach_ptr, tapa_score.series_reach(alpha))


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.1, 0.5, 0.9, 1.5, 2.0, 3.3, -0.5])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_the_power_series_keeps_its_bound_from_its_reach_on(alpha, block):
    reach, exponent = torch.empty((), device=DEVICE), torch.tensor(alpha, device=DEVICE)
    powers = torch.empty(16, block, device=DEVICE)
    probe = {"BLOCK_M": 16, "BLOCK_N": block, "FAST": GPU}
    series_probe[(1,)](powers, reach, exponent, 8 * block, **probe)
    middle = block // 2
    starts = [middle + math.ceil(reach.item() * block / 2), 20 * block, 1_000_000]
    starts.append(middle - starts[0] - 15)  # rows before the columns
    for first in starts:
        series_probe[(1,)](powers, reach, exponent, first, **probe)
        gap = (first + torch.arange(16)[:, None] - torch.arange(block)[None, :]).abs().double()
        exact = (gap ** exponent.cpu().double()).to(DEVICE)
        assert ((powers.double() - exact).abs() / exact).max() <= tapa_score.SERIES_ERROR.value


@triton.jit
def wave_probe(turns_ptr, cos_ptr, sin_ptr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    turn = tl.load(turns_ptr + at)
    if FAST:
        turn *= tapa_score.TURN
    tl.store(cos_ptr + at, tapa_score.cosine(turn, FAST))
    tl.store(sin_ptr + at, tapa_score.sine(turn, FAST))


@pytest.mark.parametrize("size", [1.0, 10.0, 1e3, 1e5])
def test_cosine_and_sine_err_by_less_than_the_rounding_of_their_argument(size):
    turns = (torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 2 - 1).mul(size).to(DEVICE)
    cos, sin = torch.empty_like(turns), torch.empty_like(turns)
    wave_probe[(1,)](turns, cos, sin, FAST=GPU, BLOCK=4096)
    angle = 2 * math.pi * (turns.double() - turns.double().round())
    bound = 1e-6 + (2.0**-23 * 2 * math.pi * size if GPU else 0.0)  # off the GPU turns are reduced exactly
    assert size > 1e3 or bound < 1e-3
    assert (cos.double() - angle.cos()).abs().max() < bound
    assert (sin.double() - angle.sin()).abs().max() < bound


def test_the_operator_passes_every_check_of_its_registration():
    q, k, v = (x.requires_grad_() for x in inputs(9, heads=2))
    alpha = torch.tensor(0.1, device=DEVICE, requires_grad=True)
    arguments = (q, k, v, alpha, None, None, None, None, 16, 0.25, 0.25, False, True, None, "triton")
    torch.library.opcheck(torch.ops.phasewise.tapa.default, arguments)


def test_it_compiles_whole_with_lengths_that_change():
    compiled = torch.compile(
        lambda q, k, v: tapa.attend(q, k, v, **DEFAULTS)[0].sum(),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for length in (9, 17, 21):
        tensors = [x.requires_grad_() for x in inputs(length, heads=1)]
        expected = tapa.attend(*tensors, **DEFAULTS)[0].sum()
        assert torch.equal(compiled(*tensors), expected)
        grads = torch.autograd.grad(compiled(*tensors), tensors)
        for a, b in zip(grads, torch.autograd.grad(expected, tensors), strict=True):
            assert torch.equal(a, b)


def test_second_derivatives_raise():
    tensors = [x.requires_grad_() for x in inputs(5, heads=1)]
    (dq, *_) = torch.autograd.grad(tapa.attend(*tensors, **DEFAULTS)[0].sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_unused_gradients_cost_nothing_and_alpha_may_be_a_tensor():
    q, k, v = inputs(9, heads=1)
    out, _ = tapa.attend(q, k, v.requires_grad_(), **(DEFAULTS | {"alpha": torch.tensor(0.1, device=DEVICE)}))
    assert torch.equal(out, tapa.attend(q, k, v, **DEFAULTS)[0])
    assert torch.autograd.grad(out.sum(), v)[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"width": 264}, "from 1 to 256 wide"),
        ({"amplitude_dim": 32}, "from 1 to 31"),
        ({"scale": -1.0}, "must be positive"),
        ({"alpha": torch.tensor([0.1])}, r"no dimensions .* not torch.float32 \[1\]"),
        ({"alpha": torch.tensor(0.1, dtype=torch.float64)}, "not torch.float64"),
        ({"alpha": torch.tensor(0.1, device="meta")}, "on meta"),
    ],
)
def test_what_it_cannot_run_is_named(change, message):
    options = DEFAULTS | {x: change[x] for x in change if x in ("amplitude_dim", "scale", "alpha")}
    tensors = inputs(3, **{x: change[x] for x in change if x in ("dtype", "width")})
    with pytest.raises(ValueError, match=message):
        tapa.attend(*tensors, **options)


def test_other_devices_are_named():
    call = {"dtype": torch.float16, "qk_width": 32, "v_width": 32}
    assert "CUDA" in (tapa.unsupported(device="meta", capability=None, **call) or "")
    assert tapa.unsupported(device="cuda", capability=(9, 0), **call) is None


@pytest.mark.skipif(not GPU, reason="captures a CUDA graph")
def test_a_cuda_graph_replays_it():
    tensors = inputs(256, heads=2, groups=2, width=64, v_width=64)
    options = DEFAULTS | {"amplitude_dim": 32}
    expected = tapa.attend(*tensors, **options)[0]
    graph = torch.cuda.CUDAGraph()
    still = [x.clone() for x in tensors]
    with torch.cuda.graph(graph):
        out, _ = tapa.attend(*still, **options)
    for x in still:
        x.zero_()
    graph.replay()
    assert not out.any()
    for x, y in zip(still, tensors, strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("tens_of_gigabytes")
@pytest.mark.skipif(not GPU, reason="needs tens of gigabytes of a GPU")
def test_tensors_beyond_two_to_the_31_elements_are_addressed_right():
    shape = (129, 16, 4096, 256)
    q, k, v = (torch.empty(shape, dtype=HALF, device=DEVICE).normal_() for _ in range(3))
    options = DEFAULTS | {"amplitude_dim": 128}
    out, _ = tapa.attend(q, k, v, **options)
    last, _ = tapa.attend(q[-1:], k[-1:], v[-1:], **options)
    assert torch.equal(out[-1:], last)
