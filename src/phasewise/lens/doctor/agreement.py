"""Whether one text gives one answer: decoded or at once, moved, padded, packed."""

from __future__ import annotations

import torch
from torch import Tensor

from phasewise.lens.doctor.diagnosis import Finding, NotMade, Severity
from phasewise.lens.doctor.examined import Examined, Result
from phasewise.positions import Positions

TOKENS = 12
CHUNKS = (5, 4, 3)
PACKED = (7, 5)

LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Relative: |difference| / |logits|, both without their mean over the vocabulary, at the worst place. In
SmolLM2-135M rounding alone gave 4e-6 in float32, 0.004 in float16 and 0.04 in bfloat16, decoding one position off
0.31 in each (experiments/doctor_demo.py)."""

MOVED = 0.1
"""The same for a text moved to the end of the length served, which rounding of phases changes too."""


def decoding(examined: Examined) -> Result:
    """A full pass against token by token and against chunks."""
    tokens, at = _text(examined)
    full = examined.patient.logits(tokens, at)
    worst = 0.0
    for name, sizes in (("token by token", [1] * TOKENS), ("in chunks", CHUNKS)):
        off = _apart(examined.patient.decoded(tokens, at, sizes), full)
        worst = max(worst, off)
        if off > _limit(examined):
            found = _differs(
                "decoding",
                f"decoding {name} gives other logits than a full pass",
                off,
                examined,
                remedy="compare the positions a cached step is given with those of the full pass: one offset is off",
            )
            return [found], ""
    return [], f"token by token and in chunks: {worst:.1e} of the logits apart"


def switch(examined: Examined) -> Result:
    """The same for a text that begins at the start and ends at the length served, across a change of rates."""
    if not examined.depends_on_length:
        raise NotMade("rates do not depend on the length")
    if examined.trained is None or examined.length <= examined.trained:
        raise NotMade("the length served does not pass the trained one")
    half = TOKENS // 2
    index = torch.cat([torch.arange(half), torch.arange(examined.length - half, examined.length)])[None]
    tokens, at = examined.patient.tokens(1, TOKENS), Positions(index, torch.zeros_like(index))
    full = examined.patient.logits(tokens, at)[:, half:]
    decoded = examined.patient.decoded(tokens, at, [half, *[1] * half])[:, half:]
    off = _apart(decoded, full)
    if off <= _limit(examined):
        return [], f"decoding across the change of rates: {off:.1e} of the logits apart"
    found = _differs(
        "switch",
        "decoding past the trained length gives other logits than a full pass: keys in the cache keep the rates of "
        "the shorter length",
        off,
        examined,
        remedy="recompute the prompt when a generation passes the trained length, as Phi-3's own generate does, or "
        "serve one static rule",
        severity="warning",
    )
    return [found], ""


def moved(examined: Examined) -> Result:
    """Only relative places matter: the same text at the start and at the end of the length served."""
    if examined.depends_on_length:
        raise NotMade("rates depend on the length, so a text may change where it is moved")
    tokens, at = _text(examined)
    start = max(examined.length - TOKENS, 0)
    far = Positions.arange(TOKENS, start=start)
    off = _apart(examined.patient.logits(tokens, far), examined.patient.logits(tokens, at))
    if off <= max(MOVED, _limit(examined)):
        return [], f"moved by {start:,} places: {off:.1e} of the logits apart"
    found = _differs(
        "moved text",
        f"a text moved by {start} places gives other logits, though only relative places should count",
        off,
        examined,
        remedy="see `phases` and `rates`; where both pass, channels are rotated twice, or absolute positions enter",
    )
    return [found], ""


def padding(examined: Examined) -> Result:
    """A left-padded row of a batch against the row alone."""
    pads = TOKENS // 3
    tokens = examined.patient.tokens(2, TOKENS)
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, :pads] = False
    batch = examined.patient.logits(tokens, Positions.padded(real))
    alone = [
        examined.patient.logits(tokens[:1], Positions.arange(TOKENS)),
        examined.patient.logits(tokens[1:, pads:], Positions.arange(TOKENS - pads)),
    ]
    off = max(_apart(batch[:1], alone[0]), _apart(batch[1:, pads:], alone[1]))
    if off <= _limit(examined):
        return [], f"left-padded: {off:.1e} of the logits apart"
    found = _differs(
        "left padding",
        "a left-padded row gives other logits than the row alone",
        off,
        examined,
        remedy="give attention_mask and positions counted from the first real token; pad on the right for training",
    )
    return [found], ""


def packing(examined: Examined) -> Result:
    """Documents packed into one row against each alone."""
    tokens = examined.patient.tokens(1, sum(PACKED))
    row = examined.patient.packed(tokens, PACKED)
    start, worst = 0, 0.0
    for size in PACKED:
        piece = tokens[:, start : start + size]
        alone = examined.patient.logits(piece, Positions.arange(size))
        worst = max(worst, _apart(row[:, start : start + size], alone))
        start += size
    if worst <= _limit(examined):
        return [], f"packed documents: {worst:.1e} of the logits apart"
    found = _differs(
        "packing",
        "documents packed into one row see each other, or lose their places",
        worst,
        examined,
        remedy="do not pack with this model, or give it a mask by document",
        severity="warning",
    )
    return [found], ""


def _text(examined: Examined) -> tuple[Tensor, Positions]:
    return examined.patient.tokens(1, TOKENS), Positions.arange(TOKENS)


def _differs(
    check: str, said: str, off: float, examined: Examined, *, remedy: str, severity: Severity = "wrong"
) -> Finding:
    return Finding(
        check=check,
        severity=severity,
        said=said,
        evidence={
            "logits apart, relative": off,
            "limit": _limit(examined),
            "length": examined.length,
            "trained length": examined.trained,
        },
        remedy=remedy,
        by_hand="the code that serves the model is at fault, not the config",
    )


def _limit(examined: Examined) -> float:
    return LIMITS[examined.patient.dtype]


def _apart(one: Tensor, other: Tensor) -> float:
    """Relative difference of logits [B, T, V] at the worst place."""
    if not (one.isfinite().all() and other.isfinite().all()):
        raise NotMade("logits are not finite")
    one, other = (x.double() - x.double().mean(-1, keepdim=True) for x in (one, other))
    scale = other.norm(dim=-1).clamp(min=1e-30)
    return ((one - other).norm(dim=-1) / scale).max().item()
