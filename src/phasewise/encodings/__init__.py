"""The encodings, by name."""

from typing import Annotated

from pydantic import Field

from phasewise.encodings.alibi import ALiBi, ALiBiConfig
from phasewise.encodings.base import Encoding, EncodingConfig
from phasewise.encodings.nope import NoPE, NoPEConfig
from phasewise.encodings.pope import PoPE, PoPEConfig
from phasewise.encodings.rope import RoPE, RoPEConfig
from phasewise.encodings.tapa import TAPA, TAPAConfig

AnyEncodingConfig = Annotated[
    NoPEConfig | RoPEConfig | PoPEConfig | TAPAConfig | ALiBiConfig, Field(discriminator="kind")
]

ENCODINGS: dict[str, type[Encoding]] = {cls.kind: cls for cls in (NoPE, RoPE, PoPE, TAPA, ALiBi)}
CONFIGS: dict[str, type[EncodingConfig]] = {
    "nope": NoPEConfig,
    "rope": RoPEConfig,
    "pope": PoPEConfig,
    "tapa": TAPAConfig,
    "alibi": ALiBiConfig,
}


def named(name: str) -> EncodingConfig:
    """The default settings of the encoding `name`; ValueError lists the names there are.

    >>> named("tapa").kind
    'tapa'
    """
    if name not in CONFIGS:
        raise ValueError(f"unknown encoding {name!r}; choose from {', '.join(CONFIGS)}")
    return CONFIGS[name]()


__all__ = [
    "CONFIGS",
    "ENCODINGS",
    "TAPA",
    "ALiBi",
    "ALiBiConfig",
    "AnyEncodingConfig",
    "Encoding",
    "EncodingConfig",
    "NoPE",
    "NoPEConfig",
    "PoPE",
    "PoPEConfig",
    "RoPE",
    "RoPEConfig",
    "TAPAConfig",
    "named",
]
