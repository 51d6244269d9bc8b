"""attention(impl="triton") equals the reference for every encoding; `choose` names what runs and why."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from phasewise import (
    TAPA,
    ALiBi,
    DynamicNTK,
    LongRoPE,
    NoPE,
    PoPE,
    Positions,
    RoPE,
    YaRN,
    attention,
    choose,
)
from phasewise.attention import IMPLEMENTATIONS
from phasewise.fused import Hardware
from phasewise.kernels import table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HEADS, WIDTH = 2, 16
YARN = YaRN(base=10_000.0, factor=4.0, original_length=16)
LONG = LongRoPE(base=10_000.0, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original_length=7, factor=2.0)
CASES = {
    "nope": NoPE,
    "rope": lambda: RoPE(head_dim=WIDTH),
    "rope-partial-yarn": lambda: RoPE(head_dim=WIDTH, fraction=0.5, frequencies=YARN),
    "rope-longrope": lambda: RoPE(head_dim=WIDTH, frequencies=LONG),
    "pope": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, phase_init="uniform"),
    "pope-clamp": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, phase_init="uniform", phase_bound="clamp"),
    "pope-yarn-relu": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, frequencies=YARN, magnitude="relu"),
    "alibi": lambda: ALiBi(num_heads=HEADS),
    "tapa": lambda: TAPA(head_dim=WIDTH),
    "tapa-linear": lambda: TAPA(head_dim=WIDTH, alpha=0.5, phase="linear", two_pi=False, fraction=0.25),
}
VIEWS = {
    "plain": lambda: {},
    "window": lambda: {"window": 4},
    "packed": lambda: {"q_at": Positions.packed([5, 7], device=DEVICE)},
    "far": lambda: {"q_at": Positions.arange(12, start=1_000_000, device=DEVICE)},
    "bidirectional": lambda: {"causal": False},
}


def inputs(dtype=torch.float32, *, device=DEVICE, width=WIDTH, length=12):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS, length, width), (1, 1, length, width), (1, 1, length, 8)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def results(case, impl, view, dtype):
    torch.manual_seed(1)
    encoding = CASES[case]().to(DEVICE)
    leaves = [x.requires_grad_() for x in inputs(dtype)]
    options = VIEWS[view]()
    if "q_at" in options:
        options["k_at"] = options["q_at"]
    out, lse = attention(*leaves, encoding, impl=impl, return_lse=True, **options)
    out.float().square().sum().backward()
    grads = [x.grad for x in leaves] + [p.grad for p in encoding.parameters()]
    return [x.float() for x in (out, lse, *grads)]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CASES)
def test_triton_equals_the_reference(case, view):
    for ours, exact in zip(
        *(results(case, impl, view, torch.float32) for impl in ("triton", "reference")), strict=True
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["rope", "alibi", "tapa"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_widest_window_of_32_bits_hides_nothing(case, causal):
    torch.manual_seed(1)
    encoding = CASES[case]().to(DEVICE)
    found = []
    for window in (2**31 - 1, None):
        leaves = [x.requires_grad_() for x in inputs()]
        out = attention(*leaves, encoding, causal=causal, window=window, impl="triton")
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for wide, full in zip(*found, strict=True):
        torch.testing.assert_close(wide, full, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["rope", "rope-partial-yarn", "pope"])
def test_places_whose_rows_are_not_contiguous_are_the_places_they_hold(case):
    torch.manual_seed(1)
    encoding = CASES[case]().to(DEVICE)
    index = torch.arange(24, device=DEVICE).view(12, 2).t()
    assert index.stride() == (1, 2)
    at = Positions(index=index, segment=torch.zeros_like(index))
    found = []
    for impl in ("triton", "reference"):
        leaves = [x.repeat(2, 1, 1, 1).requires_grad_() for x in inputs()]
        out = attention(*leaves, encoding, q_at=at, k_at=at, impl=impl)
        found.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *encoding.parameters()])])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CASES)
def test_auto_equals_the_reference_in_bfloat16(case, view):
    for ours, exact in zip(
        *(results(case, impl, view, torch.bfloat16) for impl in ("auto", "reference")), strict=True
    ):
        assert (ours - exact).norm() <= 2e-2 * exact.norm()


def test_image_places_run_without_a_causal_order_and_are_refused_with_one():
    encoding = PoPE(num_heads=HEADS, head_dim=WIDTH, axes=2).to(DEVICE)
    grid = Positions.grid([3, 4], device=DEVICE)
    options = {"q_at": grid, "k_at": grid}
    ours = attention(*inputs(), encoding, causal=False, impl="triton", **options)
    torch.testing.assert_close(
        ours, attention(*inputs(), encoding, causal=False, impl="reference", **options), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="order one axis"):
        attention(*inputs(), encoding, impl="triton", **options)


HOPPER = Hardware("cuda", (9, 0))
AMPERE = Hardware("cuda", (8, 0))


def chosen(case, hardware, dtype=torch.bfloat16, **options):
    q, k, v = inputs(dtype, device="meta", width=64, length=128)
    encoding = {"tapa": TAPA(head_dim=64), "rope": RoPE(head_dim=64), "alibi": ALiBi(num_heads=HEADS)}[case]
    return choose(q, k, v[..., :8], encoding, hardware=hardware, **options)


def test_auto_names_what_it_passed_over():
    assert chosen("rope", HOPPER).impl in ("flash", "cudnn")
    ampere = chosen("rope", AMPERE)
    assert ampere.impl == "triton"
    assert "compute capability 9.0" in ampere.reason
    assert chosen("tapa", HOPPER, window=5).impl == "triton"
    assert chosen("alibi", HOPPER).impl == "triton"
    assert chosen("rope", HOPPER, window=5).impl in ("flash", "triton")
    assert chosen("rope", HOPPER, dtype=torch.float64).impl == "sdpa"
    assert chosen("tapa", HOPPER, dtype=torch.float64).impl == "reference"
    assert chosen("rope", Hardware("cpu")).impl == "sdpa"


@pytest.fixture
def two_orders(monkeypatch):
    """Rows that put our kernels before cuDNN's on "a GPU", at 64 channels and up to 128 keys."""
    common = {"kernel": "separable.forward.body", "dtype": "bfloat16", "qk": 64, "v": 64}
    rows = [
        {**common, "device": "a GPU", "length": 128, "meta": {"order": ["triton", "cudnn"]}},
        {**common, "device": "a GPU", "length": None, "meta": {"order": ["cudnn", "triton"]}},
        *table.launch_table()["rows"],
    ]
    monkeypatch.setattr(table, "launch_table", lambda: {"rows": rows})
    table.forget_choices()
    yield
    table.forget_choices()


@pytest.mark.usefixtures("two_orders")
def test_the_launch_table_orders_the_bodies_by_device_widths_and_length():
    here = Hardware("cuda", (9, 0), "a GPU")

    def impl(length: int = 128, hardware: Hardware = here, width: int = 64, **options):
        q = torch.empty(1, 2, length, width, device="meta", dtype=torch.bfloat16)
        return choose(q, q, q, NoPE(), hardware=hardware, **options)

    assert impl().impl == "triton"
    assert "of triton, cudnn, fastest first" in impl().reason
    assert impl(129).impl == "cudnn"
    fallen = impl(129, window=5)
    assert fallen.impl == "triton"
    assert "cudnn takes no window" in fallen.reason
    for other in (impl(width=128), impl(hardware=HOPPER), impl(hardware=Hardware("cuda", (9, 0), "another"))):
        assert other.impl in ("flash", "cudnn")


def test_more_rows_than_a_grid_axis_holds_go_to_triton():
    for rows, impls in ((65_535, ("flash", "cudnn")), (65_536, ("triton",))):
        q = torch.empty(rows, 1, 16, 64, device="meta", dtype=torch.bfloat16)
        assert choose(q, q, q, RoPE(head_dim=64), hardware=HOPPER).impl in impls
    with pytest.raises(ValueError, match="up to 65535 rows and heads, not 65536 and 1; triton takes more"):
        choose(q, q, q, RoPE(head_dim=64), hardware=HOPPER, impl="cudnn")


@pytest.mark.parametrize(
    ("impl", "case", "hardware", "options", "message"),
    [
        ("triton", "rope", Hardware("mps"), {}, "CUDA"),
        ("triton", "tapa", Hardware("cuda", (7, 0)), {}, "compute capability 8.0"),
        ("cudnn", "rope", HOPPER, {"window": 3}, "no window"),
        ("cudnn", "tapa", HOPPER, {}, "flash and triton take them"),
        ("flash", "tapa", HOPPER, {"window": 3}, "triton"),
        ("flash", "rope", AMPERE, {}, "compute capability"),
        ("triton", "rope", HOPPER, {"dtype": torch.float64}, "float64"),
        ("sdpa", "tapa", HOPPER, {}, "do not separate"),
        ("sdpa", "rope", HOPPER, {"return_lse": True}, "log-sum-exp"),
        ("triton", "rope", HOPPER, {"scale": -1.0}, "positive scale"),
        ("triton", "rope", HOPPER, {"scale": 1e-30}, "from 1e-20 to 1e"),
        ("flash", "tapa", HOPPER, {"scale": 1e30}, "from 1e-20 to 1e"),
        ("fused", "rope", HOPPER, {}, "reference, sdpa, triton, flash, cudnn"),
    ],
)
def test_an_implementation_that_cannot_run_says_why(impl, case, hardware, options, message):
    with pytest.raises(ValueError, match=message):
        chosen(case, hardware, impl=impl, **options)


def test_dynamic_rates_are_refused_by_the_kernels_with_a_reason():
    encoding = RoPE(head_dim=WIDTH, frequencies=DynamicNTK(base=1e4, factor=2.0, original_length=4))
    with pytest.raises(ValueError, match="change with every query"):
        attention(*inputs(), encoding, impl="triton")


def test_auto_refuses_the_slow_reference_above_its_limit():
    q = torch.empty(1, 1, 20_000, 16, device="meta", dtype=torch.float64)
    with pytest.raises(ValueError, match="fewer queries at a time"):
        choose(q, q, q, TAPA(head_dim=16))


def test_a_compiled_choice_serves_every_length_with_one_dynamic_graph():
    def chosen(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        hopper = Hardware("cuda", (9, 0))
        return q + IMPLEMENTATIONS.index(choose(q, k, k, NoPE(), hardware=hopper).impl)

    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(chosen, fullgraph=True, backend=graphs)
    for keys in (60, 61, 62, 63):
        k = torch.zeros(1, 2, keys, 16, dtype=torch.bfloat16)
        compiled(k[:, :, -50:], k)
    assert graphs.frame_count == 2  # the first length alone, then every other
