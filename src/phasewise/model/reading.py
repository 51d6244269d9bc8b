"""Queries and keys as the encoding gets them, layer after layer, while a model reads tokens.

Letters: B rows, T tokens, Hq and Hkv query and key heads, D head dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phasewise.encodings.base import Encoding
from phasewise.model.transformer import Block, Transformer

LONGEST_LENGTH = 10**12
"""In tokens: far beyond any corpus or model, and small enough for exact arithmetic in float64 and int64."""


@dataclass(frozen=True)
class Layer:
    """What turns a layer's queries and keys into scores, before the mask.

    scale: replaces the encoding's own softmax scale. window: a query sees keys at a distance below it.
    softcap: scores x become softcap * tanh(x / softcap).
    """

    index: int
    encoding: Encoding
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None


Sink = Callable[[Layer, Tensor, Tensor], None]
"""Takes a layer's queries [B, Hq, T, D] and keys [B, Hkv, T, D]: projected, normalised, not yet encoded.

Pairs that turn are half-split, in the order of the encoding's rates, whatever the model's own layout is.
"""


def require_count(name: str, value: int, *, least: int = 1) -> None:
    """Raise ValueError, naming the option, for a count of tokens below `least` or beyond `LONGEST_LENGTH`."""
    if not least <= value <= LONGEST_LENGTH:
        raise ValueError(f"{name} must be at least {least} and at most {LONGEST_LENGTH}, but is {value}")


@dataclass(frozen=True)
class Facts:
    """What is known of a model before it reads.

    trained_length: tokens it was trained to attend over; None where its config does not say. Raises ValueError
    where it is no length.
    """

    family: str
    parameters: int
    layers: int
    vocab_size: int
    dtype: str
    trained_length: int | None

    def __post_init__(self) -> None:
        if self.trained_length is not None:
            require_count("trained_length", self.trained_length)


class Reader(ABC):
    """A model that can be read."""

    facts: Facts

    @abstractmethod
    def read(self, tokens: Tensor, sink: Sink) -> None:
        """Run the model over `tokens` int64 [B, T] at positions 0 to T - 1; `sink` gets each layer in turn.

        Layers whose scores do not depend on position through an encoding are left out.
        """


class TransformerReader(Reader):
    """Reads a model of this library.

    >>> from phasewise.encodings import PoPEConfig
    >>> from phasewise.model import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=11, width=16, layers=2, heads=2, encoding=PoPEConfig()))
    >>> shapes = []
    >>> TransformerReader(model).read(torch.zeros(1, 5).long(), lambda layer, q, k: shapes.append(q.shape))
    >>> shapes
    [torch.Size([1, 2, 5, 8]), torch.Size([1, 2, 5, 8])]
    """

    def __init__(self, model: Transformer, *, trained_length: int | None = None) -> None:
        self.model = model
        self.facts = Facts(
            family="phasewise",
            parameters=model.parameter_count,
            layers=model.config.layers,
            vocab_size=model.config.vocab_size,
            dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
            trained_length=trained_length,
        )

    @torch.no_grad()
    def read(self, tokens: Tensor, sink: Sink) -> None:
        with ExitStack() as hooks:
            for index, block in enumerate(self.model.blocks):
                assert isinstance(block, Block)
                hooks.enter_context(_reading(block, index, sink))
            self.model(tokens.to(self.model.embedding.weight.device), keep=1)


@contextmanager
def _reading(block: Block, index: int, sink: Sink) -> Iterator[None]:
    attention = block.attention
    layer = Layer(index, attention.encoding, window=attention.window)
    held: list[Tensor] = []

    def query(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        held.append(output)

    def key(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        sink(layer, held.pop(), output)

    handles = (
        attention.query_norm.register_forward_hook(query),
        attention.key_norm.register_forward_hook(key),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
