"""Small float64 models of every encoding under every frequency rule; rules switch inside a short sequence."""

import torch

from phasewise.encodings import ALiBiConfig, NoPEConfig, PoPEConfig, RoPEConfig, TAPAConfig
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
from phasewise.model import ModelConfig, Transformer

ORIGINAL = 6  # the trained length of every rule here: sequences of the tests cross it
HEAD_DIM = 8


def rules(channels):
    """One rule of each kind, for `channels` rotating channels."""
    short, long = [1.0 + 0.1 * c for c in range(channels)], [3.0 + 0.2 * c for c in range(channels)]
    return {
        "geometric": Geometric(base=100.0),
        "linear": Linear(base=100.0, factor=4.0),
        "ntk": NTK(base=100.0, factor=4.0),
        "dynamic_ntk": DynamicNTK(base=100.0, factor=4.0, original_length=ORIGINAL),
        "yarn": YaRN(base=100.0, factor=4.0, original_length=ORIGINAL),
        "dynamic_yarn": DynamicYaRN(base=100.0, original_length=ORIGINAL),
        "longrope": LongRoPE(
            base=100.0, short_factor=short, long_factor=long, original_length=ORIGINAL, factor=4.0
        ),
        "llama3": Llama3(base=100.0, factor=4.0, original_length=ORIGINAL),
        "proportional": Proportional(base=100.0, fraction=0.5),
        "explicit": Explicit(values=[1.0 / (1 + c) for c in range(channels)]),
    }


ENCODINGS = {
    "nope": NoPEConfig(),
    **{f"rope-{name}": RoPEConfig(frequencies=rule) for name, rule in rules(HEAD_DIM // 2).items()},
    **{
        f"pope-{name}": PoPEConfig(frequencies=rule, phase_init="uniform")
        for name, rule in rules(HEAD_DIM).items()
    },
    "rope-partial": RoPEConfig(fraction=0.5),
    "tapa": TAPAConfig(),
    "tapa-linear": TAPAConfig(phase="linear", alpha=0.5, fraction=0.25),
    "alibi": ALiBiConfig(),
    "mixed": (RoPEConfig(), NoPEConfig()),
    "mixed-joint": (TAPAConfig(), PoPEConfig()),
}


def config_of(encoding, **fields):
    sizes = {"vocab_size": 13, "width": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": HEAD_DIM}
    return ModelConfig(**{**sizes, "hidden": 32, "encoding": encoding, **fields})


def model_of(encoding, *, dtype=torch.float64, seed=0, **fields):
    """A model whose weights are large enough that positions matter to its logits."""
    torch.manual_seed(seed)
    model = Transformer(config_of(encoding, **fields)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and not name.endswith("phase"):
                parameter.mul_(0.3 / parameter.std())
    return model.eval()


def tokens_of(*shape, seed=1):
    return torch.randint(13, shape, generator=torch.Generator().manual_seed(seed))
