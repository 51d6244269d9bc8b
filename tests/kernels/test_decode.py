"""Few queries on many raw keys equal the reference on the same places, for every encoding, in every view."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from phasewise import TAPA, ALiBi, DynamicNTK, LongRoPE, NoPE, PoPE, Positions, RoPE, YaRN, attention, choose
from phasewise.encodings import PoPEConfig
from phasewise.fused import Call, Hardware, decode_obstacle, decoded
from phasewise.kernels import decode
from phasewise.model.cache import Cache
from phasewise.model.config import ModelConfig
from phasewise.model.transformer import Transformer
from phasewise.reference import EMPTY_LSE, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
WIDTH = 16
YARN = YaRN(base=10_000.0, factor=4.0, original_length=16)
LONG = LongRoPE(
    base=10_000.0, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original_length=70, factor=2.0
)
DYNAMIC = DynamicNTK(base=10_000.0, factor=2.0, original_length=32)
FAR = 2**31


def long_of(n: int) -> LongRoPE:
    return LONG.model_copy(update={"short_factor": (1.0,) * n, "long_factor": (2.0,) * n})


def encodings(heads: int, width: int = WIDTH) -> dict[str, Any]:
    rope, pope = (
        functools.partial(RoPE, head_dim=width),
        functools.partial(PoPE, num_heads=heads, head_dim=width),
    )
    return {
        "nope": NoPE,
        "rope": rope,
        "rope-partial-yarn": lambda: rope(fraction=0.5, frequencies=YARN),
        "rope-longrope": lambda: rope(frequencies=long_of(width // 2)),
        "rope-dynamic": lambda: rope(frequencies=DYNAMIC),
        "pope": lambda: pope(phase_init="uniform"),
        "pope-dynamic": lambda: pope(frequencies=DYNAMIC),
        "pope-clamp-yarn-relu": lambda: pope(
            phase_init="uniform", phase_bound="clamp", frequencies=YARN, magnitude="relu"
        ),
        "pope-identity": lambda: pope(phase_init="uniform", magnitude="identity"),
        "alibi": lambda: ALiBi(num_heads=heads),
        "tapa": lambda: TAPA(head_dim=width),
        "tapa-linear": lambda: TAPA(head_dim=width, alpha=0.5, phase="linear", two_pi=False, fraction=0.25),
    }


@dataclass(frozen=True)
class Case:
    """One call: sizes, places and view."""

    queries: int = 1
    keys: int = 100
    heads: int = 4
    groups: int = 2
    rows: int = 1
    width: int = WIDTH
    v_width: int = 24
    places: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, and k and v as slices of a longer cache whose rest is NaN."""
        generator = torch.Generator().manual_seed(self.queries + 7 * self.keys)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE, self.dtype)

        q = normal(self.rows, self.queries, self.heads, self.width).transpose(1, 2)
        held = []
        for width in (self.width, self.v_width):
            memory = torch.full((self.rows, self.groups, self.keys + 9, width), float("nan"), device=DEVICE)
            memory = memory.to(self.dtype)
            memory[:, :, : self.keys] = normal(self.rows, self.groups, self.keys, width)
            held.append(memory[:, :, : self.keys])
        return q, *held

    def at(self) -> tuple[Positions, Positions]:
        keys = Positions.arange(self.keys, device=DEVICE)
        if self.places == "far":
            keys = Positions.arange(self.keys, start=FAR - self.keys, device=DEVICE)
        if self.places == "left-padded":
            real = (
                torch.arange(self.keys, device=DEVICE)[None]
                >= 37 * torch.arange(self.rows, device=DEVICE)[:, None]
            )
            memory = Positions.padded(real)
            wide = [torch.cat([x, x[:, :5]], 1)[:, : self.keys] for x in (memory.index, memory.segment)]
            keys = Positions(*wide)
        if self.places == "packed":
            keys = Positions.packed([30, self.keys - 50, 20], device=DEVICE)
        if self.places == "shuffled":
            order = torch.randperm(self.keys - self.queries, generator=torch.Generator().manual_seed(3)).to(
                DEVICE
            )
            index = torch.cat([order, torch.arange(self.keys - self.queries, self.keys, device=DEVICE)])
            keys = Positions(index[None], torch.zeros_like(index)[None])
        return keys.narrow(self.keys - self.queries, self.queries), keys

    def call(self, encoding: Any) -> Call:
        at = self.at() if self.places else None
        view = {"causal": True, "window": None, "scale": None} | self.options
        q, k, v = self.tensors()
        return Call(q, k, v, encoding, at, **view)


def exact(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    view = {"causal": call.causal, "window": call.window, "scale": call.scale}
    return reference(q, k, v, call.encoding, *call.places(), **view)


@torch.no_grad()
def holds(case: Case, name: str) -> None:
    """Within twice the error of eager arithmetic in the inputs' precision, against float64."""
    torch.manual_seed(1)
    encoding = encodings(case.heads, case.width)[name]().to(DEVICE)
    call = case.call(encoding)
    assert decode_obstacle(call, Hardware.of(call.q)) is None
    ours, eager = decoded(call), exact(call, case.dtype)
    right = exact(call, torch.float64)
    for mine, theirs, truth in zip(ours, eager, right, strict=True):
        assert mine.isfinite().all()
        assert mine.dtype == (case.dtype if mine.ndim == 4 else torch.float32)
        some = truth > 0.1 * EMPTY_LSE
        error = torch.where(some, mine.double() - truth, 0.0).abs().max()
        budget = 2 * torch.where(some, theirs.double() - truth, 0.0).abs().max()
        rounding = torch.finfo(mine.dtype).eps * torch.where(some, truth, 0.0).abs().max()
        assert error <= budget + 4 * rounding, f"{error:.2e} > {budget:.2e} + {rounding:.2e}"
        assert torch.equal(
            mine.double() == 0 if mine.ndim == 4 else mine < 0.1 * EMPTY_LSE, ~some | (truth == 0)
        )


VIEWS = {
    "several": Case(queries=2, keys=131, heads=6),
    "window": Case(options={"window": 40}),
    "bidirectional": Case(queries=2, keys=128, options={"causal": False}),
    "far": Case(places="far"),
    "left-padded": Case(queries=2, rows=3, places="left-padded", keys=128),
    "packed": Case(places="packed", options={"window": 15}),
    "shuffled": Case(places="shuffled"),
    "scaled": Case(options={"scale": 0.3}, heads=2, v_width=8),
    "half": Case(dtype=torch.float16),
}
KINDS = ("nope", "rope-partial-yarn", "pope", "alibi", "tapa")


@pytest.mark.parametrize("name", encodings(4))
def test_one_query_equals_the_reference(name):
    holds(Case(), name)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", KINDS)
def test_every_view_equals_the_reference(name, view):
    holds(VIEWS[view], name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("queries", "heads", "groups"), [(16, 3, 1), (5, 16, 1)])
def test_many_rows_of_queries_on_one_key_head_go_in_tiles(name, queries, heads, groups):
    holds(Case(queries=queries, keys=64 * queries, heads=heads, groups=groups), name)


def test_a_row_that_sees_nothing_gives_zero():
    case = Case(rows=2, places="left-padded", keys=70)
    call = case.call(RoPE(head_dim=WIDTH).to(DEVICE))
    q_at, k_at = call.places()
    nothing = Positions(q_at.index, torch.full_like(q_at.segment, -1))
    out, lse = decoded(replace(call, at=(nothing, k_at)))
    assert not out.any()
    assert (lse == EMPTY_LSE).all()


def test_queries_whose_rates_differ_are_left_to_others():
    several = Case(queries=2, keys=128)
    for name in ("rope-longrope", "rope-dynamic", "pope-dynamic"):
        placed = Case(places="far").call(encodings(4)[name]().to(DEVICE))
        assert decode_obstacle(placed, Hardware.of(placed.q)) is not None
    call = several.call(encodings(4)["rope-dynamic"]().to(DEVICE))
    assert decode_obstacle(call, Hardware.of(call.q)) is not None
    call = several.call(
        RoPE(head_dim=WIDTH, frequencies=LONG.model_copy(update={"original_length": 127})).to(DEVICE)
    )
    assert "not the same" in str(decode_obstacle(call, Hardware.of(call.q)))


@pytest.mark.parametrize("name", KINDS)
def test_attention_decodes_what_asks_for_no_gradient(name):
    encoding = encodings(4)[name]().to(DEVICE)
    q, k, v = Case(rows=1, keys=80).tensors()
    assert ("raw" in choose(q, k, v, encoding, impl="triton").reason) == (name != "pope")
    with torch.no_grad():
        assert "raw" in choose(q, k, v, encoding, impl="triton").reason
        assert choose(q, k, v, encoding, hardware=Hardware("cuda", (9, 0))).impl == "triton"
        found = attention(q, k, v, encoding, impl="triton")
        torch.testing.assert_close(
            found, attention(q, k, v, encoding, impl="reference"), rtol=1e-4, atol=1e-4
        )


def test_what_is_not_decoded_says_why():
    call = {"device": "cuda", "capability": (9, 0), "dtype": torch.float16, "qk_width": 64, "v_width": 64}

    def reason(**changes: Any) -> str | None:
        settings: Any = {**call, "queries": 1, "keys": 64, **changes}
        return decode.unsupported(**settings)

    assert reason(queries=16, keys=256) is None
    assert "16 queries, on 16 keys each" in str(reason(queries=17, keys=4096))
    assert "16 queries, on 16 keys each" in str(reason(queries=16, keys=255))
    assert "7, 5" in str(reason(capability=(7, 5)))
    assert "512" in str(reason(qk_width=512))
    assert "float64" in str(reason(dtype=torch.float64))
    q, k, v = Case(rows=1, keys=64).tensors()
    with pytest.raises(ValueError, match="no gradient"):
        decode.attend(q.requires_grad_(), k, v, scale=1.0, causal=True, window=None)


@pytest.mark.parametrize("placed", [False, True])
def test_operator_passes_torchs_checks(placed):
    q, k, v = Case(rows=1, keys=64).tensors()
    q_at, k_at = Case(rows=1, keys=64).at()
    places = (q_at.index, q_at.segment, k_at.index, k_at.segment) if placed else (None,) * 4
    rates = torch.rand(WIDTH, dtype=torch.float64, device=DEVICE)
    arguments = (
        q,
        k,
        v,
        rates,
        None,
        None,
        *places,
        "softplus",
        *(WIDTH, 0, 0),
        1.0,
        0.25,
        0.0,
        1.0,
        True,
        None,
    )
    torch.library.opcheck(decode.decode, arguments)


def test_compiled_attention_that_is_not_decoded_serves_every_length_with_one_dynamic_graph():
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, backend=graphs)
    for keys in (5, 6, 9, 12):
        q, k, v = torch.randn(3, 1, 2, keys, WIDTH, device=DEVICE).unbind()
        encoding = RoPE(head_dim=WIDTH)
        assert torch.equal(
            compiled(q, k, v, encoding, impl="triton"), attention(q, k, v, encoding, impl="triton")
        )
    assert graphs.frame_count == 2  # the first length alone, then every other


@pytest.mark.parametrize("name", ["pope", "rope-longrope"])
def test_compiled_attention_serves_a_growing_cache(name):
    encoding = encodings(4)[name]().to(DEVICE)
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for keys in (80, 81, 100):
            q, k, v = Case(rows=1, keys=keys).tensors()
            expected = attention(q, k, v, encoding, impl="triton")
            assert torch.equal(compiled(q, k, v, encoding, impl="triton"), expected)


@pytest.mark.parametrize("padding", [0, 5])
def test_a_decoder_takes_this_route_with_its_cache_left_padding_included(padding, monkeypatch):
    calls, attend = [], decode.attend
    monkeypatch.setattr(
        decode, "attend", lambda *tensors, **view: calls.append(view) or attend(*tensors, **view)
    )
    config = ModelConfig(vocab_size=11, width=32, layers=2, heads=2, kv_heads=1, encoding=PoPEConfig())
    model = Transformer(config).eval().to(DEVICE)
    tokens = torch.randint(11, (2, 70)).to(DEVICE)
    real = torch.arange(70, device=DEVICE)[None] >= torch.tensor([[0], [padding]], device=DEVICE)
    at = Positions.padded(real) if padding else None
    with torch.no_grad():
        whole = model(tokens, at=at, keep=1, impl="reference")
        cache = Cache()
        model(tokens[:, :-1], at=at and at.narrow(0, 69), cache=cache, impl="reference")
        assert not calls
        step = model(tokens[:, -1:], cache=cache, impl="triton")
    assert len(calls) == config.layers
    torch.testing.assert_close(step, whole, rtol=1e-4, atol=1e-4)


@GPU
@pytest.mark.parametrize("name", encodings(8, 64))
@pytest.mark.parametrize("width", [64, 128, 72])
def test_long_caches_in_bfloat16(name, width):
    holds(Case(keys=5003, heads=8, groups=2, width=width, v_width=width, dtype=torch.bfloat16), name)
    if name in KINDS:
        sizes: dict[str, Any] = {
            "queries": 3,
            "rows": 3,
            "keys": 1111,
            "heads": 8,
            "width": width,
            "v_width": 64,
        }
        holds(Case(**sizes, places="left-padded", dtype=torch.bfloat16), name)


POLAR_VIEWS = {
    "one-tile": Case(keys=64),
    "odd-length": Case(keys=77),
    "several": Case(queries=2, keys=1003),
    "sixteen-rows": Case(queries=4, keys=1003),
    "ungrouped": Case(keys=300, heads=3, groups=3),
    "bidirectional": Case(queries=2, keys=128, options={"causal": False}),
    "window": Case(keys=1003, options={"window": 100}),
    "scaled": Case(keys=300, options={"scale": 0.3}),
    "rows": Case(keys=3001, rows=3, heads=16, groups=4),
    "half": Case(keys=1003, dtype=torch.float16),
}


@GPU
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("view", POLAR_VIEWS)
def test_popes_own_kernel_equals_the_reference_in_every_view(view, widths, monkeypatch):
    from phasewise.kernels import decode_polar

    calls, parts = [], decode_polar.parts
    monkeypatch.setattr(decode_polar, "parts", lambda *x, **y: calls.append(y["kind"]) or parts(*x, **y))
    case = replace(POLAR_VIEWS[view], width=widths[0], v_width=widths[1])
    if case.dtype == torch.float32:
        case = replace(case, dtype=torch.bfloat16)
    for name in ("pope", "pope-clamp-yarn-relu", "pope-identity") if view == "several" else ("pope",):
        holds(case, name)
    assert len(calls) == (3 if view == "several" else 1)


@GPU
@pytest.mark.parametrize("row", [66, 65])
def test_pope_decodes_keys_whose_rows_do_not_begin_at_whole_words(row):
    case = Case(keys=200, width=64, v_width=64, dtype=torch.bfloat16)
    call = case.call(encodings(4, 64)["pope"]().to(DEVICE))
    memory = torch.empty(1, 2, 200, row, dtype=torch.bfloat16, device=DEVICE)
    memory[..., :64] = call.k
    moved = replace(call, k=memory[..., :64])
    with torch.no_grad():
        torch.testing.assert_close(decoded(moved)[0], decoded(call)[0], rtol=0.02, atol=0.01)


@GPU
@pytest.mark.parametrize(
    ("low", "high", "scale"), [(-3.0, 300.0, 1e-3), (-12.0, -8.0, 1e3), (-40.0, 40.0, 1e-2)]
)
def test_popes_own_kernel_takes_large_and_small_keys(low, high, scale):
    case = Case(keys=300, width=64, v_width=64, dtype=torch.bfloat16, options={"scale": scale})
    call = case.call(encodings(4, 64)["pope"]().to(DEVICE))
    k = torch.linspace(low, high, call.k.numel(), device=DEVICE).view_as(call.k).to(call.k.dtype)
    call = replace(call, k=k[..., torch.randperm(64, generator=torch.Generator().manual_seed(0))])
    found, truth = decoded(call)[1], exact(call, torch.float64)[1]
    torch.testing.assert_close(found.double(), truth, rtol=5e-3, atol=5e-3)


@GPU
@pytest.mark.parametrize("name", KINDS)
def test_decoding_is_captured_into_a_cuda_graph_and_repeats_its_bits(name):
    encoding = encodings(4)[name]().to(DEVICE)
    q, k, v = Case(keys=3000, dtype=torch.bfloat16).tensors()
    with torch.no_grad():
        expected = attention(q, k, v, encoding)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attention(q, k, v, encoding)
        for _ in range(3):
            found.zero_()
            graph.replay()
            assert torch.equal(found, expected)


@GPU
@pytest.mark.parametrize("name", ["rope", "pope"])
def test_angles_hold_over_many_tiles(name):
    holds(Case(keys=300_000, heads=4, width=64, v_width=64, dtype=torch.float16), name)


@pytest.mark.usefixtures("tens_of_gigabytes")
@GPU
def test_a_cache_beyond_two_to_the_31_elements_is_read_to_its_end():
    q = torch.full((1, 1, 1, 64), 8.0, device=DEVICE, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 2**25 + 100, 64, device=DEVICE, dtype=torch.bfloat16)
    k[:, :, -1] = 8.0
    assert torch.equal(attention(q, k, k, NoPE()), q)
