"""A model's logits at some places of long rows, never more of them at a time than fit.

Letters: B rows, T tokens, W width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from phasewise.positions import Positions

SLICE_BYTES = 2**28
"""Logits held at a time, in float32: 2^28 bytes are 1334 places of a vocabulary of 50 304."""
CPU_SLICE_BYTES = 2**24
"""On a CPU. Larger pieces go back to the system when they are freed, and having them again costs as much time as
what is done with them."""


class Vocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...


@runtime_checkable
class Split(Protocol):
    """A model whose head can be asked apart from its body: `logits(hidden(tokens))` is `model(tokens)`."""

    @property
    def config(self) -> Vocabulary: ...
    def hidden(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@runtime_checkable
class Continues(Protocol):
    """A model that continues a row greedily by itself, with a cache: the tokens [n] after `tokens` [1, T]."""

    def continued(self, tokens: Tensor, *, length: int, stop: int | None = None) -> Tensor: ...


def sliced_logits(
    model: nn.Module, tokens: Tensor, *, at: Positions | None, first: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Float32 logits [B, n, V] of places `first` to T - 1 of `tokens` [B, T], each slice with its first place.

    A model that is `Split` and whose logits take more than `SLICE_BYTES` (`CPU_SLICE_BYTES`) is asked for its hidden
    states once and for one slice of logits at a time; any other gives them all in one `model(tokens, at=at)`.
    """
    rows, length = tokens.shape
    if isinstance(model, Split):
        most = CPU_SLICE_BYTES if tokens.device.type == "cpu" else SLICE_BYTES
        width = max(1, most // (4 * rows * model.config.vocab_size))
        if width < length:
            hidden = model.hidden(tokens, at=at)
            for start in range(first, length, width):
                yield start, model.logits(hidden[:, start : start + width]).float()
            return
    yield first, model(tokens, at=at)[:, first:].float()
