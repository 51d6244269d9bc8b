"""Any checkpoint as a language model: tokens to logits, with its own rates or with others.

A Hugging Face decoder is given another rule as its users give it: in its config, from which its own rotary
modules are built anew. So what is measured is what the setting does. Weights are shared, never copied.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from phasewise.device import floating, usable
from phasewise.encodings import PoPEConfig, RoPEConfig
from phasewise.frequencies import AnyFrequencies, only
from phasewise.frequencies_hf import RopeSettings, from_hf
from phasewise.hf import settings
from phasewise.hf.rotary import forget, turn_anew
from phasewise.model import Transformer, rescaled
from phasewise.model import folder as own
from phasewise.model.generate import generate
from phasewise.model.history import trained_length
from phasewise.model.reading import Reader, TransformerReader
from phasewise.model.sight import Sight
from phasewise.positions import Positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Facts:
    """What is known of a checkpoint before it reads.

    trained_length: tokens of the original training, or of the last stage of a model of this library; None
    where the folder does not say. native_length: tokens that the checkpoint as it is, its own scaling
    included, is for.
    """

    family: str
    vocab_size: int
    trained_length: int | None
    native_length: int | None


class LanguageModel(nn.Module, ABC):
    """A decoder from a checkpoint, in evaluation mode."""

    config: Facts

    @property
    @abstractmethod
    def frequencies(self) -> AnyFrequencies | None:
        """The rule in use, in the layers that see the whole context; None for a model without rates.

        Raises ValueError for a Hugging Face config that contradicts itself, and layers with different rules.
        """

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """Channels of a query head, of which the encoding turns some or all."""

    @property
    @abstractmethod
    def channels(self) -> int | None:
        """How many rates the rule in use gives: pairs of RoPE, channels of PoPE; None without a rule."""

    @property
    @abstractmethod
    def sights(self) -> tuple[Sight, ...]:
        """Which layers have rates, and how far they see; none of a decoder without windows, or that cannot be asked."""

    @property
    @abstractmethod
    def one_rule(self) -> bool:
        """Whether the rule in use is also that of layers with windows, so that serving another changes those too."""

    @abstractmethod
    def served(self, rule: AnyFrequencies) -> LanguageModel:
        """The same weights with other rates, in every layer that sees the whole context.

        The share of channels that turn stays. Raises ValueError for a rule that the model cannot be served with.
        """

    @abstractmethod
    def reader(self, *, trained_length: int | None = None) -> Reader:
        """Reads its queries and keys. trained_length: for a model whose config does not say it."""

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

    @abstractmethod
    def continued(self, tokens: Tensor, *, length: int, stop: Sequence[int] = ()) -> Tensor:
        """The likeliest continuation of `tokens` [1, T]: at most `length` tokens [n], by a cache, up to a `stop`."""


def open_language_model(
    path: str | Path,
    *,
    rule: AnyFrequencies | None = None,
    dtype: str | None = None,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """The checkpoint in folder `path`: a run of this library or its model, or a Hugging Face decoder (or .gguf).

    rule: `served` with these rates instead of its own. dtype: float32 | bfloat16 | float16; None: as stored.

    Raises ValueError for a folder without a whole, finite model, a device that is not there, and a rule that
    the model cannot be served with.

    >>> from phasewise import Linear, ModelConfig, RoPEConfig, Transformer
    >>> from phasewise.model.folder import save
    >>> config = ModelConfig(vocab_size=11, width=16, layers=2, heads=2, encoding=RoPEConfig())
    >>> save(Transformer(config), "checkpoint")
    >>> open_language_model("checkpoint", rule=Linear(base=1e4, factor=4.0)).frequencies
    Linear(kind='linear', base=10000.0, factor=4.0)
    """
    folder = own.inside(path)
    usable(device)
    precision = floating(dtype)
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}; give the folder of a checkpoint")
    if not is_hugging_face(folder):
        network = own.load(folder, dtype=precision, device=device)
        model: LanguageModel = _Own(network, trained_length=trained_length(folder))
    else:
        try:
            from phasewise.hf.checkpoint import load
        except ModuleNotFoundError as error:
            raise ValueError(
                f"Hugging Face checkpoints need {error.name}: pip install 'phasewise[hf,train]'"
            ) from error
        model = _HuggingFace(load(folder, dtype=precision, device=device))
        _require_causal(model, folder)
    return model if rule is None else model.served(rule)


def is_hugging_face(folder: Path) -> bool:
    """Whether a checkpoint's folder is Hugging Face's: a config.json with a model_type, or a .gguf alone.

    Raises ValueError for a folder with neither kind of checkpoint.
    """
    config = folder / own.CONFIG
    if not config.is_file() and any(folder.glob("*.gguf")):
        return True
    return "model_type" in own.read_settings(config)


class _Own(LanguageModel):
    """A model of this library."""

    def __init__(self, network: Transformer, *, trained_length: int | None) -> None:
        super().__init__()
        self.network = network
        vocab_size = network.config.vocab_size
        self.config = Facts("phasewise", vocab_size, trained_length, native_length=trained_length)
        self.eval()

    @property
    def frequencies(self) -> AnyFrequencies | None:
        return self.network.config.frequencies

    @property
    def head_dim(self) -> int:
        return self.network.config.head_dim

    @property
    def channels(self) -> int | None:
        built = [encoding.build(num_heads=1, head_dim=self.head_dim) for encoding in self._spectral()]
        counts = {encoding.channels for encoding in built}
        if len(counts) > 1:
            raise ValueError(
                f"the layers turn different numbers of channels ({sorted(counts)}); give a model whose layers agree"
            )
        return counts.pop() if counts else None

    @property
    def sights(self) -> tuple[Sight, ...]:
        return self.network.config.sights

    @property
    def one_rule(self) -> bool:
        return True

    def _spectral(self) -> list[RoPEConfig | PoPEConfig]:
        encodings = self.network.config.encodings
        return [encoding for encoding in encodings if isinstance(encoding, RoPEConfig | PoPEConfig)]

    def served(self, rule: AnyFrequencies) -> LanguageModel:
        return _Own(rescaled(self.network, rule), trained_length=self.config.trained_length)

    def reader(self, *, trained_length: int | None = None) -> Reader:
        known = self.config.trained_length if trained_length is None else trained_length
        return TransformerReader(self.network, trained_length=known)

    def forward(self, tokens: Tensor, *, at: Positions | None = None, keep: int | None = None) -> Tensor:
        return self.network(tokens, at=at, keep=keep)

    def hidden(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor:
        return self.network.hidden(tokens, at=at)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.logits(hidden)

    def continued(self, tokens: Tensor, *, length: int, stop: Sequence[int] = ()) -> Tensor:
        return generate(self.network, tokens, length=length, stop=stop)[0, tokens.shape[1] :]


class _HuggingFace(LanguageModel):
    """A decoder of transformers."""

    def __init__(self, network: PreTrainedModel) -> None:
        from transformers import GenerationConfig

        super().__init__()
        self.network = network
        network.generation_config = GenerationConfig()  # penalties and beams would change what is likeliest
        text = network.config.get_text_config()
        self.config = Facts(
            family=network.config.model_type,
            vocab_size=text.vocab_size,
            trained_length=settings.trained_length(text),
            native_length=settings.native_length(text),
        )
        self.eval()

    @property
    def frequencies(self) -> AnyFrequencies | None:
        return only([each.frequencies for each in settings.global_settings(self.network.config)])

    @property
    def head_dim(self) -> int:
        return settings.head_dim(self.network.config)

    @property
    def channels(self) -> int | None:
        counts = {each.channels(self.head_dim) for each in settings.global_settings(self.network.config)}
        return counts.pop() if counts else None

    @property
    def sights(self) -> tuple[Sight, ...]:
        from phasewise.hf.sight import windowed

        return windowed(self.network.config)

    @property
    def one_rule(self) -> bool:
        return isinstance(from_hf(self.network.config), RopeSettings)

    def served(self, rule: AnyFrequencies) -> LanguageModel:
        shared = {id(parameter): parameter for parameter in self.network.parameters()}
        network = copy.deepcopy(self.network, shared)
        settings.write(network.config, rule)
        if not turn_anew(network):
            raise ValueError(
                f"this {self.config.family} model keeps its rates where they cannot be changed; serve it by its own"
            )
        return _HuggingFace(network)

    def reader(self, *, trained_length: int | None = None) -> Reader:
        from phasewise.hf.reading import HFReader

        if trained_length is not None:
            raise ValueError("a Hugging Face config has its trained length; leave trained_length out")
        return HFReader(self.network)

    def forward(self, tokens: Tensor, *, at: Positions | None = None, keep: int | None = None) -> Tensor:
        if self._lengths_differ(at):
            return torch.cat([self(row, at=place, keep=keep) for row, place in _rows(tokens, at)])
        forget(self.network)
        return self.network(
            input_ids=tokens, use_cache=False, logits_to_keep=keep or 0, **_places(tokens, at)
        ).logits

    def hidden(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor:
        if self._lengths_differ(at):
            return torch.cat([self.hidden(row, at=place) for row, place in _rows(tokens, at)])
        forget(self.network)
        body, _ = self._body
        return body(input_ids=tokens, use_cache=False, **_places(tokens, at)).last_hidden_state

    def _lengths_differ(self, at: Positions | None) -> TypeGuard[Positions]:
        """Whether transformers would turn rows of several lengths at the rates of the longest."""
        by_length = settings.rules_by_length(self.network.config.get_text_config())
        return at is not None and len(by_length) > 0 and len(set(at.index.amax(1).tolist())) > 1

    def continued(self, tokens: Tensor, *, length: int, stop: Sequence[int] = ()) -> Tensor:
        forget(self.network)
        generating: Any = self.network.generate
        made = generating(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=list(stop) or None,
            pad_token_id=0,
        )
        return made[0, tokens.shape[1] :]

    @cached_property
    def _body(self) -> tuple[nn.Module, Callable[..., Any]]:
        """The part of the network before its head, as the network itself asks it, and the kind of its output."""
        from transformers.utils.generic import ModelOutput

        first = torch.zeros(1, 1, dtype=torch.int64, device=self.network.device)
        for body in (self.network.base_model, self.network.get_decoder(), *self.network.children()):
            outputs: list[Any] = []
            handle = body.register_forward_hook(lambda _body, _given, output: outputs.append(output))  # noqa: B023
            try:
                with torch.no_grad():
                    self.network(input_ids=first, use_cache=False)
            finally:
                handle.remove()
            if body is not self.network and outputs and isinstance(outputs[0], ModelOutput):
                return body, type(outputs[0])
        raise ValueError(f"the head of this {self.config.family} model cannot be asked apart from its body")

    def logits(self, hidden: Tensor) -> Tensor:
        """By the model itself, head, scale and cap, around a body that gives `hidden`."""
        body, kind = self._body
        body.forward = lambda *_, **__: kind(last_hidden_state=hidden)
        try:
            unread = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            return self.network(input_ids=unread, use_cache=False).logits
        finally:
            del body.forward


@torch.no_grad()
def _require_causal(model: _HuggingFace, folder: Path) -> None:
    """Raise ValueError for a model that cannot be run, gives no numbers, or sees what follows.

    The last is what a BERT does unless its config says `is_decoder`.
    """
    from phasewise.hf.checkpoint import unrunnable

    family, network = model.config.family, model.network
    try:
        first, second = model(torch.tensor([[0, 0], [0, 1]], device=network.device)).float()[:, 0]
    except Exception as error:  # of as many kinds as there are models whose config has sizes that do not fit
        raise unrunnable(f"the {family} model in {folder}", error) from error
    if bool(first.isnan().any()):
        held = str(network.dtype).removeprefix("torch.")
        raise ValueError(
            f"the {family} model in {folder} gives logits that are no numbers in {held}; ask for another dtype"
        )
    if not torch.allclose(first, second, rtol=1e-2, atol=1e-2 * float(first.abs().max())):
        raise ValueError(
            f"the {family} model in {folder} sees the tokens that it is to predict: give a decoder, "
            'or write "is_decoder": true into its config.json if it was trained as one'
        )


def _rows(tokens: Tensor, at: Positions) -> Iterator[tuple[Tensor, Positions]]:
    for row in range(len(tokens)):
        yield tokens[row : row + 1], at.rows(slice(row, row + 1))


def _places(tokens: Tensor, at: Positions | None) -> dict[str, Tensor]:
    """The places as transformers takes them. Raises ValueError for rows that hold several documents."""
    if at is None:
        return {}
    if at.axes != 1 or int(at.segment.max()) > 0:
        raise ValueError("rows of several documents or axes do not fit this model; give one a row")
    at = at.expand(len(tokens))
    padded = bool((at.segment < 0).any())
    return {"position_ids": at.index} | ({"attention_mask": (at.segment >= 0).long()} if padded else {})
