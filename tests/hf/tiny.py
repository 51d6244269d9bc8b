"""Small Hugging Face decoders with random weights, one of each family, built without a hub."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = {"num_key_value_heads": 4}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}
BY_LAYER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}


def theta(base: float, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **more}}


MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", theta(1e4)),
    "llama, llama3 rule": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": 8, **theta(1e6)}),
    "qwen2": ("qwen2", theta(1e6)),
    "qwen3": ("qwen3", {"head_dim": 32, **theta(1e6)}),
    "gemma": ("gemma", {"head_dim": 32, **theta(1e4)}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 20, **WINDOWED, **theta(1e4)}),
    "gemma3": ("gemma3_text", {"head_dim": 32, **WINDOWED, "rope_parameters": BY_LAYER_TYPE}),
    "phi": ("phi", {**FULL, **theta(1e4, partial_rotary_factor=0.5)}),
    "phi3": ("phi3", {**theta(1e4)}),
    "phi3, longrope beyond its original length": (
        "phi3",
        {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
    ),
    "phi3, partial": ("phi3", {**theta(1e4, partial_rotary_factor=0.5)}),
    "gpt_neox": ("gpt_neox", {**FULL, **theta(1e4, partial_rotary_factor=0.25)}),
    "cohere (interleaved)": ("cohere", theta(1e4)),
    "gptj (interleaved, partial, sin before cos)": ("gptj", {"rotary_dim": 8, **theta(1e4)}),
    "glm (interleaved, partial)": ("glm", {"head_dim": 16, **theta(1e4, partial_rotary_factor=0.5)}),
}

STILL: dict[str, tuple[str, dict[str, object]]] = {
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "sliding_window": 8, **theta(1e4)}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, **theta(1e4)}),
}
"""Those with layers that never turn; of Cohere 2 the ones that see the whole context."""


def tiny(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of that name, weights spread so that no norm or projection is trivial."""
    family, changes = {**MODELS, **STILL}[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm" in key else 0.0)
    return model.eval()
