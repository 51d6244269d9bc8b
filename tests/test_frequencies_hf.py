"""Hugging Face configs: read as transformers reads them, refused where contradictory, written exactly."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from experiments import compare_with_transformers as comparison
from phasewise.frequencies import (
    NTK,
    DynamicNTK,
    DynamicYaRN,
    Explicit,
    Geometric,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from phasewise.frequencies_hf import RopeSettings, from_hf, lengths_of, require_length, to_hf

transformers.logging.set_verbosity_error()

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}
LISTS = {"short_factor": [1.0, 1.25], "long_factor": [2.0, 16.0]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
WRITABLE = [
    Geometric(base=500_000.0),
    Linear(base=1e4, factor=3.3),
    DynamicNTK(base=1e4, factor=2.0, original_length=2048),
    YaRN(base=1e6, factor=4.0, original_length=32_768),
    YaRN(
        base=150_000.0,
        factor=32.0,
        original_length=4096,
        mscale=0.707,
        mscale_all_dim=1 / 3,
        beta_fast=20.0,
        beta_slow=0.3,
        truncate=False,
    ),
    YaRN(base=1e4, factor=40.0, original_length=4096, attention=1.1),
    LongRoPE(base=1e4, original_length=4096, factor=32.0, **LISTS),
    LongRoPE(base=1e4, original_length=4096, attention=1.19, **LISTS),
    Llama3(base=5e5, factor=8.0, original_length=8192, low_freq_factor=0.9, high_freq_factor=3.7),
    Proportional(base=1e6, fraction=0.3),
    Proportional(base=1e6, fraction=0.25, factor=8.0),
]


def flat(**parameters) -> dict:
    return {"rope_parameters": parameters}


def config(**changes) -> dict:
    """YARN in a config as checkpoints carry it."""
    return {"max_position_embeddings": 131_072, "rope_parameters": {**YARN, **changes}}


@pytest.mark.parametrize("rule", WRITABLE, ids=repr)
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_what_is_written_reads_back_exactly_in_both_forms(rule, fraction):
    settings = RopeSettings(frequencies=rule, fraction=1.0 if isinstance(rule, Proportional) else fraction)
    assert from_hf(json.loads(json.dumps(to_hf(settings)))) == settings
    if not isinstance(rule, Proportional):
        legacy = json.loads(json.dumps(to_hf(settings, legacy=True)))
        assert "rope_parameters" not in legacy
        assert "rope_type" not in (legacy["rope_scaling"] or {})
        assert from_hf(legacy) == settings


@pytest.mark.parametrize("rule", WRITABLE, ids=repr)
def test_what_is_written_survives_a_transformers_config_and_back(rule):
    settings = RopeSettings(frequencies=rule)
    built = LlamaConfig(head_dim=4, **{"max_position_embeddings": 131_072, **to_hf(settings)})
    if isinstance(rule, LongRoPE | YaRN) and rule.attention is None:
        built.max_position_embeddings = rule.original_length
    if isinstance(rule, LongRoPE) and rule.factor is None:
        settings = RopeSettings(frequencies=rule.model_copy(update={"factor": 32.0}))
    if isinstance(rule, YaRN) and rule.attention is not None:
        built.max_position_embeddings = 163_840
    assert from_hf(built) == settings
    assert from_hf(LlamaConfig.from_dict(json.loads(built.to_json_string()))) == settings


def test_a_nested_config_round_trips_with_layers_that_do_not_turn():
    settings = {
        "full_attention": RopeSettings(frequencies=WRITABLE[4]),
        "sliding_attention": RopeSettings(frequencies=DynamicNTK(base=1e4, factor=2.0, original_length=4096)),
        "hybrid": RopeSettings(frequencies=Geometric(base=1e4), fraction=0.25),
        "no_positions": None,
    }
    assert from_hf(json.loads(json.dumps(to_hf(settings)))) == settings


@pytest.mark.parametrize(
    "written",
    [
        config(),
        {"max_position_embeddings": 32_768, "rope_parameters": YARN},
        {"rope_parameters": {**YARN, "rope_theta": None}, "rope_theta": 1e6},
        {"rope_scaling": {key.replace("rope_type", "type"): value for key, value in YARN.items()}},
        {"rope_scaling": {**YARN, "type": "yarn"}, "rope_parameters": YARN},
        {"rope_scaling": {**YARN, "rope_theta": None}, "rope_parameters": YARN, "rope_theta": 1e6},
        {"max_position_embeddings": 131_072, "rope_parameters": {**YARN, "factor": None}},
        YARN,
        SimpleNamespace(max_position_embeddings=131_072, rope_parameters=YARN, rope_scaling=None),
        {"model_type": "some_vl", "text_config": config(), "vision_config": {"rope_theta": 100.0}},
        LlamaConfig(**config()),
        LlamaConfig(
            max_position_embeddings=131_072, rope_theta=1e6, rope_scaling={**YARN, "rope_theta": 1e6}
        ),
    ],
    ids=lambda written: type(written).__name__,
)
def test_every_way_to_state_one_rule_reads_as_that_rule(written):
    yarn = YaRN(base=1e6, factor=4.0, original_length=32_768)
    assert from_hf(written) == RopeSettings(frequencies=yarn)


def test_llama_3_1_keeps_its_native_scaling_beside_a_longer_maximum():
    read = from_hf({"max_position_embeddings": 131_072, "rope_theta": 5e5, "rope_scaling": LLAMA3})
    assert read.frequencies == Llama3(base=5e5, factor=8.0, original_length=8192)


def test_phi_3_takes_its_factor_from_the_two_lengths_and_its_older_name():
    lists = {"short_factor": [1.0] * 48, "long_factor": [float(i + 1) for i in range(48)]}
    legacy = {
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "su", **lists},
    }
    rule = LongRoPE(base=1e4, factor=32.0, original_length=4096, **lists)
    assert from_hf({**legacy, "head_dim": None}).frequencies == rule
    named = {**legacy, "rope_scaling": {"rope_type": "longrope", **lists}}
    assert from_hf(Phi3Config(**named, pad_token_id=0)).frequencies == rule


def test_gemma_3_reads_alike_in_its_legacy_and_its_nested_form():
    legacy = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    read = from_hf(legacy)
    assert read == {
        "full_attention": RopeSettings(frequencies=Linear(base=1e6, factor=8.0)),
        "sliding_attention": RopeSettings(frequencies=Geometric(base=1e4)),
    }
    assert from_hf(Gemma3TextConfig(**legacy)) == read


def test_partial_rotation_is_read_from_each_family_s_own_name():
    half = RopeSettings(frequencies=Geometric(base=1e4), fraction=0.5)
    assert from_hf({"rope_theta": 1e4, "partial_rotary_factor": 0.5}) == half
    assert from_hf(flat(rope_theta=1e4, partial_rotary_factor=0.5)) == half
    assert from_hf({"rotary_emb_base": 1e4, "rotary_pct": 0.5}) == half
    assert from_hf({"rope_theta": 1e4, "rotary_dim": 64, "head_dim": 128}) == half
    assert (
        from_hf({"rope_theta": 1e4, "rotary_dim": 64, "hidden_size": 512, "num_attention_heads": 4}) == half
    )


def test_a_nested_truncate_counts():
    nested = from_hf({"rope_parameters": {"full_attention": {**YARN, "truncate": False}}})
    rule = nested["full_attention"].frequencies
    assert rule == YaRN(base=1e6, factor=4.0, original_length=32_768, truncate=False)
    rates, _ = comparison.theirs(comparison.Case(rule, head_dim=128))
    assert comparison.relative(rates, rule.rates(64)).max() < 1e-5


# fmt: off
FAMILIES = [
    "apertus", "cohere", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm4",
    "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral", "modernbert", "olmo2", "olmo3",
    "phi", "phi3", "qwen2", "qwen3", "qwen3_next", "smollm3", "stablelm", "starcoder2",
]
# fmt: on


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_default_config_is_read_and_written_back(family):
    read = from_hf(CONFIG_MAPPING[family]())
    assert from_hf(to_hf(read)) == read
    for settings in read.values() if isinstance(read, dict) else [read]:
        rates = settings.frequencies.rates(settings.channels(128))
        assert rates[0] == 1
        assert torch.isfinite(rates).all()


def test_static_ntk_is_written_as_the_base_it_amounts_to():
    written = to_hf(RopeSettings(frequencies=NTK(base=1e4, factor=4.0), fraction=0.5), head_dim=128)
    read = from_hf(written)
    assert read.fraction == 0.5
    assert read.frequencies == Geometric(base=1e4 * 4 ** (32 / 31))
    assert torch.equal(read.frequencies.rates(32), NTK(base=1e4, factor=4.0).rates(32))


def test_the_rule_of_one_served_length_can_be_written_for_every_continuous_rule():
    ntk = DynamicNTK(base=1e4, factor=2.0, original_length=2048).at(8192, 64)
    assert from_hf(to_hf(ntk)).frequencies == ntk
    yarn = DynamicYaRN(base=1e4, original_length=2048).at(8192, 64)
    assert from_hf(to_hf(yarn)).frequencies == YaRN(base=1e4, factor=4.0, original_length=2048)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (NTK(base=1e4, factor=2.0), {}, "ntk is written as .* give head_dim"),
        (NTK(base=1e4, factor=2.0), {"head_dim": "64"}, "head_dim is '64'; give the width of a head"),
        (NTK(base=1e4, factor=2.0), {"head_dim": 2}, "n is 1; .* use 2 or more, or Linear"),
        (DynamicYaRN(base=1e4, original_length=64), {}, r"no rule for dynamic_yarn; .* rule.at\(length, n\)"),
        (Explicit(values=[1.0]), {}, "no rule for explicit; write a LongRoPE"),
        (Proportional(base=1e4, fraction=0.5), {"legacy": True}, "no rule named proportional; write v5's"),
        (
            {"full_attention": Geometric(base=1e4)},
            {"legacy": True},
            "no form for layer types .*full_attention",
        ),
        (
            {name: DynamicNTK(base=1e4, factor=2.0, original_length=n) for name, n in (("a", 8), ("b", 16))},
            {},
            "layer type b needs .*16.*, an earlier one .*8.*the same original_length",
        ),
        (
            {"a": DynamicNTK(base=1e4, factor=2.0, original_length=8), "b": WRITABLE[3]},
            {},
            "max_position_embeddings is 8, below original_max_position_embeddings 32768",
        ),
    ],
)
def test_what_hugging_face_cannot_say_is_refused_with_the_remedy(settings, options, message):
    with pytest.raises(ValueError, match=message):
        to_hf(settings, **options)


NESTED = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "no rope_theta.*a guess of 10000"),
        ({"hidden_size": 512}, "no rope_theta"),
        (flat(rope_type="linear", factor=2.0), "no rope_theta"),
        ({"rope_parameters": NESTED}, r"rope_parameters\['sliding_attention'\] has no rope_theta"),
        (
            {"rope_parameters": YARN, "rope_theta": 1e4},
            r"base is given twice .*= 1000000.0, rope_theta = 10000.0",
        ),
        ({"rope_theta": 1e4, "rotary_emb_base": 1e5}, "base is given twice"),
        ({"rope_parameters": NESTED, "rope_theta": 1e4}, "base is given twice"),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rotary_pct": 0.25},
            "rotated fraction is given twice",
        ),
        ({"rope_theta": 1e4, "rotary_dim": 64}, "rotary_dim is 64; give head_dim"),
        (config(type="linear"), "rule's name is given twice .*yarn.*linear"),
        ({"rope_parameters": YARN, "rope_scaling": {**YARN, "factor": 8.0}}, "factor is given twice"),
        ({"rope_parameters": YARN, "rope_scaling": {**YARN, "rope_theta": 1e4}}, "rope_theta is given twice"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {**YARN, "rope_theta": None}},
            "rope_parameters is .* and rope_scaling .* disagree",
        ),
        (
            config(rope_type="mrope"),
            "rope_type is 'mrope'; the rules read are default, linear, dynamic, yarn",
        ),
        (flat(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24]), "mrope_section, unknown"),
        (config(finetuned=True), "has finetuned, unknown to rope_type 'yarn', which takes rope_theta"),
        (flat(rope_type="linear", rope_theta=1e4, factor=2.0, attention_factor=1.1), "has attention_factor"),
        (flat(rope_type="linear", rope_theta=1e4), "Linear is missing factor"),
        (flat(rope_type="linear", rope_theta=1e4, factor=0.5), "factor is 0.5"),
        (flat(rope_theta=1e4, partial_rotary_factor=1.5), "less than or equal to 1"),
        (config(factor=2.0), "factor is 2.0, but .* 131072 / 32768 = 4; correct one"),
        (config(original_max_position_embeddings=None), "yarn needs original_max_position_embeddings"),
        ({**config(), "original_max_position_embeddings": 4096}, "original length is given twice"),
        (
            {"rope_parameters": {**YARN, "factor": None}, "max_position_embeddings": 32_768},
            "yarn has no factor and both lengths are 32768",
        ),
        ({"rope_parameters": {**YARN, "factor": None}}, "factor is None|factor"),
        ({"rope_parameters": LLAMA3, "max_position_embeddings": 4096}, "is 4096, below .* 8192"),
        (flat(rope_type="dynamic", rope_theta=1e4, factor=2.0), "dynamic needs max_position_embeddings"),
        (
            {
                "max_position_embeddings": 8192,
                **flat(
                    rope_type="dynamic", rope_theta=1e4, factor=2.0, original_max_position_embeddings=2048
                ),
            },
            "original length is given twice",
        ),
        (
            flat(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=4096, **LISTS),
            "LongRoPE is missing factor",
        ),
        (
            {
                "head_dim": 8,
                "max_position_embeddings": 8192,
                **flat(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=4096, **LISTS),
            },
            "LongRoPE lists 2 channels and n is 4",
        ),
        (
            {"rope_parameters": {**NESTED, "rope_theta": 1e6}},
            "nested by layer type, but rope_theta stands outside",
        ),
        ({"rope_parameters": NESTED, "rope_local_base_freq": 1e4}, "rope_local_base_freq stands outside"),
        (
            {"global_rope_theta": 160_000.0, "local_rope_theta": 1e4},
            "global_rope_theta is 160000.0 and not read",
        ),
        ({"rope_theta": 1e4, "layer_rope_theta": [1e4, 0]}, "layer_rope_theta"),
        ("config.json", "'config.json' is no config; give a dict"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_a_config_that_contradicts_itself_or_leaves_something_open_is_refused(written, message):
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        from_hf(written)


def test_a_share_of_a_head_that_is_no_even_number_of_dimensions_is_refused():
    settings = RopeSettings(frequencies=Geometric(base=1e4), fraction=0.3)
    assert settings.channels(40) == 6
    with pytest.raises(ValueError, match=r"fraction 0.3 of head_dim 64 turns 19 dimensions"):
        settings.channels(64)
    with pytest.raises(ValueError, match="turns 0 dimensions"):
        settings.channels(2)


def test_reading_changes_nothing_in_what_was_given():
    written = {"rope_parameters": {"full_attention": dict(YARN), "sliding_attention": {"rope_theta": 1e4}}}
    before = json.dumps(written)
    from_hf(written)
    assert json.dumps(written) == before
    assert math.isclose(written["rope_parameters"]["full_attention"]["rope_theta"], 1e6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 1e4, "hidden_size": 64, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"rope_theta": 1e4, "head_dim": 0, "rotary_dim": 4}, "head_dim is 0"),
        ({"rope_theta": 1e4, "max_position_embeddings": "32768"}, "max_position_embeddings is '32768'"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
        ({"rope_theta": 1e4, "rope_scaling": [1, 2]}, r"rope_scaling is \[1, 2\]; give a dict"),
        ({"rope_theta": 1e4, "rope_scaling": "yarn"}, "rope_scaling is 'yarn'; give a dict"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": ["yarn"]}}, "type is \\['yarn'\\]; give the name"),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
            },
            "original_max_position_embeddings is 0",
        ),
    ],
)
def test_values_of_the_wrong_kind_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        from_hf(config)


@pytest.mark.parametrize("settings", [None, {"a": 1}, 3])
def test_what_is_no_rule_is_not_written(settings):
    with pytest.raises(ValueError, match="is no rule"):
        to_hf(settings)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int64])
def test_numbers_of_numpy_are_numbers(number):
    written = {"rope_theta": number(10_000), "rope_scaling": {"type": "linear", "factor": number(2)}}
    assert from_hf(written).frequencies == Linear(base=1e4, factor=2.0)


def test_what_stands_in_rope_scaling_is_said_to():
    with pytest.raises(ValueError, match=r"^rope_scaling has alpha, unknown to rope_type 'linear'"):
        from_hf({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3.0}})


def test_the_head_width_of_a_gpt_j_config_is_read():
    config = {"rope_theta": 1e4, "n_embd": 64, "n_head": 4, "rotary_dim": 8}
    assert from_hf(config).fraction == 0.5


def test_a_yarn_factor_beyond_max_position_embeddings_is_taken_as_given():
    """Qwen3's published YaRN setting: 40960 positions, of which 32768 are the original length, times 4."""
    written = {
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    }
    assert from_hf(written).frequencies == YaRN(base=1e6, factor=4.0, original_length=32768)


@pytest.mark.parametrize(
    ("rule", "least", "largest"),
    [
        (YaRN(base=1e4, factor=4.0, original_length=64), 64, 256),
        (YaRN(base=1e4, factor=4.01, original_length=64), 64, 256),
        (YaRN(base=1e4, factor=1000 / 7, original_length=7), 7, 1000),
        (LongRoPE(base=1e4, short_factor=[1], long_factor=[1], original_length=9, factor=1.5), 9, 13),
        (LongRoPE(base=1e4, short_factor=[1], long_factor=[1], original_length=9, attention=1.0), 9, None),
        (Llama3(base=1e4, factor=4.0, original_length=64), 64, None),
        (DynamicNTK(base=1e4, factor=4.0, original_length=64), 64, 64),
        (Linear(base=1e4, factor=4.0), 1, None),
    ],
)
def test_lengths_that_suit_a_rule_are_those_that_are_read_beside_it(rule, least, largest):
    def read(length):
        return from_hf({**to_hf(rule), "max_position_embeddings": length}).frequencies

    assert lengths_of(rule) == (least, largest)
    for length in {least, largest or 10**6}:
        require_length(rule, length)
        assert read(length).model_copy(update={"factor": None}) == rule.model_copy(update={"factor": None})
    for length in {*([least - 1] if least > 1 else []), *([largest + 1] if largest else [])}:
        with pytest.raises(ValueError, match=rf"length {length} contradicts the {rule.kind} rule"):
            require_length(rule, length)
        if not isinstance(rule, DynamicNTK):
            with pytest.raises(ValueError, match="original"):
                read(length)
