"""A model of this library as a Hugging Face decoder: transformers computes the same, or the model is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from phasewise.encodings import ALiBiConfig, NoPEConfig, PoPEConfig, RoPEConfig, TAPAConfig
from phasewise.frequencies import NTK, DynamicNTK, DynamicYaRN, Explicit, Geometric, LongRoPE, YaRN
from phasewise.hf import export
from phasewise.hf.language_model import open_language_model
from phasewise.model import ModelConfig, Transformer
from phasewise.model.folder import CONFIG, save
from tests.model.small import rules

LENGTH = 24
ROPE, NOPE = RoPEConfig(), NoPEConfig()
YARN = YaRN(base=100.0, factor=4.0, original_length=6)


def model_of(encoding=ROPE, **fields):
    """A model whose weights are spread so that places, norms and projections matter to its logits."""
    sizes = {"vocab_size": 61, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 40}
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**sizes, "encoding": encoding, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    return model.eval()


def partly(**fields):
    return RoPEConfig(fraction=0.5, **fields)


FAMILIES = {
    "plain": ({}, "Llama"),
    "tied": ({"tied": True}, "Llama"),
    "one key head, another eps": ({"kv_heads": 1, "norm_eps": 1e-2}, "Llama"),
    "wide heads": ({"head_dim": 16}, "Mistral"),
    "a window": ({"window": 5}, "Mistral"),
    "a window in some layers": ({"window": (5, None, 5)}, "Ministral"),
    "norms": ({"qk_norm": True}, "Qwen3"),
    "norms, tied, wide heads": ({"qk_norm": True, "tied": True, "head_dim": 16}, "Qwen3"),
    "norms, a window in some layers": ({"qk_norm": True, "window": (None, 5, 5)}, "Qwen3"),
    "gelu": ({"activation": "gelu", "tied": True}, "Arcee"),
    "partial": ({"encoding": partly()}, "Phi3"),
    "partial, a window, listed rates": (
        {"encoding": partly(frequencies=Explicit(values=[1.0, 0.3])), "window": 5},
        "Phi3",
    ),
    "some layers of nope": ({"encoding": (ROPE, NOPE, ROPE), "window": (None, None, 5)}, "SmolLM3"),
    "nope": ({"encoding": NOPE}, "SmolLM3"),
}
SAME_AT_EVERY_LENGTH = sorted(rules(4).keys() - {"dynamic_ntk", "dynamic_yarn", "longrope"})


def logits_agree(model, folder):
    """That transformers, asked in its own way, computes the logits of a model."""
    tokens = torch.randint(61, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
    torch.testing.assert_close(theirs, model(tokens, impl="reference"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_computes_what_the_model_does(tmp_path, name):
    fields, family = FAMILIES[name]
    model = model_of(**fields)
    assert export.write(model, tmp_path, length=LENGTH) == f"{family}ForCausalLM"
    logits_agree(model, tmp_path)
    difference, largest = export.compare(model, tmp_path, length=LENGTH)
    assert 0 <= difference < 1e-4 * largest


@pytest.mark.parametrize("name", SAME_AT_EVERY_LENGTH)
def test_each_rule_of_fixed_rates_is_written_as_it_is(tmp_path, name):
    model = model_of(RoPEConfig(frequencies=rules(4)[name]))
    export.write(model, tmp_path, length=LENGTH)
    logits_agree(model, tmp_path)


def test_two_equal_lists_of_longrope_are_fixed_rates(tmp_path):
    lists = {"short_factor": (1.0, 2.0, 3.0, 4.0), "long_factor": (1.0, 2.0, 3.0, 4.0)}
    rule = LongRoPE(base=100.0, original_length=6, factor=4.0, **lists)
    model = model_of(RoPEConfig(frequencies=rule))
    export.write(model, tmp_path, length=LENGTH)
    logits_agree(model, tmp_path)


def test_lists_that_turn_a_part_keep_their_own_attention_factor(tmp_path):
    lists = {"short_factor": (1.0, 2.0), "long_factor": (1.0, 2.0)}
    model = model_of(partly(frequencies=LongRoPE(base=100.0, original_length=6, factor=4.0, **lists)))
    assert export.write(model, tmp_path, length=LENGTH) == "Phi3ForCausalLM"
    logits_agree(model, tmp_path)


def test_rates_with_another_base_turn_a_part(tmp_path):
    model = model_of(partly(frequencies=NTK(base=100.0, factor=4.0)))
    assert export.write(model, tmp_path, length=LENGTH) == "Phi3ForCausalLM"
    logits_agree(model, tmp_path)


def test_a_model_without_finite_logits_is_what_is_at_fault(tmp_path):
    model = model_of()
    with torch.no_grad():
        model.blocks[1].feed_forward.up.weight.mul_(1e30)
        model.blocks[1].feed_forward.gate.weight.mul_(1e30)
    export.write(model, tmp_path, length=LENGTH)
    with pytest.raises(ValueError, match="the model's own logits are not finite"):
        export.compare(model, tmp_path, length=LENGTH)


@pytest.mark.parametrize("fields", [{"qk_norm": True, "window": (None, 5, 5)}, {"activation": "gelu"}])
def test_decoding_gives_the_same_tokens(tmp_path, fields):
    model = model_of(RoPEConfig(frequencies=YARN), **fields)
    save(model, tmp_path / "own")
    export.write(model, tmp_path / "theirs", length=LENGTH)
    own, theirs = (open_language_model(tmp_path / name) for name in ("own", "theirs"))
    prompt = torch.arange(7)[None]
    assert own.continued(prompt, length=17).tolist() == theirs.continued(prompt, length=17).tolist()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"encoding": PoPEConfig()}, "encoding pope is in no decoder of transformers; rope and nope are"),
        ({"encoding": TAPAConfig()}, "encoding tapa is in no decoder"),
        ({"encoding": (ROPE, ALiBiConfig(), ROPE)}, "encoding alibi is in no decoder"),
        ({"encoding": (ROPE, partly(), ROPE)}, "different fractions"),
        (
            {"encoding": (ROPE, RoPEConfig(frequencies=Geometric(base=5.0)), ROPE)},
            "the layers have different rules",
        ),
        (
            {"encoding": RoPEConfig(frequencies=DynamicNTK(base=1e4, factor=2.0, original_length=8))},
            "rates of dynamic_ntk follow the length served: .*; fix them with",
        ),
        (
            {"encoding": RoPEConfig(frequencies=DynamicYaRN(base=1e4, original_length=8))},
            "rates of dynamic_yarn follow the length served",
        ),
        ({"encoding": RoPEConfig(frequencies=rules(4)["longrope"])}, "rates of longrope follow the length"),
        ({"encoding": RoPEConfig(frequencies=Explicit(values=[1.0, 0.5, 0.1, 0.0]))}, "rates of 0"),
        ({"window": (5, 7, None)}, "window is 5 and 7 in different layers"),
        ({"activation": "gelu", "qk_norm": True}, "has activation gelu and qk_norm together; train without"),
        ({"activation": "gelu", "window": 5}, "has a window and activation gelu together"),
        ({"encoding": partly(frequencies=YARN)}, "a fraction below 1 and scaled rates together"),
        ({"encoding": (ROPE, NOPE, ROPE), "qk_norm": True}, "has layers of nope and qk_norm together"),
        (
            {"encoding": RoPEConfig(frequencies=YARN.model_copy(update={"factor": 2.0}))},
            "length 24 contradicts the yarn rule, which is for 6 to 12 tokens: give such a length",
        ),
    ],
)
def test_what_no_decoder_computes_is_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        export.hf_config(model_of(**fields).config, length=LENGTH)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({}, {"rope_theta": 9_000.0, "rope_parameters": None}),
        ({}, {"hidden_act": "gelu"}),
        ({"norm_eps": 1e-2}, {"rms_norm_eps": 1e-3}),
        ({"window": 5}, {"sliding_window": 6}),
        (
            {"encoding": RoPEConfig(frequencies=YARN)},
            {"rope_scaling": None, "rope_parameters": None, "rope_theta": 100.0},
        ),
    ],
)
def test_a_decoder_that_computes_something_else_is_told_apart(tmp_path, fields, wrong):
    model = model_of(**fields)
    export.write(model, tmp_path, length=LENGTH)
    export.compare(model, tmp_path, length=LENGTH)
    content = json.loads((tmp_path / CONFIG).read_text())
    changed = {key: value for key, value in (content | wrong).items() if value is not None}
    (tmp_path / CONFIG).write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"differ by .* more than rounding"):
        export.compare(model, tmp_path, length=LENGTH)


def test_older_readers_find_the_rates_and_no_token_is_special(tmp_path):
    export.write(model_of(RoPEConfig(frequencies=YARN)), tmp_path, length=LENGTH)
    content = json.loads((tmp_path / CONFIG).read_text())
    assert (content["rope_theta"], content["rope_scaling"]["type"]) == (100.0, "yarn")
    assert content["rope_scaling"].items() >= content["rope_parameters"].items()
    assert [content[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3


def test_who_may_read_the_config_may_read_the_weights(tmp_path):
    export.write(model_of(), tmp_path, length=LENGTH)
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / CONFIG).stat().st_mode


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"qk_norm": True}, []),
        ({"encoding": RoPEConfig(frequencies=rules(4)["llama3"])}, []),
        ({"encoding": RoPEConfig(frequencies=rules(4)["llama3"]), "qk_norm": True}, ["rates of llama3"]),
        ({"encoding": RoPEConfig(frequencies=YARN), "qk_norm": True}, []),
        (
            {"encoding": (ROPE, NOPE, ROPE), "window": (5, None, 5)},
            [export.SOME_WINDOWS, export.UNTURNED],
        ),
    ],
)
def test_what_other_programs_pass_over_is_named(fields, said):
    assert export.passed_over(model_of(**fields).config) == said
