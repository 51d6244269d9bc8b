"""A loaded model as a doctor handles it: full passes, decoding, and the rotation it gives to any place.

Letters: B rows, T tokens, V vocabulary, n pairs (RoPE) or channels (PoPE) that turn.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phasewise.encodings import RoPE
from phasewise.encodings.spectral import Spectral
from phasewise.lens.doctor.diagnosis import NotMade
from phasewise.model import Cache, Transformer
from phasewise.model.reading import Reader, Sink, TransformerReader
from phasewise.model.transformer import Block
from phasewise.positions import PADDING, Positions

if TYPE_CHECKING:
    from phasewise.hf.reading import HFReader


FLOAT32 = 1e-6


@dataclass(frozen=True)
class Turned:
    """A layer's phases in radians, float64 [T, n], at some places.

    rounding: what the dtype of cos and sin alone costs, in radians. half_split: whether channel c turns with
    channel c + n, else with its neighbour; None where channels do not pair.
    """

    layer: int
    phase: Tensor
    rounding: float
    half_split: bool | None


@dataclass(frozen=True)
class Patient(ABC):
    """A model that can be examined. `model` is in evaluation mode and stays as it is."""

    model: nn.Module
    reader: Reader

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.model.parameters() if parameter.ndim > 1)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def tokens(self, rows: int, length: int, *, seed: int = 0) -> Tensor:
        """Random tokens int64 [B, T]."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(self.reader.facts.vocab_size, (rows, length), generator=generator)
        return drawn.to(self.device)

    def read(self, tokens: Tensor, sink: Sink) -> None:
        """Tell `sink` the queries and keys of every layer with an encoding."""
        self.reader.read(tokens, sink)

    @abstractmethod
    def logits(self, tokens: Tensor, at: Positions) -> Tensor:
        """Logits float32 [B, T, V] of one pass over `tokens` at their places."""

    @abstractmethod
    def decoded(self, tokens: Tensor, at: Positions, sizes: Sequence[int]) -> Tensor:
        """The same with a cache, in pieces of these sizes."""

    @abstractmethod
    def packed(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Logits float32 [1, T, V] of documents of these lengths, end to end in one row."""

    @abstractmethod
    def turned(self, index: Tensor) -> list[Turned]:
        """The phases of every layer that turns, at places `index` int64 [T], the first of them 0."""


@dataclass(frozen=True)
class OwnPatient(Patient):
    """A model of this library."""

    model: Transformer
    reader: TransformerReader

    def logits(self, tokens: Tensor, at: Positions) -> Tensor:
        return self.model(tokens, at=at.to(self.device)).float()

    def decoded(self, tokens: Tensor, at: Positions, sizes: Sequence[int]) -> Tensor:
        cache, start, parts = Cache(), 0, []
        for size in sizes:
            piece, places = tokens[:, start : start + size], at.narrow(start, size).to(self.device)
            parts.append(self.model(piece, at=places, cache=cache).float())
            start += size
        return torch.cat(parts, 1)

    def packed(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.logits(tokens, Positions.packed(lengths))

    def turned(self, index: Tensor) -> list[Turned]:
        found = []
        length = int(index.max()) + 1
        at = Positions(index[None], torch.zeros_like(index)[None]).to(self.device)
        for layer, encoding in self.encodings():
            if isinstance(encoding, Spectral) and encoding.axes == 1:
                phase = encoding.phases(at.index, encoding.frequencies.at(length, encoding.channels))
                half_split = True if isinstance(encoding, RoPE) else None
                found.append(Turned(layer, phase[0].double().cpu(), FLOAT32, half_split))
        return found

    def encodings(self) -> list[tuple[int, nn.Module]]:
        blocks = [block for block in self.model.blocks if isinstance(block, Block)]
        return [(layer, block.attention.encoding) for layer, block in enumerate(blocks)]


@dataclass(frozen=True)
class HFPatient(Patient):
    """A Hugging Face decoder with rotary positions."""

    model: nn.Module
    reader: HFReader

    @property
    def config(self) -> Any:
        """What the model says it was built from."""
        return self.model.config

    def read(self, tokens: Tensor, sink: Sink) -> None:
        with self._running():
            super().read(tokens, sink)

    def logits(self, tokens: Tensor, at: Positions) -> Tensor:
        return self._call(tokens, at, at.segment != PADDING).logits.float()

    def decoded(self, tokens: Tensor, at: Positions, sizes: Sequence[int]) -> Tensor:
        named = inspect.signature(self.model.forward).parameters
        cache = "cache" if "cache" in named else "past_key_values"  # the name until transformers 5.24
        held: dict[str, Any] = {}
        start, parts = 0, []
        for size in sizes:
            piece = tokens[:, start : start + size]
            start += size
            seen = (at.segment != PADDING)[:, :start]
            out = self._call(piece, at.narrow(start - size, size), seen, use_cache=True, **held)
            held = {cache: out[cache]}
            parts.append(out.logits.float())
        return torch.cat(parts, 1)

    def packed(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        # Without a mask transformers tells documents apart by positions that start anew.
        return self._call(tokens, Positions.packed(lengths), None).logits.float()

    def turned(self, index: Tensor) -> list[Turned]:
        from phasewise.hf.reading import NoRates

        rounding = torch.finfo(self.dtype).eps
        try:
            with self._running():
                rotations = self.reader.rotations(index)
        except NoRates as error:
            raise NotMade("what the layers are given to turn by are no rotations of any rate") from error
        return [
            Turned(turned.layer.index, torch.atan2(turned.sin, turned.cos), rounding, turned.half_split)
            for turned in rotations
            if turned.cos.shape[1]
        ]

    def _call(self, tokens: Tensor, at: Positions, seen: Tensor | None, **options: Any) -> Any:
        rows = tokens.shape[0]
        if seen is not None:
            options["attention_mask"] = seen.expand(rows, -1).to(self.device).long()
        places = at.index.expand(rows, -1).to(self.device)
        with self._running():
            return self.model(input_ids=tokens, position_ids=places, **{"use_cache": False, **options})

    @contextmanager
    def _running(self) -> Iterator[None]:
        from phasewise.hf.checkpoint import unrunnable

        try:
            yield
        except RuntimeError as error:
            raise unrunnable(f"this {self.config.model_type} model", error) from error
        except IndexError as error:
            raise NotMade(
                "the model keeps a table of positions, which ends before the length served"
            ) from error
