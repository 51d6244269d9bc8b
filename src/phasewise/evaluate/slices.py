"""A model's logits at some places of rows, never more of them at a time than fit.

Letters: B rows, T tokens, W width, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from phasewise.positions import Positions

SLICE_BYTES = 2**28
"""Logits held at a time, in float32: 2^28 bytes are 1334 tokens of a vocabulary of 50 304."""
CPU_SLICE_BYTES, CPU_SLICE_TOKENS = 2**24, 512
"""On a CPU, the larger of the two, up to `SLICE_BYTES`. Pieces of more bytes go back to the system when they are freed,
and having them again takes as long as what is done with them; a product of fewer tokens mostly moves weights."""


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

    def continued(self, tokens: Tensor, *, length: int, stop: Sequence[int] = ()) -> Tensor: ...


def sliced_logits(
    model: nn.Module, tokens: Tensor, *, at: Positions | None, first: int = 0
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Float32 logits [b, n, V] of places `first` to T - 1 of `tokens` [B, T], after the rows and places they are of.

    A model that is `Split` and whose logits take more than a slice is asked for its hidden states once and for one
    slice of logits at a time; any other gives them all in one `model(tokens, at=at)`.
    """
    rows, length = tokens.shape
    if isinstance(model, Split):
        a_token = 4 * model.config.vocab_size
        most = SLICE_BYTES
        if tokens.device.type == "cpu":
            most = min(most, max(CPU_SLICE_BYTES, CPU_SLICE_TOKENS * a_token))
        count = max(1, most // a_token)
        if count < rows * length:
            hidden = model.hidden(tokens, at=at)
            height = min(rows, count)
            for some in _parts(0, rows, height):
                for places in _parts(first, length, count // height):
                    yield some, places, model.logits(hidden[some, places]).float()
            return
    yield slice(0, rows), slice(first, length), model(tokens, at=at)[:, first:].float()


def _parts(first: int, last: int, size: int) -> Iterator[slice]:
    for start in range(first, last, size):
        yield slice(start, min(start + size, last))
