"""Which layers of a decoder have rates, and how far they see, asked without weights."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from phasewise.hf.reading import HFReader
from phasewise.hf.sight import bound, sights
from phasewise.model.sight import Bound
from tests.hf.tiny import MODELS, SIZES, theta

EIGHT = {"num_hidden_layers": 4, "sliding_window": 8, "head_dim": 16, **theta(1e4)}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
WINDOWED = {
    "cohere2": (EIGHT, Bound(8, 3, 1)),
    "exaone4": ({**EIGHT, "sliding_window_pattern": 4}, Bound(8, 3, 1)),
    "afmoe": (
        {**EIGHT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        Bound(8, 3, 1),
    ),
    "llama4_text": ({**EIGHT, **EXPERTS, "attention_chunk_size": 8}, Bound(8, 3, 1)),  # by its mask alone
    "phimoe": ({**EIGHT, **EXPERTS}, Bound(8, 4, 0)),  # by its mask alone
    "mistral": (EIGHT, Bound(8, 4, 0)),
    "minimax": ({**EIGHT, **EXPERTS}, Bound(8, 2, 0)),  # beside linear attention
}
WHOLE = {
    "llama": theta(1e4),
    "gemma2": EIGHT,
    "smollm3": {**EIGHT, "use_sliding_window": False},
    "gpt_oss": {**EIGHT, **EXPERTS},
    "qwen2": {**EIGHT, "use_sliding_window": False},
    "phi3": {**theta(1e4), "sliding_window": None},
    "gpt2": {},
}


def described(family, changes):
    return AutoConfig.for_model(family, **{**SIZES, **changes})


@pytest.mark.parametrize("family", WINDOWED)
def test_rates_of_windowed_layers_alone_are_told(family):
    changes, expected = WINDOWED[family]
    config = described(family, changes)
    before = config.to_dict()
    assert bound(config) == bound(before) == expected
    assert config.to_dict() == before


@pytest.mark.parametrize("family", WHOLE)
def test_rates_that_see_the_whole_context_have_no_bound(family):
    assert bound(described(family, WHOLE[family])) is None


@pytest.mark.parametrize("family", ["cohere2", "exaone4", "mistral", "gemma2", "smollm3", "gpt_oss"])
def test_layers_are_as_they_are_read_with_weights(family):
    config = described(family, WINDOWED.get(family, (WHOLE.get(family),))[0])
    found = []
    model = AutoModelForCausalLM.from_config(config)
    HFReader(model).read(
        torch.arange(24)[None],
        lambda layer, _q, _k: found.append((layer.encoding.kind == "rope", layer.window)),
    )
    assert [(sight.rates, sight.window) for sight in sights(config)] == found


@pytest.mark.parametrize(
    "content", [{}, {"model_type": "mine"}, {"model_type": "mistral", "hidden_size": "wide"}]
)
def test_what_is_no_config_of_a_decoder_has_no_bound(content):
    assert bound(content) is None


def test_a_decoder_that_loops_until_a_value_changes_is_not_waited_for(monkeypatch):
    def forward(_self, hidden_states, **_options):
        while hidden_states.sum() > 0:
            pass

    monkeypatch.setattr("transformers.models.mistral.modeling_mistral.MistralMLP.forward", forward)
    assert sights(described("mistral", EIGHT)) is None


@pytest.mark.parametrize("name", MODELS)
def test_every_tiny_decoder_can_be_asked(name):
    family, changes = MODELS[name]
    assert len(sights(described(family, changes))) == described(family, changes).num_hidden_layers


def test_numbers_of_a_bound_are_said():
    assert str(Bound(4096, 30, 10)) == (
        "30 layers have rates, and a window of 4,096 tokens at most; 10 others see the whole context, without rates"
    )
    assert str(Bound(8, 2, 1)).endswith("; 1 other sees the whole context, without rates")
    assert str(Bound(8, 1, 0)) == (
        "1 layer has rates, and a window of 8 tokens at most; no layer of attention sees the whole context"
    )
