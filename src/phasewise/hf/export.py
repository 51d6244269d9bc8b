"""A model of this library as a Hugging Face decoder: of a family that computes the same, or of none.

Rotated pairs are half-split in both, and heads lie in the same order, so weights change their names alone.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from phasewise.encodings import NoPEConfig, RoPEConfig
from phasewise.frequencies import (
    NTK,
    AnyFrequencies,
    Explicit,
    Geometric,
    Llama3,
    LongRoPE,
    Proportional,
    only,
)
from phasewise.frequencies_hf import RopeSettings, require_length, to_hf
from phasewise.hf.checkpoint import load, quiet
from phasewise.hf.settings import LISTED_BASE, in_both_forms, listed
from phasewise.model import ModelConfig, Transformer
from phasewise.model.folder import CONFIG, require_safetensors
from phasewise.record import replacing

COMPARED, ROW = 512, 256
HALF_THE_DIGITS = torch.finfo(torch.float32).eps ** 0.5
"""Of the largest logit, what may lie between two float32 computations; most is from transformers' float32 angles."""

QK_NORM, GELU, FREE_WIDTH = "qk_norm", "activation gelu", "a head_dim other than width / heads"
WINDOW, SOME_WINDOWS, UNTURNED = "a window", "a window in some layers alone", "layers of nope"
PARTIAL, SCALED = "a fraction below 1", "scaled rates"


@dataclass(frozen=True)
class Family:
    """A family of decoders. always: what all of them have; may: what some have besides; own: fields of its config."""

    name: str
    always: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()
    own: tuple[str, ...] = ()

    def has(self, asked: set[str]) -> bool:
        return self.always <= asked <= self.always | self.may


ACTIVATIONS = {"swiglu": "silu", "gelu": "gelu"}
BY_LAYER = ("sliding_window", "layer_types")
FAMILIES = (
    Family("llama"),
    Family("mistral", may=frozenset({FREE_WIDTH, WINDOW}), own=("sliding_window",)),
    Family(
        "qwen3",
        frozenset({QK_NORM}),
        frozenset({FREE_WIDTH, WINDOW, SOME_WINDOWS}),
        (*BY_LAYER, "use_sliding_window"),
    ),
    Family("ministral", may=frozenset({FREE_WIDTH, SOME_WINDOWS}), own=BY_LAYER),
    Family(
        "phi3", may=frozenset({PARTIAL, WINDOW}), own=("sliding_window", "original_max_position_embeddings")
    ),
    Family(
        "smollm3",
        may=frozenset({UNTURNED, WINDOW, SOME_WINDOWS}),
        own=(*BY_LAYER, "use_sliding_window", "no_rope_layers"),
    ),
    Family("arcee", frozenset({GELU})),
)
"""The first that has what is asked is taken: those that most programs read stand first."""

OUTSIDE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
INSIDE = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
JOINED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
"""What Phi-3 keeps in one matrix, in this order."""


def hf_config(config: ModelConfig, *, length: int) -> Any:
    """The config of the decoder of transformers that computes what a model of `config` does; length: tokens it is for.

    Raises ValueError, naming what is asked and what would work, where there is none.

    >>> config = ModelConfig(vocab_size=256, width=64, layers=2, heads=4, encoding=RoPEConfig(), qk_norm=True)
    >>> hf_config(config, length=1024).model_type
    'qwen3'
    """
    rotation = _rotation(config, length)
    require_length(rotation.frequencies, length)
    family = _family(_asked(config, rotation))
    window = next((each for each in config.windows if each is not None), None)
    own = {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": ["full_attention" if each is None else "sliding_attention" for each in config.windows],
        "no_rope_layers": [int(isinstance(each, RoPEConfig)) for each in config.encodings],
        "original_max_position_embeddings": getattr(rotation.frequencies, "original_length", length),
    }
    with quiet():
        return AutoConfig.for_model(
            family.name,
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            hidden_act=ACTIVATIONS[config.activation],
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied,
            max_position_embeddings=length,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            **to_hf(rotation, head_dim=config.head_dim),
            **{name: own[name] for name in family.own},
        )


def passed_over(config: ModelConfig) -> list[str]:
    """What a config.json says of such a model and llama.cpp, among others, does not read there."""
    rule, found = config.frequencies, sorted(_asked(config, None) & {GELU, WINDOW, SOME_WINDOWS, UNTURNED})
    by_channel = isinstance(rule, Explicit | Llama3 | LongRoPE | Proportional)
    return [*found, *([f"rates of {rule.kind}"] if config.qk_norm and by_channel else [])]


def _asked(config: ModelConfig, rotation: RopeSettings | None) -> set[str]:
    windows = {each for each in config.windows if each is not None}
    if len(windows) > 1:
        raise ValueError(
            f"window is {' and '.join(map(str, sorted(windows)))} in different layers, and decoders of transformers "
            "have one for all that have any; train with one"
        )
    partial = rotation is not None and rotation.fraction < 1
    plain = rotation is None or isinstance(rotation.frequencies, Geometric | NTK | LongRoPE)
    found = {
        QK_NORM: config.qk_norm,
        GELU: config.activation == "gelu",
        FREE_WIDTH: config.heads * config.head_dim != config.width,
        WINDOW: bool(windows) and None not in config.windows,
        SOME_WINDOWS: bool(windows) and None in config.windows,
        UNTURNED: any(isinstance(each, NoPEConfig) for each in config.encodings),
        PARTIAL: partial,
        SCALED: partial and not plain,
    }
    return {name for name, is_asked in found.items() if is_asked}


def _family(asked: set[str]) -> Family:
    for family in FAMILIES:
        if family.has(asked):
            return family
    raise ValueError(
        f"no decoder of transformers that is known here has {' and '.join(sorted(asked))} together; train without one "
        "of them"
    )


def _rotation(config: ModelConfig, length: int) -> RopeSettings:
    """How the layers that turn do, in a form that transformers has; plain rates where none does."""
    others = sorted({each.kind for each in config.encodings if not isinstance(each, RoPEConfig | NoPEConfig)})
    if others:
        raise ValueError(
            f"encoding {', '.join(others)} is in no decoder of transformers; rope and nope are, so train one with these"
        )
    turning = [each for each in config.encodings if isinstance(each, RoPEConfig)]
    if len({each.fraction for each in turning}) > 1:
        raise ValueError("the layers turn different fractions of their channels; train with one fraction")
    rule = only([each.frequencies for each in turning]) or Geometric(base=LISTED_BASE)
    fraction = next((each.fraction for each in turning), 1.0)
    return RopeSettings(frequencies=_fixed(rule, length), fraction=fraction)


def _fixed(rule: AnyFrequencies, length: int) -> AnyFrequencies:
    if isinstance(rule, LongRoPE) and rule.short_factor == rule.long_factor:
        return rule
    if rule.depends_on_length:
        raise ValueError(
            f"rates of {rule.kind} follow the length served: by this library for each place, by transformers for a "
            "whole call, which gives other numbers; fix them with phasewise extend --steps 0 --rule grid:FILE"
        )
    if isinstance(rule, Explicit):
        return listed(rule, original_length=length).model_copy(update={"factor": 1.0})
    return rule


def weights(model: Transformer, family: str) -> dict[str, Tensor]:
    """The model's weights under the names that a family of transformers gives them."""
    found = {}
    for name, weight in model.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            found[f"model.layers.{parts[1]}.{INSIDE['.'.join(parts[2:-1])]}.weight"] = weight
        else:
            found[f"{OUTSIDE[parts[0]]}.weight"] = weight
    if family == "phi3":
        for layer in range(model.config.layers):
            for joined, apart in JOINED.items():
                within, _, _ = joined.partition(".")
                names = [f"model.layers.{layer}.{within}.{each}.weight" for each in apart]
                found[f"model.layers.{layer}.{joined}.weight"] = torch.cat(
                    [found.pop(each) for each in names]
                )
    if model.config.tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def write(model: Transformer, folder: Path, *, length: int) -> str:
    """Write a model to a folder as transformers does, in the dtype it is in; give the name of its architecture.

    The rates are written as rope_parameters and, for older readers, as rope_theta and rope_scaling too.
    Raises ValueError where `hf_config` does; OSError when the folder cannot be written, as on a full disk.
    """
    config = hf_config(model.config, length=length)
    with quiet(), torch.device("meta"):
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    network.load_state_dict(weights(model, config.model_type), assign=True)
    network.tie_weights()
    safetensors = require_safetensors()
    try:
        with quiet():
            network.save_pretrained(folder)
    except safetensors.SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error
    mode = (folder / CONFIG).stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    with replacing(folder / CONFIG) as path:
        path.write_text(
            json.dumps(in_both_forms(content), indent=2, sort_keys=True) + "\n",
            encoding="utf-8",
        )
    return type(network).__name__


@torch.no_grad()
def compare(model: Transformer, folder: Path, *, length: int) -> tuple[float, float]:
    """The largest difference between a model's logits and those of the decoder in `folder`, and the largest logit.

    Both compute in float32, on some random tokens in rows of at most `length`. Raises ValueError when they differ
    by more than rounding, or are not finite.
    """
    size = min(ROW, length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (COMPARED // size, size), generator=generator)
    wide = model if model.embedding.weight.dtype == torch.float32 else copy.deepcopy(model).float()
    ours = wide(tokens)
    if not ours.isfinite().all():
        raise ValueError("the model's own logits are not finite: its weights are too large, train it anew")
    theirs = load(folder, dtype=torch.float32)(input_ids=tokens, use_cache=False).logits
    difference, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
    if not difference <= HALF_THE_DIGITS * largest:
        raise ValueError(
            f"logits of the exported model differ by {difference:.2g} where they are up to {largest:.2g}, more than "
            "rounding: this transformers computes something else; install the version that constraints.txt names"
        )
    return difference, largest
