import pytest
from pydantic import ValidationError

from phasewise.encodings import ALiBiConfig, NoPEConfig, PoPEConfig, RoPE, RoPEConfig, TAPAConfig
from phasewise.frequencies import Geometric, LongRoPE, YaRN
from phasewise.model import ModelConfig

SIZES = {"vocab_size": 11, "width": 48, "layers": 3, "heads": 6}
LONGROPE = LongRoPE(base=1e4, factor=4.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_length=8)


@pytest.mark.parametrize(
    "encoding",
    [
        NoPEConfig(),
        RoPEConfig(frequencies=YaRN(base=1e4, factor=4.0, original_length=64), fraction=0.5),
        RoPEConfig(frequencies=LONGROPE),
        PoPEConfig(phase_init="uniform", magnitude="relu"),
        TAPAConfig(alpha=0.25),
        ALiBiConfig(),
        (RoPEConfig(frequencies=Geometric(base=500.0)), NoPEConfig(), TAPAConfig()),
    ],
)
def test_json_gives_the_same_config_back(encoding):
    config = ModelConfig(**SIZES, kv_heads=2, encoding=encoding, window=(4, None, 8), qk_norm=True, tied=True)
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config


def test_what_is_left_out_or_none_is_filled_in_from_the_sizes():
    config = ModelConfig(
        **SIZES, kv_heads=None, head_dim=None, hidden=None, window=None, encoding=NoPEConfig()
    )
    assert (config.kv_heads, config.head_dim, config.hidden) == (6, 8, 128)
    assert config == ModelConfig(**SIZES, encoding=NoPEConfig())
    assert ModelConfig(**SIZES, activation="gelu", encoding=NoPEConfig()).hidden == 192
    assert ModelConfig(**SIZES | {"width": 768}, encoding=NoPEConfig()).hidden == 2048


def test_head_dim_need_not_divide_the_width():
    assert ModelConfig(**SIZES | {"width": 50}, head_dim=8, encoding=NoPEConfig()).head_dim == 8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_heads": 4}, r"6 heads do not divide among 4 kv_heads; kv_heads must be one of \[1, 2, 3, 6\]"),
        ({"width": 50}, "width 50 does not divide into 6 heads; give head_dim"),
        ({"width": 6, "encoding": RoPEConfig()}, "width 6 in 6 heads gives head_dim 1: .* from 2"),
        ({"head_dim": 3, "encoding": RoPEConfig()}, "Value error, RoPE turns channels in pairs: head_dim 3"),
        (
            {"encoding": (NoPEConfig(), NoPEConfig())},
            r"encoding must be one value or one per layer \(3\), but 2",
        ),
        ({"window": (4, 4)}, r"window must be one value or one per layer \(3\), but 2"),
        ({"window": 0}, "greater than or equal to 1"),
        ({"vocab_size": 0}, "greater than or equal to 1"),
        ({"vocab_size": None}, "Field required"),
        ({"dropout": 1.0}, "less than 1"),
        ({"norm_eps": 0.0}, "greater than 0"),
        ({"activation": "relu"}, "'swiglu' or 'gelu'"),
        ({"bias": True}, "Extra inputs are not permitted"),
        ({"encoding": {"kind": "rotary"}}, "'nope', 'rope', 'pope', 'tapa', 'alibi'"),
        ({"encoding": "rope"}, r"encoding is 'rope'; give its config, as RoPEConfig\(\)"),
        ({"encoding": RoPE(head_dim=8)}, r"encoding is RoPE\(\); give its config"),
        ({"encoding": (NoPEConfig(), "rope", NoPEConfig())}, "encoding is 'rope'; give its config"),
        ({"encoding": {"kind": "tapa", "alpha": -0.1}}, "greater than or equal to 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SIZES, "encoding": NoPEConfig(), **fields})


def test_a_wrong_size_is_named_even_when_others_are_derived_from_it():
    with pytest.raises(ValidationError, match="heads"):
        ModelConfig(**SIZES | {"heads": 0}, encoding=NoPEConfig())


def test_a_config_cannot_be_changed():
    config = ModelConfig(**SIZES, encoding=NoPEConfig())
    with pytest.raises(ValidationError, match="frozen"):
        config.width = 64


def test_layers_have_the_encodings_and_windows_given_to_them():
    config = ModelConfig(**SIZES, encoding=(RoPEConfig(), NoPEConfig(), RoPEConfig()), window=(4, None, 8))
    assert [encoding.kind for encoding in config.encodings] == ["rope", "nope", "rope"]
    assert config.windows == (4, None, 8)
    assert ModelConfig(**SIZES, window=5, encoding=NoPEConfig()).windows == (5, 5, 5)
