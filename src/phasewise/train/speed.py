"""How much of a GPU a training uses: floating-point operations a token, and the device's peak.

Letters: L layers, T context.
"""

import torch
from torch import nn

from phasewise.model import ModelConfig, Transformer

# Dense bfloat16 operations a second, from NVIDIA's data sheets of the SXM modules.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}


def operations(config: ModelConfig, context: int) -> float:
    """Floating-point operations a token of a training step needs: forward, and twice that backward.

    Two for each weight that multiplies, the head's among them, and two products of each query with the half
    of the context that a causal mask leaves. Encodings count alike: what one adds to a product is its cost,
    not its use, and so is what is computed twice.

    >>> from phasewise.encodings import NoPEConfig
    >>> config = ModelConfig(vocab_size=256, width=64, layers=2, heads=4, encoding=NoPEConfig())
    >>> operations(config, 128) / 1e6
    0.835584
    """
    with torch.device("meta"):
        model = Transformer(config)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    if config.tied:
        weights += model.embedding.weight.numel()
    seen = sum(min(window or context, context / 2) for window in config.windows)
    return 6 * weights + 12 * seen * config.heads * config.head_dim


def utilisation(
    config: ModelConfig, context: int, tokens_per_second: float, device: torch.device
) -> float | None:
    """The share of the device's bfloat16 peak that these tokens a second are (MFU); None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for known, peak in PEAK.items() if known in name]
    return tokens_per_second * operations(config, context) / peaks[0] if peaks else None
