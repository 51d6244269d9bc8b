"""The settings there are for a longer context, each with what speaks for and against it, ranked unmeasured."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from phasewise.frequencies import (
    NTK,
    AnyFrequencies,
    DynamicNTK,
    DynamicYaRN,
    Explicit,
    Geometric,
    Linear,
    Llama3,
    Proportional,
    YaRN,
    changed_base,
)
from phasewise.lens.advise.evidence import Evidence
from phasewise.lens.advise.grid import fitted, most_turns
from phasewise.lens.advise.published import llama3_range
from phasewise.lens.spectrum import Values
from phasewise.lens.thresholds import DILATES, DILATING, LONG_INPUT, STAYS, UNEVEN, UNSEEN

Kind = Literal[
    "leave alone",
    "PI",
    "NTK",
    "base change",
    "YaRN",
    "Llama3-style",
    "own scaling stretched",
    "fitted grid",
]
Confidence = Literal["high", "medium", "low"]


class Option(Values):
    """A setting. rule: None where it cannot be formed at all, and `refused` says why.

    rates: radians a token at the wanted length. unseen: of the model's energy, the share at phases beyond those
    of training; coarsened: the share whose resolution is lost. Both count a rate in part as far as it goes, in
    logarithm, 0 to 1; None where the energy was not measured.
    rank: from 1, as predicted; None for what is refused.
    """

    kind: Kind
    rule: AnyFrequencies | None
    rates: tuple[float, ...]
    unseen: float | None
    coarsened: float | None
    rank: int | None
    confidence: Confidence
    reasons: tuple[str, ...]
    refused: str | None


def options(evidence: Evidence) -> tuple[Option, ...]:
    """Every setting, the best first by prediction, refused ones last."""
    formed = [(kind, *_formed(kind, evidence)) for kind in Kind.__args__]
    found = [_option(kind, rule, refused, evidence, reasons) for kind, rule, refused, reasons in formed]
    fits = evidence.input_length <= evidence.trained
    order = sorted(
        (option for option in found if option.refused is None),
        key=lambda option: (fits and option.kind != "leave alone", _cost(option, evidence)),
    )
    ranked = [option.model_copy(update={"rank": place}) for place, option in enumerate(order, 1)]
    return (*ranked, *(option for option in found if option.refused is not None))


def dilated(evidence: Evidence) -> float:
    """How far the data dilate with the window, 0 to 1; 0 where single distances count."""
    profile = evidence.profile
    if profile.dilation is None or profile.dilation.relative is None:
        return 0.0
    if profile.unevenness is not None and profile.unevenness > UNEVEN:
        return 0.0
    return min(1.0, max(0.0, profile.dilation.relative))


def _formed(kind: Kind, evidence: Evidence) -> tuple[AnyFrequencies | None, str | None, tuple[str, ...]]:
    """The rule of an option, why it is refused, and what is to be said of it."""
    rule, trained, wanted, stretch = evidence.rule, evidence.trained, evidence.wanted, evidence.stretch
    base = rule.base if isinstance(rule, Geometric | DynamicNTK | DynamicYaRN) else None
    owns = (
        f"the checkpoint's own {rule.kind} scaling would be overwritten, and with it what it was trained with"
    )
    relative = f"factor {stretch:g} = {wanted} / {trained}, relative to the length the checkpoint serves now"
    if kind == "leave alone":
        return rule, None, ()
    if kind == "own scaling stretched":
        if isinstance(rule, Linear | YaRN | Llama3):
            original = rule.original_length if isinstance(rule, YaRN | Llama3) else wanted
            factor = max(
                rule.factor * stretch, wanted / original
            )  # rounding must not fall short of the ratio
            said = f"factor {factor:g}: its own {rule.factor:g} times {wanted} / {trained}"
            return rule.model_copy(update={"factor": factor}), None, (said,)
        return None, "the checkpoint has no static scaling of its own", ()
    if kind == "fitted grid":
        return _grid(evidence)
    if kind == "PI" and isinstance(rule, Proportional):
        return rule.model_copy(update={"factor": rule.factor * stretch}), None, (relative,)
    if kind == "PI" and isinstance(rule, Explicit):
        values = [rate / stretch for rate in rule.values]
        return Explicit(values=tuple(values), attention=rule.attention), None, (relative,)
    if base is None:
        return None, owns, ()
    if kind == "PI":
        return Linear(base=base, factor=stretch), None, (relative,)
    if kind == "NTK":
        if len(evidence.rates) < 2:
            return None, "a changed base moves no rate of a single channel", ()
        return NTK(base=base, factor=stretch), None, (relative,)
    if kind == "base change":
        if trained <= 2 * math.pi:
            return None, f"the trained length {trained} is shorter than a turn of the fastest rate", ()
        changed = changed_base(base, trained, wanted)
        return (
            changed,
            None,
            (f"base {changed.base:.6g}: the critical pair {evidence.critical} stays critical",),
        )
    if kind == "YaRN":
        rule = YaRN(base=base, factor=stretch, original_length=trained)
        if evidence.input_length <= trained:
            refused = (
                f"{LONG_INPUT:.0%} of the inputs have at most {evidence.input_length} tokens and fit the trained "
                f"{trained}: YaRN would cost them, and serve few"
            )
            return rule, refused, ()
        return rule, None, (relative, f"ramp over the pairs {evidence.ramp}" if evidence.ramp else "")
    assert kind == "Llama3-style"
    first, full = llama3_range(len(evidence.rates), base, trained)
    said = f"changes pairs from {first} on, in full from {full}"
    return Llama3(base=base, factor=stretch, original_length=trained), None, (relative, said)


def _grid(evidence: Evidence) -> tuple[AnyFrequencies | None, str | None, tuple[str, ...]]:
    rates, stretch = np.array(evidence.rates), evidence.stretch
    if not rates.all():
        return None, "rates of 0 have no list that engines could read", ()
    kept_from = most_turns(evidence.beyond)
    values = fitted(rates, trained=evidence.trained, wanted=evidence.wanted, kept_from=kept_from)
    native = evidence.rule.attention_factor(len(rates), length=evidence.trained)
    grid = Explicit(values=tuple(values.tolist()), attention=native * (0.1 * math.log(stretch) + 1))
    kept = int((values == rates).sum())
    if evidence.beyond is None:
        hidden = evidence.profile.width.hidden
        share = "everything" if hidden is None else f"up to {hidden:.0%} of them"
        said = f"how many dependences lie beyond {evidence.trained} tokens is not known: {share} may hide in the noise"
    else:
        share = f"{evidence.beyond:.1%} of the dependences in a window of {evidence.wanted}"
        said = f"{share} lie beyond {evidence.trained}"
    return (
        grid,
        None,
        (
            f"{said}: rates of {kept_from:.2f} turns and more are kept",
            f"of {len(rates)} rates {kept} are kept, {int((values < rates / stretch * 1.0001).sum())} divided by "
            f"{stretch:g}",
            f"cosines and sines times {grid.attention:.4f}, as YaRN's",
        ),
    )


def _option(
    kind: Kind,
    rule: AnyFrequencies | None,
    refused: str | None,
    evidence: Evidence,
    said: tuple[str, ...],
) -> Option:
    n = len(evidence.rates)
    rates = () if rule is None else tuple(rule.at(evidence.wanted, n).rates(n).tolist())
    unseen, coarsened = (None, None) if rule is None else _shifts(rates, evidence)
    reasons = [reason for reason in said if reason]
    if unseen is not None and coarsened is not None:
        reasons.append(
            f"{unseen:.0%} of the energy at phases never seen in training, {coarsened:.0%} at a lost resolution"
        )
    if kind == "leave alone" and evidence.input_length <= evidence.trained:
        reasons.append(f"95% of the inputs have at most {evidence.input_length} tokens: they fit as they are")
    if kind == "PI" and rule is not None:
        reasons.append(f"position interpolation {evidence.interpolation.outcome}, by data and weights")
        reasons += evidence.interpolation.reasons
    return Option(
        kind=kind,
        rule=rule,
        rates=rates,
        unseen=unseen,
        coarsened=coarsened,
        rank=None,
        confidence=_confidence(kind, refused, evidence),
        reasons=tuple(reasons),
        refused=refused,
    )


def _shifts(rates: tuple[float, ...], evidence: Evidence) -> tuple[float | None, float | None]:
    if evidence.share is None:
        return None, None
    unseen = coarsened = 0.0
    for share, before, after in zip(evidence.share, evidence.rates, rates, strict=True):
        if before <= 0 or after <= 0:
            continue
        if before * evidence.trained < 2 * math.pi:
            beyond = math.log(after * evidence.wanted / (before * evidence.trained))
            unseen += share * min(1.0, max(0.0, beyond / math.log(evidence.stretch)))
        else:
            coarsened += share * min(1.0, max(0.0, math.log(before / after) / math.log(evidence.stretch)))
    return unseen, coarsened


def _cost(option: Option, evidence: Evidence) -> float:
    """What orders the options; without weights, the number of rates stands for their energy."""
    if option.unseen is None or option.coarsened is None:
        uniform = evidence.model_copy(update={"share": (1 / len(evidence.rates),) * len(evidence.rates)})
        unseen, coarsened = _shifts(option.rates, uniform)
        assert unseen is not None
        assert coarsened is not None
    else:
        unseen, coarsened = option.unseen, option.coarsened
    return UNSEEN * unseen + coarsened * (1 - DILATING * dilated(evidence))


def _confidence(kind: Kind, refused: str | None, evidence: Evidence) -> Confidence:
    fits = evidence.input_length <= evidence.trained
    if refused is not None or (kind == "leave alone" and fits):
        return "high"
    relative = dilated(evidence)
    undetermined = evidence.profile.verdict.kind == "undetermined" or evidence.share is None
    return "low" if undetermined or STAYS < relative < DILATES else "medium"
