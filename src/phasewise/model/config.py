"""What a model is: sizes, choices, and one encoding for all layers or one for each."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from phasewise.encodings import AnyEncodingConfig, EncodingConfig, PoPEConfig, RoPEConfig
from phasewise.frequencies import AnyFrequencies, only
from phasewise.model.sight import Bound, Sight
from phasewise.positions import FURTHEST

Count = Annotated[int, Field(ge=1, le=2**20)]
Window = Annotated[int, Field(ge=1, le=FURTHEST)]

# Feed-forward width per unit of model width: SwiGLU's three matrices then cost what GELU's two do.
HIDDEN_RATIO = {"swiglu": 8 / 3, "gelu": 4.0}
HIDDEN_MULTIPLE = 32


def _kv_heads(data: dict[str, Any]) -> int:
    return data["heads"]


def _head_dim(data: dict[str, Any]) -> int:
    width, heads = data["width"], data["heads"]
    if width % heads:
        raise ValueError(f"width {width} does not divide into {heads} heads; give head_dim or another width")
    return width // heads


def _hidden(data: dict[str, Any]) -> int:
    least = round(HIDDEN_RATIO[data["activation"]] * data["width"])
    return -(-least // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE


class ModelConfig(BaseModel):
    """A decoder-only transformer's shape; what is left out (or None) gets its default.

    kv_heads: heads of keys and values, a divisor of `heads`; default `heads`.
    head_dim: default width / heads. hidden: width of the feed-forward; default 8/3 (swiglu) or 4 (gelu) times
    the width, rounded up to a multiple of 32.
    tied: the output head shares the embedding's weight. qk_norm: RMSNorm on each head's queries and keys,
    before the encoding. dropout: on the embedding and on what each block adds to the residual stream.
    window: a query sees keys at a distance below it, itself counted; one value, or one per layer (None: all).
    encoding: one for every layer, or a tuple with one per layer.

    Raises ValueError (pydantic's) for unknown fields, and for sizes that do not fit each other.

    >>> from phasewise.encodings import NoPEConfig
    >>> config = ModelConfig(vocab_size=256, width=64, layers=2, heads=4, encoding=NoPEConfig())
    >>> config.head_dim, config.hidden
    (16, 192)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: Annotated[int, Field(ge=1, le=2**31)]
    width: Count
    layers: Count
    heads: Count
    kv_heads: Count = Field(default_factory=_kv_heads)
    head_dim: Count = Field(default_factory=_head_dim)
    activation: Literal["swiglu", "gelu"] = "swiglu"
    hidden: Count = Field(default_factory=_hidden)
    tied: bool = False
    qk_norm: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    window: Window | tuple[Window | None, ...] | None = None
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    encoding: AnyEncodingConfig | tuple[AnyEncodingConfig, ...]

    @model_validator(mode="before")
    @classmethod
    def _none_is_default(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given

    @field_validator("encoding", mode="before")
    @classmethod
    def _encoding_is_settings(cls, given: Any) -> Any:
        for one in given if isinstance(given, tuple | list) else (given,):
            if not isinstance(one, EncodingConfig | Mapping):
                raise ValueError(
                    f"encoding is {one!r:.100}; give its config, as RoPEConfig(), or {{'kind': 'rope'}}"
                )
        return given

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads do not divide among {self.kv_heads} kv_heads; "
                f"kv_heads must be one of {[n for n in range(1, self.heads + 1) if self.heads % n == 0]}"
            )
        for name, value in (("encoding", self.encoding), ("window", self.window)):
            if isinstance(value, tuple) and len(value) != self.layers:
                raise ValueError(
                    f"{name} must be one value or one per layer ({self.layers}), but {len(value)} are given"
                )
        with torch.device("meta"):
            for encoding in set(self.encodings):
                self._require_heads_for(encoding)
        return self

    def _require_heads_for(self, encoding: AnyEncodingConfig) -> None:
        try:
            encoding.build(num_heads=self.heads, head_dim=self.head_dim)
        except ValueError as error:
            if "head_dim" in self.model_fields_set:
                raise
            raise ValueError(
                f"width {self.width} in {self.heads} heads gives head_dim {self.head_dim}: {error}"
            ) from error

    @property
    def encodings(self) -> tuple[AnyEncodingConfig, ...]:
        """The encoding of each layer."""
        return self.encoding if isinstance(self.encoding, tuple) else (self.encoding,) * self.layers

    @property
    def frequencies(self) -> AnyFrequencies | None:
        """The rule of the layers that have rates, None without any; ValueError for different ones."""
        return only(
            [each.frequencies for each in self.encodings if isinstance(each, RoPEConfig | PoPEConfig)]
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.layers

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Which layers have rates, and how far they see."""
        kinds = zip(self.encodings, self.windows, strict=True)
        return tuple(Sight(isinstance(each, RoPEConfig | PoPEConfig), window) for each, window in kinds)

    @property
    def bound(self) -> Bound | None:
        """How far layers with rates see, where each of them has a window."""
        return Bound.of(self.sights)
