"""What the checks of a loaded model share: the model, the rates its config asks for, the length served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from phasewise.encodings import RoPE
from phasewise.frequencies import Frequencies
from phasewise.lens.doctor.diagnosis import Finding, NotMade
from phasewise.lens.doctor.patient import HFPatient, Patient
from phasewise.model.reading import Layer

READ_TOKENS = 64

Result = tuple[list[Finding], str]
"""Findings, and what was measured where there are none."""


@dataclass(frozen=True)
class Wanted:
    """What the config asks of a layer: its rule on n channels."""

    rule: Frequencies
    n: int


@dataclass(frozen=True)
class Read:
    """A layer as it was read: its rates, and the mean energy of each channel of its queries and keys [D]."""

    layer: Layer
    energy: Tensor


@dataclass(frozen=True)
class Examined:
    """A model under examination.

    wanted: by layer, from the config that the model holds; those without rates are left out. stated: the same
    from config.json. unreadable: why there is none. trained: tokens.
    """

    patient: Patient
    wanted: Mapping[int, Wanted]
    stated: Mapping[int, Wanted]
    unreadable: str | None
    length: int
    trained: int | None

    @cached_property
    def read(self) -> tuple[Read, ...]:
        """Every layer with an encoding, over random tokens at places 0 to 63."""
        found: list[Read] = []

        def sink(layer: Layer, q: Tensor, k: Tensor) -> None:
            energy = sum(x.float().square().mean((0, 1, 2)).cpu() for x in (q, k))
            assert isinstance(energy, Tensor)
            found.append(Read(layer, energy))

        self.patient.read(self.patient.tokens(1, READ_TOKENS), sink)
        return tuple(found)

    def rules(self) -> Mapping[int, Wanted]:
        """`wanted`; NotMade where the config does not say it."""
        if self.unreadable is not None:
            raise NotMade(f"the config contradicts itself: {self.unreadable}")
        if not self.wanted:
            raise NotMade("no layer has rates")
        return self.wanted

    @cached_property
    def still(self) -> frozenset[int]:
        """Layers read that the architecture never turns, whatever its config says of rates."""
        if not isinstance(self.patient, HFPatient):
            return frozenset()
        from phasewise.hf.sight import sights

        known = sights(self.patient.config) or ()
        if len(known) != len(self.read):
            return frozenset()
        pairs = zip(self.read, known, strict=True)
        return frozenset(read.layer.index for read, sight in pairs if not sight.rates)

    @property
    def depends_on_length(self) -> bool:
        return any(wanted.rule.depends_on_length for wanted in self.wanted.values())

    @property
    def turning(self) -> list[Read]:
        """The layers read whose channels turn in pairs."""
        return [read for read in self.read if isinstance(read.layer.encoding, RoPE)]


def rounding(dtype: torch.dtype) -> float:
    """Relative: the distance between neighbouring numbers around 1."""
    return torch.finfo(dtype).eps
