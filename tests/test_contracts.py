"""What every encoding promises, under every implementation that may stand in for it."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch._dynamo.testing import CompileCounterWithBackend

from phasewise.attention import attention, choose
from phasewise.encodings import ENCODINGS, TAPA, ALiBi, AnyEncodingConfig, NoPE, PoPE, RoPE
from phasewise.frequencies import (
    NTK,
    DynamicNTK,
    DynamicYaRN,
    Explicit,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from phasewise.positions import Positions
from phasewise.reference import EMPTY_LSE

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
ORIGINAL = 16

RULES = {
    "linear": Linear(base=10_000.0, factor=4.0),
    "ntk": NTK(base=10_000.0, factor=4.0),
    "dynamic_ntk": DynamicNTK(base=10_000.0, factor=2.0, original_length=ORIGINAL),
    "yarn": YaRN(base=10_000.0, factor=4.0, original_length=ORIGINAL),
    "dynamic_yarn": DynamicYaRN(base=10_000.0, original_length=ORIGINAL),
    "longrope": LongRoPE(
        base=10_000.0,
        short_factor=(1.0, 1.0, 1.5, 2.0),
        long_factor=(1.0, 2.0, 4.0, 8.0),
        original_length=ORIGINAL,
        factor=4.0,
    ),
    "llama3": Llama3(
        base=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=ORIGINAL
    ),
    "proportional": Proportional(base=10_000.0, fraction=0.5),
    "explicit": Explicit(values=(1.0, 0.5, 0.1, 0.0)),
}
CASES = {
    "nope": NoPE,
    "rope": lambda: RoPE(head_dim=WIDTH),
    "rope-partial": lambda: RoPE(head_dim=WIDTH, fraction=0.5),
    **{
        f"rope-{name}": (lambda rule=rule: RoPE(head_dim=WIDTH, frequencies=rule))
        for name, rule in RULES.items()
    },
    "pope": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH),
    "pope-uniform": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, phase_init="uniform"),
    "pope-clamp": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, phase_init="uniform", phase_bound="clamp"),
    "pope-relu": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, magnitude="relu"),
    "pope-identity": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, magnitude="identity"),
    "pope-yarn": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, frequencies=RULES["yarn"]),
    "pope-dynamic": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, frequencies=RULES["dynamic_ntk"]),
    "pope-dynamic_yarn": lambda: PoPE(num_heads=HEADS, head_dim=WIDTH, frequencies=RULES["dynamic_yarn"]),
    "pope-longrope": lambda: PoPE(
        num_heads=HEADS,
        head_dim=WIDTH,
        frequencies=RULES["longrope"].model_copy(
            update={"short_factor": (1.0,) * WIDTH, "long_factor": tuple(1.0 + c for c in range(WIDTH))}
        ),
    ),
    "tapa": lambda: TAPA(head_dim=WIDTH),
    "tapa-linear": lambda: TAPA(head_dim=WIDTH, alpha=0.5, fraction=0.25, phase="linear", two_pi=False),
    "alibi": lambda: ALiBi(num_heads=HEADS),
}


def make(case):
    torch.manual_seed(7)
    return CASES[case]().double()


def runs(case, impl):
    """Whether `impl` says it computes the case; what it refuses must be refused with a reason."""
    q = torch.empty(1, HEADS, 3, WIDTH, dtype=torch.float64)
    try:
        choose(q, q[:, :KV_HEADS], q[:, :KV_HEADS], CASES[case](), impl=impl)
    except ValueError as refusal:
        if "separate" not in str(refusal):
            raise
        return False
    return True


PAIRS = [(case, impl) for case in CASES for impl in ("reference", "sdpa") if runs(case, impl)]
NOT_THROUGH_SDPA = {"tapa", "tapa-linear", *(case for case in CASES if "dynamic" in case)}
FIXED = [(case, impl) for case, impl in PAIRS if not any(word in case for word in ("dynamic", "longrope"))]
both = pytest.mark.parametrize(("case", "impl"), PAIRS)
each = pytest.mark.parametrize("case", CASES)


def inputs(length, *, batch=2, keys=None, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    keys = length if keys is None else keys
    shapes = [
        (batch, HEADS, length, WIDTH),
        (batch, KV_HEADS, keys, WIDTH),
        (batch, KV_HEADS, keys, VALUE_WIDTH),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_the_table_holds_every_encoding():
    assert set(ENCODINGS) == {"nope", "rope", "pope", "tapa", "alibi"}
    assert {CASES[case]().kind for case in CASES} == set(ENCODINGS)


def test_every_case_runs_through_every_implementation_that_can_serve_it():
    assert {case for case, impl in PAIRS if impl == "reference"} == set(CASES)
    assert {case for case, impl in PAIRS if impl == "sdpa"} == set(CASES) - NOT_THROUGH_SDPA


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_shape_dtype_and_strides_are_kept_and_inputs_unchanged(case, impl, dtype):
    q, k, v = inputs(5, dtype=dtype)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    if impl == "sdpa" and case == "alibi" and dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match="round ALiBi's distances"):
            attention(q, k, v, make(case), impl=impl)
        return
    before = [x.clone() for x in (q, k, v)]
    out = attention(q, k, v, make(case).float(), impl=impl)
    assert out.shape == (2, HEADS, 5, VALUE_WIDTH)
    assert out.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
    exact = attention(q.double(), k.double(), v.double(), make(case), impl="reference")
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    assert (out.double() - exact).abs().max() < bound


@both
def test_every_implementation_agrees_with_a_dense_softmax_of_the_scores(case, impl):
    q, k, v = inputs(7)
    encoding = make(case)
    places = Positions.arange(7)
    scores = encoding.scores(q, k, places, places)
    scores = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), float("-inf"))
    expected = scores.softmax(-1) @ v.repeat_interleave(HEADS // KV_HEADS, dim=1)
    close(attention(q, k, v, encoding, impl=impl), expected)


@pytest.mark.parametrize(("case", "impl"), FIXED)
@pytest.mark.parametrize("shift", [1, 1000, 1_000_000])
def test_only_relative_place_matters(case, impl, shift):
    q, k, v = inputs(6)
    moved = Positions.arange(6, start=shift)
    encoding = make(case)
    here, there = (
        attention(q, k, v, encoding, q_at=at, k_at=at, impl=impl) for at in (Positions.arange(6), moved)
    )
    torch.testing.assert_close(here, there, rtol=1e-8, atol=1e-8)


@both
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_and_single_steps_equal_the_full_pass_across_the_original_length(case, impl, causal):
    length = ORIGINAL + 6
    q, k, v = inputs(length)
    encoding = make(case)
    places = Positions.arange(length)
    full = attention(q, k, v, encoding, causal=causal, impl=impl)
    for start, size in [(0, 1), (3, 5), (ORIGINAL - 1, 1), (ORIGINAL, 1), (ORIGINAL - 2, 4), (length - 1, 1)]:
        stop = start + size
        part = attention(
            q[:, :, start:stop],
            k,
            v,
            encoding,
            q_at=places.narrow(start, size),
            k_at=places,
            causal=causal,
            impl=impl,
        )
        close(part, full[:, :, start:stop])
    if causal:
        for stop in (1, ORIGINAL, ORIGINAL + 1, length):
            step = attention(q[:, :, stop - 1 : stop], k[:, :, :stop], v[:, :, :stop], encoding, impl=impl)
            close(step, full[:, :, stop - 1 : stop])


@both
def test_packed_documents_equal_separate_ones(case, impl):
    lengths = [3, ORIGINAL + 2, 1]
    q, k, v = inputs(sum(lengths))
    encoding = make(case)
    places = Positions.packed(lengths)
    packed = attention(q, k, v, encoding, q_at=places, k_at=places, impl=impl)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        close(packed[:, :, rows], attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], encoding, impl=impl))
        start += length
    k[:, :, :3], v[:, :, :3] = 7.0, -7.0
    again = attention(q, k, v, encoding, q_at=places, k_at=places, impl=impl)
    assert (again - packed)[:, :, 3:].abs().max() == 0


@both
def test_left_padding_changes_nothing_and_gets_nothing(case, impl):
    q, k, v = inputs(6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    places = Positions.padded(mask)
    encoding = make(case)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, encoding, q_at=places, k_at=places, impl=impl)
    close(out[0:1, :, 2:], attention(q[0:1, :, 2:], k[0:1, :, 2:], v[0:1, :, 2:], encoding, impl=impl))
    assert out[0, :, :2].abs().max() == 0
    out.square().sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all()
        assert leaf.grad[0, :, :2].abs().max() == 0


@both
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(case, impl):
    q, k, v = (x.requires_grad_() for x in inputs(3))
    before, after = Positions.arange(3), Positions.arange(3, start=10)
    encoding = make(case)
    out = attention(q, k, v, encoding, q_at=before, k_at=after, impl=impl)
    assert out.abs().max() == 0
    out.sum().backward()
    assert all(x.grad.abs().max() == 0 for x in (q, k, v))
    if impl == "reference":
        _, lse = attention(q, k, v, encoding, q_at=before, k_at=after, impl=impl, return_lse=True)
        assert (lse == EMPTY_LSE).all()


@both
def test_a_window_counts_the_query_and_drops_what_is_farther(case, impl):
    q, k, v = inputs(9)
    encoding = make(case)
    out = attention(q, k, v, encoding, window=3, impl=impl)
    places = Positions.arange(9)
    for t in range(9):
        keys = slice(max(0, t - 2), t + 1)
        only = attention(
            q[:, :, t : t + 1],
            k[:, :, keys],
            v[:, :, keys],
            encoding,
            q_at=places.narrow(t, 1),
            k_at=places.narrow(keys.start, keys.stop - keys.start),
            impl=impl,
        )
        close(out[:, :, t : t + 1], only)


@both
def test_grouped_heads_equal_explicitly_repeated_ones(case, impl):
    q, k, v = inputs(5)
    encoding = make(case)
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v)]
    close(attention(q, k, v, encoding, impl=impl), attention(q, *repeated, encoding, impl=impl))


@both
def test_future_keys_do_not_leak_and_past_keys_count(case, impl):
    q, k, v = inputs(4, keys=7)
    encoding = make(case)
    out = attention(q, k, v, encoding, impl=impl)
    for changed in range(7):
        other = v.clone()
        other[:, :, changed] += 1.0
        moved = (attention(q, k, other, encoding, impl=impl) - out).abs().amax(dim=(0, 1, 3)) > 1e-12
        assert moved.tolist() == [changed <= 3 + t for t in range(4)]


@both
def test_gradients_are_those_of_the_output(case, impl):
    q, k, v = (x.requires_grad_() for x in inputs(4, batch=1))
    encoding = make(case)
    if "relu" in case:
        with torch.no_grad():
            q += 0.05 * q.sign()
            k += 0.05 * k.sign()
    parameters = tuple(encoding.parameters())

    def function(q, k, v, *parameters):
        names = [f"encoding.{name}" for name, _ in encoding.named_parameters()]
        values = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(_Attention(encoding), values, (q, k, v, impl))

    assert torch.autograd.gradcheck(function, (q, k, v, *parameters))


class _Attention(torch.nn.Module):
    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, q, k, v, impl):
        return attention(q, k, v, self.encoding, impl=impl)


@pytest.mark.parametrize("case", ["rope", "pope-uniform", "tapa", "alibi"])
def test_query_blocks_change_neither_output_nor_gradients(case, monkeypatch):
    results = []
    for limit in (2**23, 40):
        monkeypatch.setattr("phasewise.reference.SCORES_AT_ONCE", limit)
        q, k, v = (x.requires_grad_() for x in inputs(11))
        encoding = make(case)
        out, lse = attention(q, k, v, encoding, impl="reference", return_lse=True)
        (out.square().sum() + lse.sum()).backward()
        results.append([out, lse, q.grad, k.grad, v.grad, *(p.grad for p in encoding.parameters())])
    for whole, blocks in zip(*results, strict=True):
        close(whole, blocks)


def test_the_reference_makes_scores_on_a_cpu_in_blocks_that_its_cache_holds():
    made: list[int] = []

    class Told(TAPA):
        def scores(self, q, k, q_at, k_at, *, scale=None):
            scores = super().scores(q, k, q_at, k_at, scale=scale)
            made.append(scores.numel())
            return scores

    q = torch.randn(2, 2, 1000, 8)
    attention(q, q, q, Told(head_dim=8), impl="reference")
    assert sum(made) == 2 * 2 * 1000 * 1000
    assert max(made) <= 2**20


@pytest.mark.parametrize("case", ["rope", "tapa", "rope-dynamic_ntk", "pope-dynamic_yarn"])
def test_the_reference_serves_torch_func_in_blocks_and_with_rates_of_every_length(case, monkeypatch):
    monkeypatch.setattr("phasewise.reference.SCORES_AT_ONCE", 40)
    q, k, v = inputs(ORIGINAL + 5)
    encoding = make(case)

    def squares(q):
        return attention(q, k, v, encoding, impl="reference").square().sum()

    (expected,) = torch.autograd.grad(squares(q.requires_grad_()), q)
    close(torch.func.grad(squares)(q.detach()), expected)


@each
def test_config_survives_json_and_state_dict_survives_meta(case):
    encoding = CASES[case]()
    adapter = TypeAdapter(AnyEncodingConfig)
    config = adapter.validate_json(adapter.dump_json(encoding.config))
    assert config == encoding.config
    with torch.device("meta"):
        empty = config.build(num_heads=HEADS, head_dim=WIDTH)
    empty = empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        parameter.data.fill_(float("nan"))
    empty.load_state_dict(encoding.state_dict())
    q, k, v = inputs(5, dtype=torch.float32)
    assert torch.equal(attention(q, k, v, empty), attention(q, k, v, encoding))
    assert not any("freq" in name or "rate" in name for name in encoding.state_dict())


@pytest.mark.parametrize("case", ["rope-dynamic_ntk", "pope-dynamic"])
def test_dynamic_rules_keep_scores_for_the_backward_pass_but_no_turned_keys(case):
    length = 64
    q, k, v = (x.requires_grad_() for x in inputs(length, batch=1))
    encoding = make(case)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        attention(q, k, v, encoding, impl="reference")
    assert sum(x.numel() for x in kept.values()) < 8 * HEADS * length**2


def test_a_mask_above_the_limit_is_not_made():
    q = torch.empty(1, 1, 20_000, 8, device="meta")
    at = Positions.arange(20_000, device="meta")
    with pytest.raises(ValueError, match="mask would have 400000000 elements"):
        choose(q, q, q, NoPE(), q_at=at, k_at=at, impl="sdpa")


@pytest.mark.parametrize("assign", [True, False])
def test_phases_saved_in_half_precision_are_loaded_as_float32(assign):
    encoding = PoPE(num_heads=HEADS, head_dim=WIDTH, phase_init="uniform")
    halves = {name: value.bfloat16() for name, value in encoding.state_dict().items()}
    encoding.load_state_dict(halves, assign=assign)
    assert encoding.phase.dtype == torch.float32
    assert torch.equal(encoding.phase, halves["phase"].float())


@each
def test_casting_the_module_leaves_positions_alone(case):
    q, k, v = inputs(5, dtype=torch.float32)
    encoding = make(case).float()
    cast = copy.deepcopy(encoding).to(torch.bfloat16)
    far = Positions.arange(5, start=1_000_000)
    for at in (Positions.arange(5), far):
        expected = attention(q, k, v, encoding, q_at=at, k_at=at)
        assert torch.equal(attention(q, k, v, cast, q_at=at, k_at=at), expected)
        assert torch.equal(attention(q, k, v, cast.to(torch.float32), q_at=at, k_at=at), expected)


@each
def test_a_half_precision_call_leaves_later_calls_exact(case):
    encoding = make(case).float()
    q, k, v = inputs(5, dtype=torch.float32)
    before = attention(q, k, v, encoding)
    attention(*(x.bfloat16() for x in (q, k, v)), encoding, impl="reference")
    assert torch.equal(attention(q, k, v, encoding), before)


@both
def test_autocast_leaves_attention_alone(case, impl):
    q, k, v = inputs(5, dtype=torch.float32)
    encoding = make(case).float()
    expected = attention(q, k, v, encoding, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, encoding, impl=impl), expected)


@each
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_a_scale_that_is_not_positive_is_computed_too(case, scale, causal):
    q, k, v = inputs(5)
    encoding = make(case)
    out = attention(q, k, v, encoding, scale=scale, causal=causal)
    assert out.isfinite().all()
    close(out, attention(q, k, v, encoding, scale=scale, causal=causal, impl="reference"))


@both
@pytest.mark.parametrize("size", [1e4, 1e-4])
def test_extreme_inputs_and_distances_stay_finite(case, impl, size):
    q, k, v = inputs(4, dtype=torch.float32)
    q, k = (q * size).requires_grad_(), (k * size).requires_grad_()
    index = torch.tensor([[0, 1, 1000, 1_000_000]])
    at = Positions(index, torch.zeros_like(index))
    out = attention(q, k, v, make(case).float(), q_at=at, k_at=at, impl=impl)
    out.sum().backward()
    assert out.isfinite().all()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(
    case=st.sampled_from([case for case, impl in PAIRS if impl == "sdpa"]),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 6)),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_sdpa_equals_reference_on_any_packing_and_window(case, lengths, window, causal, seed):
    q, k, v = inputs(sum(lengths), seed=seed)
    places = Positions.packed(lengths)
    options = {"q_at": places, "k_at": places, "causal": causal, "window": window}
    encoding = make(case)
    close(*(attention(q, k, v, encoding, impl=impl, **options) for impl in ("sdpa", "reference")))


@pytest.mark.slow
@both
def test_compiles_whole_with_dynamic_lengths(case, impl):
    torch.compiler.reset()  # a process compiles a function for so many encodings and no more
    encoding, inductor = make(case), CompileCounterWithBackend("inductor")
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, encoding, impl=impl),
        fullgraph=True,
        dynamic=True,
        backend=inductor,
    )
    graphs = set()
    for length in (5, 6, 9):
        q, k, v = inputs(length)
        close(compiled(q, k, v), attention(q, k, v, encoding, impl=impl))
        graphs.add(inductor.frame_count)
    assert len(graphs) == 1, "one graph, or as many as a block that is recomputed has, serves every length"
