"""Any checkpoint as a language model: tokens to logits, with its own rates or with others.

A Hugging Face decoder gets another rule through its config, before it is built: what is measured is then what
the same setting gives its user. A model of this library is rebuilt around the same weights.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phasewise.device import floating, usable
from phasewise.frequencies import AnyFrequencies, Explicit, Frequencies, LongRoPE
from phasewise.frequencies_hf import RopeSettings, from_hf, to_hf
from phasewise.model import folder as own
from phasewise.model import rescaled
from phasewise.positions import Positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLIDING = "sliding_attention"
LISTED_BASE = 10_000.0


@dataclass(frozen=True)
class Facts:
    """What is known of a checkpoint before it reads.

    trained_length: tokens; None where the config does not say, as that of this library's models.
    """

    family: str
    vocab_size: int
    trained_length: int | None


class LanguageModel(nn.Module, ABC):
    """A decoder from a checkpoint, in evaluation mode."""

    config: Facts

    @property
    @abstractmethod
    def frequencies(self) -> AnyFrequencies | None:
        """The rule in use, in the layers that see the whole context; None for a model without rates.

        Raises ValueError for a Hugging Face config that contradicts itself, and layers with different rules.
        """

    @abstractmethod
    def forward(self, tokens: Tensor, *, at: Positions | None = None, keep: int | None = None) -> Tensor:
        """Logits [B, T, V] of the token after each of `tokens` int64 [B, T].

        at: their places; None: 0, 1, 2, .. in each row. keep: logits for the last `keep` tokens alone.
        """

    @abstractmethod
    def hidden(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor:
        """What the body gives, [B, T, W]: `logits(hidden(tokens))` is `model(tokens)`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, n, V] from any n places of what `hidden` gave."""


def open_language_model(
    path: str | Path,
    *,
    rule: AnyFrequencies | None = None,
    dtype: str | None = None,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """The checkpoint in folder `path`: of this library, or a decoder of Hugging Face (safetensors, or a .gguf).

    rule: served with these rates instead of its own, in every layer that sees the whole context; the share
    of channels that turn stays. dtype: float32 | bfloat16 | float16; None: as stored.

    Raises ValueError for a folder without a whole, finite model, a device that is not there, and a rule that
    the model cannot be served with.

    >>> from phasewise import Linear, ModelConfig, RoPEConfig, Transformer
    >>> from phasewise.model.folder import save
    >>> config = ModelConfig(vocab_size=11, width=16, layers=2, heads=2, encoding=RoPEConfig())
    >>> save(Transformer(config), "checkpoint")
    >>> open_language_model("checkpoint", rule=Linear(base=1e4, factor=4.0)).frequencies
    Linear(kind='linear', base=10000.0, factor=4.0)
    """
    folder = Path(path)
    usable(device)
    precision = floating(dtype)
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}; give the folder of a checkpoint")
    if not is_hugging_face(folder):
        return _Own(folder, rule, precision, device)
    try:
        return _HuggingFace(folder, rule, precision, device)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Hugging Face checkpoints need {error.name}: pip install 'phasewise[hf,train]'"
        ) from error


def is_hugging_face(folder: Path) -> bool:
    """Whether a checkpoint's folder is Hugging Face's: a config.json with a model_type, or a .gguf alone.

    Raises ValueError for a folder with neither kind of checkpoint.
    """
    config = folder / own.CONFIG
    if not config.is_file():
        if any(folder.glob("*.gguf")):
            return True
        raise ValueError(f"{folder} has no {own.CONFIG}; give the folder of a checkpoint")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is not JSON: {error}") from error
    return isinstance(content, dict) and "model_type" in content


def listed(rule: Explicit, *, original_length: int, base: float = LISTED_BASE) -> LongRoPE:
    """The same rates as divisors of base^(-i/n), the one form in which engines take a list of rates.

    original_length: where LongRoPE would switch between its two lists, which here are one and the same.
    Raises ValueError for a rate of 0, which no divisor gives.

    >>> listed(Explicit(values=[1.0, 0.005]), original_length=2048).long_factor
    (1.0, 2.0)
    """
    n = len(rule.values)
    if not all(rule.values):
        raise ValueError("a list with rates of 0 has no form in a Hugging Face config; give rates above 0")
    divisors = tuple(base ** (-i / n) / rate for i, rate in enumerate(rule.values))
    return LongRoPE(
        base=base,
        short_factor=divisors,
        long_factor=divisors,
        original_length=original_length,
        attention=rule.attention,
    )


class _Own(LanguageModel):
    """A model of this library."""

    def __init__(
        self, folder: Path, rule: Frequencies | None, dtype: torch.dtype | None, device: torch.device | str
    ) -> None:
        super().__init__()
        model = own.load(folder, device=device)
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise ValueError(f"{name} in {folder} is not finite; the checkpoint is broken")
        if dtype is not None:
            model.to(dtype)
        self.network = model if rule is None else rescaled(model, rule)  # type: ignore[arg-type]
        self.config = Facts(family="phasewise", vocab_size=model.config.vocab_size, trained_length=None)

    @property
    def frequencies(self) -> AnyFrequencies | None:
        rules = [
            encoding.frequencies  # type: ignore[union-attr]
            for encoding in self.network.config.encodings
            if "frequencies" in type(encoding).model_fields
        ]
        return _one(rules)

    def forward(self, tokens: Tensor, *, at: Positions | None = None, keep: int | None = None) -> Tensor:
        return self.network(tokens, at=at, keep=keep)

    def hidden(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor:
        return self.network.hidden(tokens, at=at)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.logits(hidden)


class _HuggingFace(LanguageModel):
    """A decoder of transformers."""

    def __init__(
        self, folder: Path, rule: Frequencies | None, dtype: torch.dtype | None, device: torch.device | str
    ) -> None:
        from phasewise.hf.checkpoint import load
        from phasewise.hf.reading import trained_length

        super().__init__()

        def adapt(config: Any) -> None:
            self.config = Facts(
                family=config.model_type,
                vocab_size=config.get_text_config().vocab_size,
                trained_length=trained_length(config.get_text_config()),
            )
            if rule is not None:
                _serve(config, rule)

        self.network: PreTrainedModel = load(folder, dtype=dtype, device=device, adapt=adapt)

    @property
    def frequencies(self) -> AnyFrequencies | None:
        return _one([settings.frequencies for settings in _global(self.network.config)])

    def forward(self, tokens: Tensor, *, at: Positions | None = None, keep: int | None = None) -> Tensor:
        return self.network(
            input_ids=tokens, use_cache=False, logits_to_keep=keep or 0, **_places(tokens, at)
        ).logits

    def hidden(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor:
        body = self.network.base_model
        return body(input_ids=tokens, use_cache=False, **_places(tokens, at)).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """By the model itself, head, scale and cap, around a body that gives `hidden`."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        body = self.network.base_model
        body.forward = lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=hidden)  # type: ignore[assignment]
        try:
            unread = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            return self.network(input_ids=unread, use_cache=False).logits
        finally:
            del body.forward


def _places(tokens: Tensor, at: Positions | None) -> dict[str, Tensor]:
    """The places as transformers takes them. Raises ValueError for rows that hold several documents."""
    if at is None:
        return {}
    if at.axes != 1 or int(at.segment.max()) > 0:
        raise ValueError("rows of several documents or axes do not fit this model; give one a row")
    at = at.expand(len(tokens))
    padded = bool((at.segment < 0).any())
    return {"position_ids": at.index} | ({"attention_mask": (at.segment >= 0).long()} if padded else {})


def _one(rules: list[AnyFrequencies]) -> AnyFrequencies | None:
    if len(set(rules)) > 1:
        raise ValueError(f"the layers have different rules: {'; '.join(map(str, dict.fromkeys(rules)))}")
    return rules[0] if rules else None


def _global(config: Any) -> list[RopeSettings]:
    """The settings of the layers that see the whole context; none for a model without rates."""
    if not getattr(config.get_text_config(), "rope_parameters", None):
        return []
    settings = from_hf(config)
    if isinstance(settings, RopeSettings):
        return [settings]
    return [value for layer, value in settings.items() if value is not None and layer != SLIDING]


def _serve(config: Any, rule: Frequencies) -> None:
    """Write the rule into the config, for the layers that see the whole context."""
    text = config.get_text_config()
    if not _global(config):
        raise ValueError(f"this {config.model_type} model has no rates to change")
    settings = from_hf(config)
    length = text.max_position_embeddings
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads

    def served(before: RopeSettings) -> RopeSettings:
        if isinstance(rule, Explicit):
            rule.rates(before.channels(head_dim))
            return before.model_copy(update={"frequencies": listed(rule, original_length=length)})
        return before.model_copy(update={"frequencies": rule})

    if isinstance(settings, RopeSettings):
        written = to_hf(served(settings), head_dim=head_dim)
    else:
        nested = {
            layer: before if before is None or layer == SLIDING else served(before)
            for layer, before in settings.items()
        }
        written = to_hf(nested, head_dim=head_dim)
    for key, value in written.items():
        setattr(text, key, value)
