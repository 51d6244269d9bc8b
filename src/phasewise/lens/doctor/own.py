"""What only models of this library have: PoPE's phases behind a clamp, TAPA's phase argument in half precision.

Letters: B rows, Hq and Hkv query and key heads, T tokens, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from phasewise.encodings import TAPA, PoPE
from phasewise.lens.doctor.diagnosis import Finding, NotMade
from phasewise.lens.doctor.examined import READ_TOKENS, Examined, Result
from phasewise.lens.doctor.patient import OwnPatient
from phasewise.model.reading import Layer

FROZEN = 0.01
"""A share of phases that a clamp holds: an unlucky entry is no finding, one in a hundred is."""

BLURRED = 0.1
LOST = 1.0
"""Radians of TAPA's argument by which rounding moves it (root mean square): a cosine moves by up to as much, and
from 1 on its sign is chance."""


def frozen(examined: Examined) -> Result:
    """Phases of PoPE that get no gradient, by the clamp that holds them."""
    shares = [encoding.frozen_fraction() for encoding in _encodings(examined) if isinstance(encoding, PoPE)]
    if not shares:
        raise NotMade("no layer is PoPE")
    share = sum(shares) / len(shares)
    if share <= FROZEN:
        return [], f"{share:.1%} of the phases are held by a clamp"
    found = Finding(
        check="frozen phases",
        severity="warning",
        said="a clamp holds learned phases outside its bounds: they get no gradient and never move again",
        evidence={"share of phases": share, "most in a layer": max(shares), "layers": len(shares)},
        remedy='train with phase_bound="wrap"; a phase is an angle and needs no bounds',
        by_hand="with the clamp gone the phases in use would change: train on, do not edit",
    )
    return [found], ""


def argument(examined: Examined) -> Result:
    """How far rounding queries and keys moves the argument of TAPA's cosine at the length served."""
    if not any(isinstance(encoding, TAPA) for encoding in _encodings(examined)):
        raise NotMade("no layer is TAPA")
    half = examined.patient.dtype if examined.patient.dtype.itemsize < 4 else torch.bfloat16
    served = examined.patient.dtype.itemsize < 4
    moved: list[float] = []

    def sink(layer: Layer, q: Tensor, k: Tensor) -> None:
        encoding = layer.encoding
        if isinstance(encoding, TAPA) and encoding.config.phase == "quadratic":
            moved.append(_moved(encoding, q, k, half, examined.length))

    examined.patient.read(examined.patient.tokens(1, READ_TOKENS), sink)
    if not moved:
        raise NotMade("TAPA's phase is linear")
    worst, name = max(moved), str(half).removeprefix("torch.")
    if worst <= BLURRED:
        return [], f"{name} moves TAPA's argument by {worst:.1e} radians at {examined.length:,} tokens"
    found = Finding(
        check="phase argument",
        severity=("wrong" if worst > LOST else "warning") if served else "note",
        said=f"{'' if served else 'served in '}{name} rounds TAPA's argument "
        + ("until its sign is chance" if worst > LOST else "noticeably"),
        evidence={
            "radians, rms, worst layer": worst,
            "median layer": sorted(moved)[len(moved) // 2],
            "distance": examined.length - 1,
            "served in": str(examined.patient.dtype).removeprefix("torch."),
        },
        remedy="serve in float32, or keep queries and keys of the phase part in float32",
        by_hand="precision is chosen when serving",
    )
    return [found], ""


def _encodings(examined: Examined) -> list[nn.Module]:
    patient = examined.patient
    return [encoding for _, encoding in patient.encodings()] if isinstance(patient, OwnPatient) else []


def _moved(encoding: TAPA, q: Tensor, k: Tensor, half: torch.dtype, length: int) -> float:
    """Radians, root mean square over all pairs of tokens, at the longest distance.

    Queries and keys that are already rounded are moved by as much as rounding moved them: half a step, uniform.
    """
    part = slice(encoding.amplitude_dim, None)
    wide_q, wide_k = q[..., part].double(), k[..., part].double()
    groups = wide_q.shape[1] // wide_k.shape[1]
    wide_k = wide_k.repeat_interleave(groups, 1)
    step = torch.finfo(half).eps / math.sqrt(12)
    # Independent relative errors of deviation step in both factors of each product.
    variance = 2 * step**2 * (wide_q.square() @ wide_k.square().mT)
    turn = (2 * math.pi if encoding.config.two_pi else 1.0) * encoding.phase_dim**-0.5
    return turn * max(length - 1, 1) ** encoding.config.alpha * variance.mean().sqrt().item()
