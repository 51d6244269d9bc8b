import contextlib
import gc
import math
import sys
import weakref

import pytest
import torch

from phasewise.encodings import NoPE, RoPE
from phasewise.frequencies_hf import RopeSettings, from_hf
from phasewise.positions import Positions, visible
from tests.hf.tiny import MODELS, SIZES, tiny

transformers = pytest.importorskip("transformers", reason="reading checkpoints needs transformers")

from phasewise.hf import reading  # noqa: E402
from phasewise.hf.reading import ASKING, FAMILIES, HFReader  # noqa: E402

TOKENS = torch.arange(3, 43)[None] % 64


def read(model, tokens=TOKENS):
    found = []
    HFReader(model).read(tokens, lambda layer, q, k: found.append((layer, q, k)))
    return found


def attended(model, tokens=TOKENS):
    """What each layer hands to its attention function: rotated queries and keys, and the scale."""
    seen = []

    def record(module, query, key, value, attention_mask, **options):
        seen.append((query, key, options["scaling"]))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, **options)

    transformers.AttentionInterface.register("recording", record)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionMaskInterface.register("recording", masks["eager"])
    model.set_attn_implementation("recording")
    with torch.no_grad():
        model.base_model(input_ids=tokens, use_cache=False)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_scores_of_the_layer_read_are_those_the_model_computes(name):
    model = tiny(name)
    at = Positions.arange(TOKENS.shape[1])
    layers = read(model)
    assert [layer.index for layer, _, _ in layers] == [0, 1]
    for (layer, q, k), (turned_q, turned_k, scale) in zip(layers, attended(model), strict=True):
        groups = turned_q.shape[1] // turned_k.shape[1]
        model_scores = (turned_q @ turned_k.repeat_interleave(groups, 1).transpose(-1, -2)) * scale
        ours = layer.encoding.scores(q, k, at, at, scale=layer.scale)
        assert (ours - model_scores).abs().max() < 1e-5 * model_scores.abs().max()


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gptj")])
def test_rates_read_from_the_model_are_those_its_config_asks_for(name):
    model = tiny(name)
    settings = from_hf(model.config)
    for layer, q, _ in read(model):
        flat = isinstance(settings, RopeSettings)
        of = settings if flat else settings[model.config.layer_types[layer.index]]
        n = of.channels(q.shape[-1])
        rule = of.frequencies.at(TOKENS.shape[1], n)
        expected = rule.rates(n)
        assert isinstance(layer.encoding, RoPE)
        assert torch.allclose(layer.encoding.frequencies.rates(n), expected, rtol=1e-5)
        assert layer.encoding.channels == n
        factor = layer.encoding.frequencies.attention_factor(n)
        assert math.isclose(factor, rule.attention_factor(n), rel_tol=1e-5)


def test_windows_softcaps_and_scales_are_those_of_each_layer():
    first, second = (layer for layer, _, _ in read(tiny("gemma2")))
    assert (first.window, second.window) == (8, None)
    assert first.softcap == second.softcap == 50.0
    assert math.isclose(first.scale, 20.0**-0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "glm (interleaved, partial)"])
def test_half_precision_models_are_read_as_they_are(name, dtype):
    for (layer, q, _), (wide, _, _) in zip(read(tiny(name, dtype=dtype)), read(tiny(name)), strict=True):
        assert q.dtype == dtype
        rates, exact = (each.encoding.frequencies.rates(each.encoding.channels) for each in (layer, wide))
        assert torch.allclose(rates, exact, rtol=4e-3)


def test_a_layer_whose_scores_are_not_those_of_what_was_read_is_refused(monkeypatch):
    entries = reading._entries
    monkeypatch.setattr(reading, "_entries", lambda *given, pairs: entries(*given, pairs=pairs)[::-1])
    with pytest.raises(ValueError, match="this llama model do more than turn their channels in pairs"):
        read(tiny("llama"))


def test_reading_changes_nothing_in_the_model():
    model = tiny("qwen3")
    before = model(TOKENS).logits
    read(model)
    assert model.config._attn_implementation != ASKING
    assert torch.equal(model(TOKENS).logits, before)


def test_failing_sink_leaves_no_hook_behind():
    model = tiny("llama")

    def fail(*_):
        raise RuntimeError("stop")

    with contextlib.suppress(RuntimeError):
        HFReader(model).read(TOKENS, fail)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation != ASKING


def test_layer_without_rotation_reads_as_nope():
    config = transformers.SmolLM3Config(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "no_rope_layers": [1, 0], "pad_token_id": 0},
    )
    kinds = [type(layer.encoding) for layer, _, _ in read(transformers.SmolLM3ForCausalLM(config).eval())]
    assert kinds == [RoPE, NoPE]


SMALL = {**SIZES, "head_dim": 16}
HYBRID = {
    **SMALL,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    [
        ("qwen3_next", HYBRID, [(3, None)]),
        ("phimoe", {**SMALL, "sliding_window": 8, "num_local_experts": 2}, [(0, 8), (1, 8)]),
        ("ministral3", {**SMALL, "sliding_window": None}, [(0, None), (1, None)]),
        ("nanochat", SMALL, [(0, None), (1, None)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_attention_of_the_layers_read_is_that_of_the_model(family, sizes, expected):
    """Linear attention beside it, a window told by the mask alone, queries scaled by their place, norms after
    the rotation."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    layers, at = read(model), Positions.arange(TOKENS.shape[1])
    assert [(layer.index, layer.window) for layer, _, _ in layers] == expected
    with torch.no_grad():
        paid = model(TOKENS, output_attentions=True, use_cache=False).attentions
    for (layer, q, k), attention in zip(layers, paid, strict=True):
        scores = layer.encoding.scores(q, k, at, at, scale=layer.scale)
        seen = visible(at, at, window=layer.window)[:, None]
        ours = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        assert torch.allclose(ours, attention, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            transformers.GPTNeoXJapaneseConfig(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
            ),
            "GPTNeoXJapaneseAttention computes attention by itself",
        ),
        (
            transformers.Llama4TextConfig(**SMALL, intermediate_size_mlp=16, num_local_experts=2),
            "Llama4TextAttention is given rotations in another form",
        ),
        (transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64), "gpt2"),
        (transformers.FalconConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2), "Falcon"),
    ],
)
def test_model_that_is_not_read_is_refused_naming_the_families_that_are(config, said):
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=", ".join(FAMILIES)) as error:
        read(model)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["llama", "glm (interleaved, partial)"])
def test_what_a_layer_computes_is_let_go_before_the_next_one_is_read(name):
    held, alive = [], []

    def sink(layer, q, k):
        alive.append([reference() is not None for reference in held])
        held.extend([weakref.ref(q), weakref.ref(k)])

    gc.disable()
    try:
        HFReader(tiny(name)).read(TOKENS, sink)
    finally:
        gc.enable()
    assert alive == [[], [False, False]]
    assert [reference() for reference in held] == [None] * 4


@pytest.mark.parametrize(
    "name", ["llama, yarn", "gemma3", "phi", "gptj (interleaved, partial, sin before cos)"]
)
def test_rotations_at_any_places_are_angles_of_the_rates_read(name):
    places = torch.tensor([0, 1, 7, 200])
    for rotation in HFReader(tiny(name)).rotations(places):
        encoding = rotation.layer.encoding
        rates = encoding.frequencies.rates(encoding.channels)
        angle = places[:, None] * rates
        factor = encoding.frequencies.attention_factor(encoding.channels)
        torch.testing.assert_close(rotation.cos, factor * angle.cos(), atol=1e-4, rtol=0)
        torch.testing.assert_close(rotation.sin, factor * angle.sin(), atol=1e-4, rtol=0)
        assert rotation.half_split == ("interleaved" not in name)
