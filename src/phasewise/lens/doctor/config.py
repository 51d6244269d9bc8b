"""What can be wrong with rotary settings as they are written: contradictions, and what engines pass over.

What transformers reads is that of version 5 (modeling_rope_utils.py, read at 5.24).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from phasewise.frequencies import YaRN
from phasewise.frequencies_hf import EARLIER_NAMES, RULES
from phasewise.lens.doctor.diagnosis import Edit, Finding
from phasewise.lens.doctor.written import BASES, LONGEST, ORIGINAL, Group, Written, keys_of, number

FALLBACK = 10_000.0
"""The base that transformers (RotaryEmbeddingConfigMixin.default_theta) and vLLM (get_rope) take without one."""

NEEDS_ORIGINAL = ("yarn", "longrope", "llama3")
ELSEWHERE = (
    "attn_factor",
    "extrapolation_factor",
    "apply_yarn_scaling",
    "finetuned",
    "short_mscale",
    "long_mscale",
)
"""Keys of other engines, which transformers passes over (vLLM's get_rope; Phi-3's and YaRN's own code)."""

NOT_READ = ("mrope", "axial")
GUESS = "which of the readings the checkpoint was trained with is not in the config"


def forms(written: Written) -> Iterator[Finding]:
    """Both forms of the settings: transformers takes rope_scaling whole and drops rope_parameters."""
    if len(written.forms) < 2:
        return
    kept, dropped = (dict(written.config[form]) for form in ("rope_scaling", "rope_parameters"))
    lost = {key: value for key, value in dropped.items() if value is not None and kept.get(key) != value}
    renamed = kept.get("type", kept.get("rope_type")) == dropped.get("rope_type", dropped.get("type"))
    if lost.keys() <= ({"rope_type", "type"} if renamed else set()):
        return
    yield Finding(
        check="two forms",
        severity="wrong",
        said="rope_parameters and rope_scaling disagree: transformers takes rope_scaling alone",
        evidence={key: f"{value} (rope_scaling: {kept.get(key)})" for key, value in lost.items()},
        remedy="keep the one the checkpoint was trained with",
        by_hand=GUESS,
    )


def base(written: Written) -> Iterator[Finding]:
    """The base: written, once, where both old and new readers look."""
    for group in written.groups or (None,):
        found = written.bases(group)
        nested = group is not None and group.layer is not None
        if not found:
            where = "the config" if group is None else group.name
            yield Finding(
                check="base",
                severity="warning" if group is None else "wrong",
                said=f"{where} has no rope_theta, and none stands beside it: readers fall back to 10 000 silently",
                evidence={"base taken": FALLBACK},
                remedy="write the base the checkpoint was trained with, as rope_theta",
                by_hand="the base is not in the config; ask whoever trained the checkpoint",
            )
        elif len(set(found.values())) > 1 and not nested:
            yield Finding(
                check="base",
                severity="wrong",
                said="the base is written twice with different values",
                evidence=dict(found),
                remedy="keep the right one in both places: newer readers take rope_parameters', older ones rope_theta",
                by_hand=GUESS,
            )
        elif group is not None and not nested:
            yield from _base_in_one_form(written, group, found)


def _base_in_one_form(written: Written, group: Group, found: dict[str, float]) -> Iterator[Finding]:
    value = next(iter(found.values()))
    if value == FALLBACK:
        return
    if "rope_theta" not in group.values and written.forms[-1] == "rope_parameters":
        edit = Edit(path=(*group.path, "rope_theta"), value=value)
        said = "rope_parameters has no rope_theta of its own: a reader of that form alone takes 10 000"
    elif not any(key in found for key in BASES):
        edit = Edit(path=(*written.path, "rope_theta"), value=value)
        said = f"the base stands in {written.forms[-1]} alone: a reader of rope_theta beside it takes 10 000"
    else:
        return
    yield Finding(
        check="base",
        severity="note",
        said=said,
        evidence={"base": value, "base a reader of the other place takes": FALLBACK},
        remedy="write it in both places",
        edits=(edit,),
    )


def rule(written: Written) -> Iterator[Finding]:
    """The rule's name: given, once, known."""
    for group in written.groups:
        names = {key: group.values[key] for key in ("rope_type", "type") if key in group.values}
        scaling = sorted(
            group.values.keys() - {"rope_theta", "partial_rotary_factor", "mrope_section"} - names.keys()
        )
        if not names and scaling:
            yield Finding(
                check="rule",
                severity="wrong",
                said=f"{group.name} names no rule: read as default, so {', '.join(scaling)} do nothing",
                evidence={key: _short(group.values[key]) for key in scaling},
                remedy="write rope_type (linear, dynamic, yarn, longrope, llama3), or remove the rest",
                by_hand="several rules take these keys",
            )
        elif len({EARLIER_NAMES.get(str(name), str(name)) for name in names.values()}) > 1:
            yield Finding(
                check="rule",
                severity="wrong",
                said=f"{group.name} names two rules: newer readers take rope_type, older ones type",
                evidence=dict(names),
                remedy="keep the one the checkpoint was trained with, in both",
                by_hand=GUESS,
            )
        elif group.rule in NOT_READ:
            yield Finding(
                check="rule",
                severity="note",
                said=f"{group.name} is of several axes ({group.rule}), which is not checked",
                evidence={"rope_type": group.rule},
                remedy="check the text part alone",
                by_hand="nothing is known to be wrong",
            )
        elif group.rule not in RULES:
            yield Finding(
                check="rule",
                severity="wrong",
                said=f"{group.name} names an unknown rule: transformers refuses it or passes over it",
                evidence={"rope_type": group.rule},
                remedy=f"name one of {', '.join(RULES)}",
                by_hand="which rule was meant is not in the config",
            )
        elif old := {key: name for key, name in names.items() if name in EARLIER_NAMES}:
            yield Finding(
                check="rule",
                severity="warning",
                said=f"{group.name} uses an earlier name of {group.rule}, which newer readers do not know",
                evidence=dict(old),
                remedy=f"write {group.rule}",
                edits=tuple(Edit(path=(*group.path, key), value=group.rule) for key in old),
            )


def keys(written: Written) -> Iterator[Finding]:
    """Keys that the rule does not read."""
    for group in written.groups:
        unknown = sorted(group.values.keys() - group.known() - {"mrope_section", "mrope_interleaved"})
        of_rules = {
            name: [key for key in unknown if key in keys_of(name)] for name in RULES if name != group.rule
        }
        other, foreign = max(of_rules.items(), key=lambda item: len(item[1]))
        if foreign and group.rule in RULES and _named(group):
            yield Finding(
                check="keys",
                severity="wrong",
                said=f"{group.name} is {group.rule} and holds keys of {other}, which do nothing: "
                "one scaling seems to have overwritten another",
                evidence={key: _short(group.values[key]) for key in foreign},
                remedy=f"restore {other}, the scaling the checkpoint came with, or remove its keys",
                by_hand=GUESS,
            )
        idle = [key for key in unknown if key not in foreign and key not in ELSEWHERE]
        if idle:
            yield Finding(
                check="keys",
                severity="warning",
                said=f"{group.name} holds keys that no rule reads: transformers logs and passes over them",
                evidence={key: _short(group.values[key]) for key in idle},
                remedy="remove them, or correct their names",
                edits=tuple(Edit(path=(*group.path, key), remove=True) for key in idle),
            )


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
                evidence={"length taken": longest, "factor": _short(group.values.get("factor"))},
                remedy=f"write {ORIGINAL}, the length before scaling",
                by_hand="the length before scaling is not in the config",
            )
        elif inside is not None and beside is not None and inside != beside:
            yield Finding(
                check="original length",
                severity="wrong",
                said="the original length is written twice with different values",
                evidence={f"{group.name}['{ORIGINAL}']": _short(inside), ORIGINAL: _short(beside)},
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
            yield from _against_ratio(group, value, ratio, length, longest)


def _against_ratio(
    group: Group, value: float, ratio: float, length: int | None, longest: int | None
) -> Iterator[Finding]:
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
            evidence={key: _short(written.config[written.forms[-1]][key]) for key in written.loose},
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
        if any(one != other for one, other in pairwise(places.values())) and group.layer is None:
            yield Finding(
                check="rotated share",
                severity="wrong",
                said="the share of channels that turn is written twice with different values",
                evidence={key: _short(value) for key, value in places.items()},
                remedy="keep the right one",
                by_hand=GUESS,
            )


def _named(group: Group) -> bool:
    return bool({"rope_type", "type"} & group.values.keys())


def _count(values: object) -> int | None:
    return len(values) if isinstance(values, list | tuple) else None


def _short(value: object) -> float | int | str | bool | None:
    if isinstance(value, float | int | str | bool) or value is None:
        return value
    return f"{len(value)} numbers" if isinstance(value, list | tuple) else str(value)
