"""What can be wrong with the sizes in rotary settings: lengths, factor, widths, lists, layer types, shares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from phasewise.frequencies import YaRN
from phasewise.frequencies_hf import RULES
from phasewise.lens.doctor.config import GUESS, differ
from phasewise.lens.doctor.diagnosis import Edit, Finding
from phasewise.lens.doctor.written import LONGEST, ORIGINAL, Group, Written, number

NEEDS_ORIGINAL = ("yarn", "longrope", "llama3")


def original(written: Written) -> Iterator[Finding]:
    """The original length: written, once, not above the longest."""
    for group in written.groups:
        if group.rule not in NEEDS_ORIGINAL:
            continue
        inside, beside = group.values.get(ORIGINAL), written.config.get(ORIGINAL)
        length, longest = written.original(group), written.longest
        if inside is None and beside is None:
            yield Finding(
                check="original length",
                severity="wrong",
                said=f"{group.name} is {group.rule} without {ORIGINAL}: transformers takes {LONGEST}, "
                "which may already be the extended length",
                evidence={"length taken": longest, "factor": group.values.get("factor")},
                remedy=f"write {ORIGINAL}, the length before scaling",
                by_hand="the length before scaling is not in the config",
            )
        elif inside is not None and beside is not None and inside != beside:
            yield Finding(
                check="original length",
                severity="wrong",
                said="the original length is written twice with different values",
                evidence={f"{group.name}['{ORIGINAL}']": inside, ORIGINAL: beside},
                remedy="keep the right one in both places",
                by_hand=GUESS,
            )
        elif length is not None and longest is not None and longest < length:
            yield Finding(
                check="original length",
                severity="wrong",
                said=f"{LONGEST} lies below the original length",
                evidence={LONGEST: longest, ORIGINAL: length},
                remedy="the original is the smaller: correct one",
                by_hand=GUESS,
            )


def factor(written: Written) -> Iterator[Finding]:
    """The factor against the two lengths whose ratio it is."""
    for group in written.groups:
        if group.rule not in RULES or group.rule in ("default", "proportional"):
            continue
        length, longest, value = written.original(group), written.longest, number(group.values.get("factor"))
        ratio = None if length is None or longest is None else longest / length
        if value is None:
            if "factor" not in group.values and group.rule != "longrope":
                known = group.rule == "yarn" and ratio is not None and ratio > 1
                yield Finding(
                    check="factor",
                    severity="wrong",
                    said=f"{group.name} is {group.rule} without a factor, which transformers needs",
                    evidence={f"{LONGEST} / {ORIGINAL}": ratio},
                    remedy="write factor, wanted / original length",
                    edits=(Edit(path=(*group.path, "factor"), value=ratio),) if known else (),
                    by_hand="" if known else "the lengths do not tell it",
                )
        elif ratio is not None and group.rule in ("yarn", "longrope") and ratio >= 1:
            yield from _against_ratio(value, ratio, length, longest)


def _against_ratio(value: float, ratio: float, length: int | None, longest: int | None) -> Iterator[Finding]:
    if ratio == 1 or math.isclose(ratio, value):
        return
    evidence: dict[str, Any] = {
        "factor": value,
        "ratio of the lengths": ratio,
        LONGEST: longest,
        ORIGINAL: length,
    }
    twice = math.isclose(ratio, value**2)
    if ratio > value:
        yield Finding(
            check="factor",
            severity="wrong",
            said=f"{LONGEST} is {ratio:g} times {ORIGINAL} and factor {value:g}"
            + (": as if the factor had been applied twice" if twice else ", so the end is out of its reach"),
            evidence=evidence | {"reach": value * length if length else None},
            remedy=f"lower {LONGEST} to factor x original, or raise the factor",
            by_hand=GUESS,
        )
    else:
        yield Finding(
            check="factor",
            severity="warning",
            said=f"factor {value:g} is not the ratio of the lengths, {ratio:g}: engines that go by the lengths "
            "scale by that, and a factor counted from a length already extended looks like this",
            evidence=evidence,
            remedy=f"set {LONGEST} to factor x {ORIGINAL}, or leave it at {ORIGINAL}",
            by_hand=GUESS,
        )


def head_width(written: Written) -> Iterator[Finding]:
    """A head_dim of null crashes transformers' yarn, dynamic and longrope where the family leaves it so."""
    affected = [group for group in written.groups if group.rule in ("yarn", "dynamic", "longrope")]
    if affected and "head_dim" in written.config and written.config["head_dim"] is None:
        width = written.head_dim
        yield Finding(
            check="head width",
            severity="warning",
            said=f"head_dim is null, and {affected[0].rule} multiplies it: an error wherever the model's own "
            "config class does not fill it in",
            evidence={"hidden_size / num_attention_heads": width},
            remedy="write the number",
            edits=() if width is None else (Edit(path=(*written.path, "head_dim"), value=width),),
            by_hand="the sizes do not tell it" if width is None else "",
        )


def layers(written: Written) -> Iterator[Finding]:
    """Settings by layer type: which of them transformers passes over."""
    if written.loose:
        yield Finding(
            check="layer types",
            severity="wrong",
            said="keys stand beside the layer types, where only some readers see them",
            evidence={key: written.config[written.forms[-1]][key] for key in written.loose},
            remedy="move each into the layer types it is meant for",
            by_hand="which layer types they are meant for is not in the config",
        )
    named = written.config.get("layer_types")
    for group in written.groups:
        if group.layer is None:
            continue
        if (
            isinstance(named, list)
            and group.layer not in named
            and any(g.layer in named for g in written.groups)
        ):
            yield Finding(
                check="layer types",
                severity="warning",
                said=f"no layer is of the type {group.layer}: its settings do nothing",
                evidence={"layer types": ", ".join(sorted(set(map(str, named))))},
                remedy="correct the name, or remove it",
                by_hand="a misspelt layer type and an idle one look alike",
            )
        if group.rule == "yarn" and group.values.get("truncate") is False:
            yield from _truncate(written, group)


def _truncate(written: Written, group: Group) -> Iterator[Finding]:
    settings = written.settings()[group.layer]
    width = written.head_dim
    if settings is None or width is None or not isinstance(settings.frequencies, YaRN):
        return
    meant, n = settings.frequencies, settings.channels(width)
    read = meant.model_copy(update={"truncate": True})
    off = (read.rates(n) / meant.rates(n) - 1).abs()
    if off.max() > 0:
        yield Finding(
            check="layer types",
            severity="wrong",
            said=f"truncate=false in {group.name} is passed over: transformers looks for it beside the layer types",
            evidence={
                "largest relative error of a rate": off.max().item(),
                "rates changed": int((off > 1e-6).sum()),
            },
            remedy="serve this checkpoint where truncate is read by layer type, or with a list of rates (longrope)",
            by_hand="no place in the config is read by transformers for one layer type alone",
        )


def lists(written: Written) -> Iterator[Finding]:
    """LongRoPE's lists: a number for each pair that turns."""
    for group in written.groups:
        if group.rule != "longrope" or written.head_dim is None:
            continue
        share = group.values.get("partial_rotary_factor", written.config.get("partial_rotary_factor"))
        pairs = int(written.head_dim * (1.0 if share is None else share)) // 2
        counts = {key: _count(group.values.get(key)) for key in ("short_factor", "long_factor")}
        if set(counts.values()) != {pairs}:
            yield Finding(
                check="lists",
                severity="wrong",
                said=f"{group.name}: longrope's lists do not have one number for each of the {pairs} pairs that turn",
                evidence={**counts, "pairs that turn": pairs},
                remedy="give both lists as long as half the rotated width",
                by_hand="the missing numbers are not in the config",
            )


def share(written: Written) -> Iterator[Finding]:
    """The rotated share: once, and read alike by partial and proportional rotation."""
    for group in written.groups or (Group((), None, {}),):
        places = {
            key: value
            for key, value in {
                f"{group.name}['partial_rotary_factor']" if group.path else "": group.values.get(
                    "partial_rotary_factor"
                ),
                "partial_rotary_factor": written.config.get("partial_rotary_factor"),
                "rotary_pct": written.config.get("rotary_pct"),
            }.items()
            if value is not None
        }
        if differ(places.values()) and group.layer is None:
            yield Finding(
                check="rotated share",
                severity="wrong",
                said="the share of channels that turn is written twice with different values",
                evidence=places,
                remedy="keep the right one",
                by_hand=GUESS,
            )


def _count(values: object) -> int | None:
    return len(values) if isinstance(values, list | tuple) else None
