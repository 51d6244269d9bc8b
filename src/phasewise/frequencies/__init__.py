"""How fast each channel turns: one frozen type for every scaling rule."""

from phasewise.frequencies.base import Continuous, Frequencies, LengthDependent, Static
from phasewise.frequencies.rules import (
    NTK,
    AnyFrequencies,
    DynamicNTK,
    DynamicYaRN,
    Explicit,
    Geometric,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
    changed_base,
    only,
)

__all__ = [
    "NTK",
    "AnyFrequencies",
    "Continuous",
    "DynamicNTK",
    "DynamicYaRN",
    "Explicit",
    "Frequencies",
    "Geometric",
    "LengthDependent",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Proportional",
    "Static",
    "YaRN",
    "changed_base",
    "only",
]
