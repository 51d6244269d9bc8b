"""Positional encodings for transformers: fast, correct, and measurable."""

from phasewise.interrupt import starting

with starting():
    from phasewise.attention import Choice, attention, choose
    from phasewise.encodings import (
        TAPA,
        ALiBi,
        ALiBiConfig,
        Encoding,
        NoPE,
        NoPEConfig,
        PoPE,
        PoPEConfig,
        RoPE,
        RoPEConfig,
        TAPAConfig,
    )
    from phasewise.frequencies import (
        NTK,
        DynamicNTK,
        DynamicYaRN,
        Explicit,
        Frequencies,
        Geometric,
        Linear,
        Llama3,
        LongRoPE,
        Proportional,
        YaRN,
    )
    from phasewise.frequencies_hf import RopeSettings, from_hf, to_hf
    from phasewise.model import Cache, ModelConfig, Transformer, generate, rescaled
    from phasewise.positions import Positions

__all__ = [
    "NTK",
    "TAPA",
    "ALiBi",
    "ALiBiConfig",
    "Cache",
    "Choice",
    "DynamicNTK",
    "DynamicYaRN",
    "Encoding",
    "Explicit",
    "Frequencies",
    "Geometric",
    "Linear",
    "Llama3",
    "LongRoPE",
    "ModelConfig",
    "NoPE",
    "NoPEConfig",
    "PoPE",
    "PoPEConfig",
    "Positions",
    "Proportional",
    "RoPE",
    "RoPEConfig",
    "RopeSettings",
    "TAPAConfig",
    "Transformer",
    "YaRN",
    "attention",
    "choose",
    "from_hf",
    "generate",
    "rescaled",
    "to_hf",
]
