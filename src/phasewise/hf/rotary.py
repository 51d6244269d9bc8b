"""The modules of a decoder of transformers that hold its rates: made to follow a call alone, or the config anew."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from phasewise.hf.settings import rules_by_length


def rotary(network: Any) -> dict[str, Any]:
    """The modules that hold rates, by name."""
    return {
        name: module
        for name, module in network.named_modules()
        if any(buffer.endswith("inv_freq") for buffer, _ in module.named_buffers(recurse=False))
    }


def forget(network: Any) -> None:
    """Let the rates of a decoder's next call follow that call alone.

    transformers' "dynamic" keeps those of the longest call so far for every call from the original length on; only a
    shorter one takes them back, as the one place that is asked for here.
    """
    if "dynamic" not in rules_by_length(network.config.get_text_config()):
        return
    first = torch.zeros(1, 1, dtype=torch.int64, device=network.device)
    for module in rotary(network).values():
        kinds = module.rope_type
        for kind in kinds if isinstance(kinds, Mapping) else (None,):
            module(first.float(), first, *(() if kind is None else (kind,)))


def turn_anew(network: Any) -> bool:
    """Build a decoder's modules that hold rates anew from its config; whether there are any."""
    text, holding = network.config.get_text_config(), rotary(network)
    for name, module in holding.items():
        anew: nn.Module = type(module)(text)
        network.set_submodule(name, nn.Module.to(anew, network.device))
    return len(holding) > 0
