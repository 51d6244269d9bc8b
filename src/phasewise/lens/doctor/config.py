"""What can be wrong with rotary settings as they are written: which rule, which base, and keys that do nothing.

What transformers reads is that of version 5 (modeling_rope_utils.py, read at 5.24).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from phasewise.frequencies_hf import EARLIER_NAMES, RULES
from phasewise.lens.doctor.diagnosis import Edit, Finding
from phasewise.lens.doctor.written import BASES, Group, Written, keys_of

FALLBACK = 10_000.0
"""The base that transformers (RotaryEmbeddingConfigMixin.default_theta) and vLLM (get_rope) take without one."""

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
        elif differ(found.values()) and not nested:
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
                evidence={key: group.values[key] for key in scaling},
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
                evidence={key: group.values[key] for key in foreign},
                remedy=f"restore {other}, the scaling the checkpoint came with, or remove its keys",
                by_hand=GUESS,
            )
        idle = [key for key in unknown if key not in foreign and key not in ELSEWHERE]
        if idle:
            yield Finding(
                check="keys",
                severity="warning",
                said=f"{group.name} holds keys that no rule reads: transformers logs and passes over them",
                evidence={key: group.values[key] for key in idle},
                remedy="remove them, or correct their names",
                edits=tuple(Edit(path=(*group.path, key), remove=True) for key in idle),
            )


def differ(values: Iterable[object]) -> bool:
    return any(one != other for one, other in pairwise(values))


def _named(group: Group) -> bool:
    return bool({"rope_type", "type"} & group.values.keys())
