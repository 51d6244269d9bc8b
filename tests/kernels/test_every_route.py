"""What holds for every encoding under every fused implementation: registration, graphs, recomputation, large tensors.

Without a GPU Triton's interpreter stands for "triton"; the bodies of others run on a GPU alone.
"""

import functools
import importlib.util

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="triton is not installed")
from phasewise import TAPA, ALiBi, NoPE, PoPE, Positions, RoPE, YaRN, attention
from phasewise.encodings import Encoding
from tests.kernels.separable_oracle import Case, fused, holds, inputs_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float32
HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
FLASH = HOPPER and importlib.util.find_spec("flash_attn") is not None
pytestmark = [pytest.mark.gpu] if GPU else []
on_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA device")

ROUTES = [(name, "triton") for name in ("nope", "rope", "pope", "tapa", "alibi")]
ROUTES += [(name, "cudnn") for name in ("nope", "rope", "pope")] if HOPPER else []
ROUTES += [(name, "flash") for name in ("nope", "rope", "pope", "tapa")] if FLASH else []
every_route = pytest.mark.parametrize(("name", "impl"), ROUTES)


def encoding_of(name: str, heads: int, width: int) -> Encoding:
    torch.manual_seed(1)
    encoding: Encoding = {
        "nope": NoPE,
        "rope": functools.partial(RoPE, head_dim=width),
        "pope": functools.partial(PoPE, num_heads=heads, head_dim=width, phase_init="uniform"),
        "tapa": functools.partial(TAPA, head_dim=width),
        "alibi": functools.partial(ALiBi, num_heads=heads),
    }[name]()
    return encoding.to(DEVICE)


def drawn(rows: int, length: int, heads: int, width: int, *, seed: int = 0, groups: int = 1) -> list[Tensor]:
    """q, k, v and a gradient of the output, stored place by place."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [
        torch.randn(rows, length, count, width, generator=generator, device=DEVICE, dtype=HALF).transpose(
            1, 2
        )
        for count in (heads, heads // groups, heads // groups, heads)
    ]


def trained(tensors: list[Tensor], encoding: Encoding, impl: str) -> list[Tensor]:
    """Output, and gradients of q, k, v and what the encoding learns."""
    *leaves, dout = tensors
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attention(*leaves, encoding, impl=impl)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *encoding.parameters()], dout)]


def calls_of(tensors: list[Tensor], encoding: Encoding, impl: str) -> list:
    """The operators of attention that it calls, each with its arguments."""
    calls = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), named=None):
            if operator._schema.name in ("phasewise::separable", "phasewise::tapa"):
                calls.append((operator, arguments))
            return operator(*arguments, **(named or {}))

    with Noting():
        attention(*tensors[:3], encoding, impl=impl)
    return calls


@pytest.mark.slow
@every_route
def test_operators_pass_every_check_of_their_registration(name, impl):
    length, width = (130, 64) if GPU else (9, 8)
    encoding = encoding_of(name, 2, width)
    calls = calls_of(drawn(1, length, 2, width), encoding, impl)
    assert len(calls) == 1
    operator, arguments = calls[0]

    def leaf(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(x.ndim == 4 or x.shape == (2, width))

    arguments = tree_map_only(Tensor, leaf, arguments)
    results = torch.library.opcheck(operator, arguments)
    assert len(results) == 4
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.slow
@every_route
def test_compiled_whole_one_dynamic_graph_gives_the_same_output_and_gradients(name, impl):
    width = 64 if GPU else 16
    encoding = encoding_of(name, 2, width)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, encoding, impl=impl).float().square().sum()

    torch.compiler.reset()  # a process compiles a function for so many encodings and no more
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=graphs)
    for length in (18, 20, 33):  # up to 16 queries are asked whether they decode
        leaves = [x.requires_grad_() for x in drawn(1, length, 2, width, seed=length)[:3]]
        learned = [*leaves, *encoding.parameters()]
        for ours, right in zip(
            torch.autograd.grad(compiled(*leaves), learned),
            torch.autograd.grad(loss(*leaves), learned),
            strict=True,
        ):
            assert torch.equal(ours, right)
    assert len([graph for graph in graphs.graphs if len(graph.graph.nodes) > 0]) == 1


@every_route
def test_recomputed_activations_give_the_same_gradients(name, impl):
    length, width = (300, 64) if GPU else (17, 8)
    encoding = encoding_of(name, 2, width)
    *tensors, dout = drawn(1, length, 2, width)
    found = []
    for recompute in (False, True):
        leaves = [x.detach().requires_grad_() for x in tensors]
        call = functools.partial(attention, encoding=encoding, impl=impl)
        out = checkpoint(call, *leaves, use_reentrant=False) if recompute else call(*leaves)
        found.append(torch.autograd.grad(out, [*leaves, *encoding.parameters()], dout))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@every_route
def test_saved_for_the_backward_is_nothing_wider_than_queries_and_keys(name, impl):
    length, width = (300, 64) if GPU else (17, 8)
    encoding = encoding_of(name, 2, width)
    *tensors, _ = drawn(2, length, 2, width)
    leaves = [x.detach().requires_grad_() for x in tensors]
    saved = {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attention(*leaves, encoding, impl=impl)
    wide = [x for x in saved.values() if x.ndim == 4]
    assert len(wide) == 4  # q, k, v and the output
    assert all(x.shape[3] == width for x in wide)
    elements = sum(x.numel() for x in saved.values() if x.ndim != 4)
    angles = 2 * length * width  # at most, shared by rows and heads
    assert elements <= out.shape[:3].numel() + angles + 2 * width + 2


@every_route
def test_second_derivatives_are_refused_with_the_remedy(name, impl):
    width = 64 if GPU else 16
    encoding = encoding_of(name, 2, width)
    leaves = [x.requires_grad_() for x in drawn(1, 9, 2, width)[:3]]
    out = attention(*leaves, encoding, impl=impl)
    (dq,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(dq.float().sum(), leaves[0])


@every_route
def test_derivatives_of_torch_func_are_refused_with_the_remedy(name, impl):
    width = 64 if GPU else 16
    encoding = encoding_of(name, 2, width).requires_grad_(False)
    q, k, v, _ = drawn(1, 9, 2, width)

    def loss(q: Tensor, impl: str) -> Tensor:
        return attention(q, k, v, encoding, impl=impl).float().square().sum()

    with pytest.raises(RuntimeError, match=r"use torch\.autograd, or impl='reference'"):
        torch.func.grad(loss)(q, impl)
    assert torch.func.grad(loss)(q, "reference").shape == q.shape


@every_route
def test_forward_mode_derivatives_are_refused_with_the_remedy(name, impl):
    width = 64 if GPU else 16
    encoding = encoding_of(name, 2, width).requires_grad_(False)
    for queries, keys in ((9, 9), *(() if impl == "cudnn" else ((1, 70),))):
        q, k, v, _ = drawn(1, keys, 2, width)
        with forward_ad.dual_level():
            q = forward_ad.make_dual(q[:, :, -queries:], torch.ones_like(q[:, :, -queries:]))
            with pytest.raises(RuntimeError, match="use impl='reference'"):
                attention(q, k, v, encoding, impl=impl)
            out = attention(q, k, v, encoding, impl="reference")
            assert forward_ad.unpack_dual(out).tangent is not None


@every_route
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_do_not_depend_on_which_are_asked_for(name, impl, wanted):
    length, width = (130, 64) if GPU else (9, 8)
    encoding = encoding_of(name, 2, width)
    tensors = drawn(1, length, 2, width)
    everything = trained(tensors, encoding, impl)
    *leaves, dout = (x.detach() for x in tensors)
    for at in wanted:
        leaves[at].requires_grad_()
    encoding.requires_grad_(False)
    out = attention(*leaves, encoding, impl=impl)
    for at, grad in zip(wanted, torch.autograd.grad(out, [leaves[at] for at in wanted], dout), strict=True):
        assert torch.equal(grad, everything[1 + at])


@every_route
def test_neighbouring_query_heads_share_a_key_head(name, impl):
    length, width = (300, 64) if GPU else (17, 8)
    encoding = encoding_of(name, 6, width)
    grouped = drawn(1, length, 6, width, groups=3)
    q, k, v, dout = grouped
    repeated = [q, *(x.repeat_interleave(3, 1) for x in (k, v)), dout]
    ours, right = (trained(tensors, encoding, impl) for tensors in (grouped, repeated))
    for at in (2, 3):
        right[at] = right[at].float().unflatten(1, (2, 3)).sum(2)
    for mine, theirs in zip(ours, right, strict=True):
        assert (mine.float() - theirs.float()).norm() <= 4 * torch.finfo(HALF).eps * theirs.float().norm()


@every_route
def test_strides_and_beginnings_of_memory_do_not_matter(name, impl):
    """Every other channel, one key head for all, a part of wider rows from an odd place on, and channels by columns."""
    length, width = (130, 64) if GPU else (9, 8)
    encoding = encoding_of(name, 2, width)
    q, k, v, dout = drawn(2, length, 2, width)
    k = k[:, :1].expand(-1, 2, -1, -1)
    spread = [
        torch.stack([q, -q], -1)[..., 0],
        k,
        torch.cat([v[..., -3:], v, v], -1)[..., 3 : 3 + width],
        dout.transpose(1, 3).contiguous().transpose(1, 3),
    ]
    dense = [x.contiguous() for x in (q, k, v, dout)]
    assert all(torch.equal(*pair) for pair in zip(spread, dense, strict=True))
    # A GPU's compiler adds up channels that lie apart in another order.
    rounding = torch.finfo(HALF).eps if GPU else 0.0
    for ours, right in zip(*(trained(tensors, encoding, impl) for tensors in (spread, dense)), strict=True):
        assert (ours.float() - right.float()).norm() <= rounding * right.float().norm()


@pytest.mark.parametrize("impl", sorted({impl for name, impl in ROUTES if name == "rope"}))
@pytest.mark.parametrize("width", [64, 128] if GPU else [16])
@pytest.mark.parametrize("kind", ["whole", "half", "polar"])
def test_yarns_factor_reaches_scores_and_every_gradient(kind, width, impl):
    rule = YaRN(base=10_000.0, factor=4.0, original_length=16)
    encoding = {
        "whole": lambda: RoPE(head_dim=width, frequencies=rule),
        "half": lambda: RoPE(head_dim=width, frequencies=rule, fraction=0.5),
        "polar": lambda: PoPE(num_heads=4, head_dim=width, frequencies=rule, phase_init="uniform"),
    }[kind]().to(DEVICE)
    tensors = drawn(2, 300 if GPU else 17, 4, width, groups=2)
    exact = trained([x.double() for x in tensors], encoding, "reference")
    for ours, right in zip(trained(tensors, encoding, impl), exact, strict=True):
        assert (ours.double() - right).norm() <= (
            2e-2 if GPU else 1e-5
        ) * right.norm()  # without it 0.1 and more


@pytest.mark.slow
@pytest.mark.parametrize(("name", "impl"), [route for route in ROUTES if route[1] != "cudnn"])
def test_compiled_chunks_of_a_prefill_of_any_lengths_are_one_dynamic_graph(name, impl):
    width = 64 if GPU else 16
    encoding = encoding_of(name, 2, width)

    window = 30 if impl == "triton" else None

    def chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, encoding, impl=impl, window=window)

    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(chunk, fullgraph=True, dynamic=True, backend=graphs)
    for queries, keys in ((18, 40), (19, 41), (23, 70)):
        q, k, v, _ = drawn(1, keys, 2, width, seed=keys)
        q = q[:, :, -queries:].requires_grad_()
        assert torch.equal(compiled(q, k, v), chunk(q, k, v))
    assert len([graph for graph in graphs.graphs if len(graph.graph.nodes) > 0]) == 1


@pytest.mark.parametrize(("width", "v_width", "taken"), [(96, 192, True), (96, 200, False), (104, 256, True)])
def test_flash_refuses_the_widths_at_which_it_does_not_compile(width, v_width, taken, monkeypatch):
    from phasewise.kernels import separable

    monkeypatch.setattr(separable, "flash_obstacle", lambda module: None)
    refusal = separable.unsupported(
        "flash", device="cuda", capability=(9, 0), dtype=torch.bfloat16, qk_width=width, v_width=v_width,
        queries=64, keys=64, causal=True,
    )  # fmt: skip
    assert (refusal is None) == taken
    assert taken or "triton does" in str(refusal)


def test_flash_goes_back_for_the_widths_at_which_it_was_found_right():
    from phasewise.kernels.library import flash_goes_back

    right = [width for width in range(8, 257, 8) if flash_goes_back(qk=width, v=width, grouped=True)]
    assert right == [*(n for n in range(8, 129, 8) if n % 32 in (0, 24)), *range(136, 257, 8)]
    assert flash_goes_back(qk=128, v=64, grouped=False)
    assert not flash_goes_back(qk=128, v=64, grouped=True)
    assert not flash_goes_back(qk=64, v=32, grouped=False)


@pytest.mark.parametrize(
    "case",
    [
        Case(17, 17, preparation="softplus"),
        Case(9, 20, preparation="softplus", heads=6, group=2, width=8, v_width=8),
        Case(19, 19, preparation="relu", rows=3, places="left-padded", heads=4, group=2),
        Case(15, 15, preparation="identity", rows=2, places="packed", window=4),
        Case(9, 9, preparation="softplus", heads=1),
    ],
    ids=str,
)
def test_gradients_of_pope_made_in_halves_are_those_made_at_once(case, monkeypatch):
    from phasewise.kernels import library

    inputs = inputs_of(case)
    whole = fused(case, inputs)
    monkeypatch.setattr(library, "LARGE", 0)
    halves = fused(case, inputs)
    for name, right in whole.items():
        # A GPU's compiler contracts products in programs of one head as it pleases, the interpreter does not.
        roundings = 8 * torch.finfo(right.dtype).eps * right.abs().max() if GPU else 0.0
        assert (halves[name] - right).abs().max() <= roundings, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("preparation", "width", "v_width"),
    [
        ("none", 5, 3), ("rope", 20, 20), ("rope", 6, 8), ("softplus", 10, 16), ("softplus", 12, 5),
        ("relu", 13, 8), ("identity", 6, 6),
    ],
)  # fmt: skip
def test_widths_that_are_no_multiples_of_eight_are_widened_inside(preparation, width, v_width, dtype):
    holds(Case(17, 17, width=width, v_width=v_width, preparation=preparation, dtype=dtype, group=2))


@on_gpu
@every_route
def test_a_graph_replayed_on_new_inputs_gives_their_output_and_gradients(name, impl):
    for width in (64, 128) if name in ("pope", "tapa") else (64,):
        encoding = encoding_of(name, 4, width)
        first, second = (drawn(2, 1000, 4, width, seed=seed, groups=2) for seed in (0, 1))
        expected = [trained(tensors, encoding, impl) for tensors in (first, second)]
        held = [x.clone() for x in first]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            trained(held, encoding, impl)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = trained(held, encoding, impl)
        for tensors, right in ((second, expected[1]), (first, expected[0]), (first, expected[0])):
            for x, y in zip(held, tensors, strict=True):
                x.copy_(y)
            for x in found:
                x.fill_(torch.nan)
            graph.replay()
            assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


@pytest.mark.usefixtures("tens_of_gigabytes")
@on_gpu
def test_rows_beyond_two_to_the_31_elements_have_their_own_output_and_gradients():
    """One test for all, as each takes some 50 GiB."""
    rows, length, heads, width = 1025, 1024, 16, 128
    tensors = drawn(rows, length, heads, width)
    assert tensors[0].numel() > 2**31
    some = 256  # enough rows to be prepared as all of them are, and so to have the same bits
    last = [x[-some:].clone() for x in tensors]
    for name, impl in ROUTES:
        encoding = encoding_of(name, heads, width)
        whole = [x[-some:].clone() for x in trained(tensors, encoding, impl)[:4]]
        for ours, right in zip(whole, trained(last, encoding, impl)[:4], strict=True):
            assert torch.equal(ours, right), (name, impl)


@on_gpu
@pytest.mark.parametrize("impl", ["auto", "cudnn", "triton"])
@pytest.mark.parametrize("width", [64, 128])
def test_pope_trains_in_at_most_a_quarter_more_memory_than_rope(width, impl):
    if impl == "cudnn" and not HOPPER:
        pytest.skip("cuDNN at PoPE's widths needs Hopper")
    peak = {}
    for name in ("rope", "pope"):
        encoding = encoding_of(name, 16, width)
        tensors = drawn(4, 8192, 16, width)
        trained(tensors, encoding, impl)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        trained(tensors, encoding, impl)
        peak[name] = torch.cuda.max_memory_allocated()
    assert peak["pope"] <= 1.25 * peak["rope"], peak


@pytest.mark.parametrize("name", ["nope", "rope", "pope", "tapa", "alibi"])
def test_documents_between_boundaries_of_either_form_are_those_alone(name):
    lengths = [20, 1, 33, 10] if GPU else [7, 1, 5]
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    total = sum(lengths) + 3
    encoding = encoding_of(name, 2, 16)
    tensors = [x.float() for x in drawn(1, total, 2, 16)[:3]]
    at = Positions.cu_seqlens(boundaries, total)
    out = attention(*tensors, encoding, q_at=at, k_at=at, impl="triton")
    parts = [part.split([*lengths, 3], dim=2)[:-1] for part in tensors]
    alone = [attention(*document, encoding, impl="reference") for document in zip(*parts, strict=True)]
    torch.testing.assert_close(out[:, :, :-3], torch.cat(alone, 2), rtol=1e-4, atol=1e-4)
    assert not out[:, :, -3:].any()
