"""A Hugging Face config as its rotary settings are written, before anything reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phasewise.frequencies_hf import EARLIER_NAMES, KEYS, RULES, RopeSettings, from_hf

FORMS = ("rope_parameters", "rope_scaling")
BASES = ("rope_theta", "rotary_emb_base")
ORIGINAL = "original_max_position_embeddings"
LONGEST = "max_position_embeddings"


@dataclass(frozen=True)
class Group:
    """One set of rotary parameters: all of them, or those of a layer type. Nulls count as not given."""

    path: tuple[str, ...]
    layer: str | None
    values: Mapping[str, Any]

    @property
    def rule(self) -> str:
        """The rule that transformers reads: rope_type, else type, else default; earlier names replaced."""
        name = self.values.get("rope_type", self.values.get("type", "default"))
        return EARLIER_NAMES.get(name, name) if isinstance(name, str) else repr(name)

    @property
    def name(self) -> str:
        return self.path[-1] if self.layer is None else f"{self.path[-2]}['{self.layer}']"

    def known(self) -> set[str]:
        """The keys that its rule reads."""
        return keys_of(self.rule) if self.rule in RULES else set(self.values)


def keys_of(rule: str) -> set[str]:
    fields: list[str] = [field for field in RULES[rule].model_fields if field != "kind"]
    named = [KEYS.get(field, field) for field in fields]
    return {*named, "rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True)
class Written:
    """A config; of a multimodal one, its text part."""

    whole: Mapping[str, Any]

    @cached_property
    def path(self) -> tuple[str, ...]:
        """Where in the whole the text part lies."""
        inner = self.whole.get("text_config")
        own = any(self.whole.get(key) is not None for key in (*FORMS, *BASES))
        return ("text_config",) if isinstance(inner, Mapping) and not own else ()

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self.whole[self.path[0]] if self.path else self.whole

    @cached_property
    def forms(self) -> tuple[str, ...]:
        return tuple(form for form in FORMS if isinstance(self.config.get(form), Mapping))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The sets of parameters that transformers reads: rope_scaling where both forms are given."""
        if not self.forms:
            return ()
        form = self.forms[-1]
        content, path = self.config[form], (*self.path, form)
        nested = {key: value for key, value in content.items() if isinstance(value, Mapping)}
        if nested:
            return tuple(Group((*path, key), key, given(value)) for key, value in nested.items())
        return (Group(path, None, given(content)),)

    @cached_property
    def loose(self) -> tuple[str, ...]:
        """Keys that stand beside nested groups, not in one."""
        content = self.config[self.forms[-1]] if self.forms else {}
        nested = any(isinstance(value, Mapping) for value in content.values())
        return tuple(
            key for key, value in content.items() if nested and not isinstance(value, Mapping | None)
        )

    def bases(self, group: Group | None) -> dict[str, float]:
        """Every base that is written, by where."""
        found = {key: self.config[key] for key in BASES if self.config.get(key) is not None}
        if group is not None and "rope_theta" in group.values:
            found[f"{group.name}['rope_theta']"] = group.values["rope_theta"]
        return found

    def original(self, group: Group) -> int | None:
        """The original length that a group's rule goes by; "dynamic" keeps it in max_position_embeddings."""
        if group.rule == "dynamic":
            return self.longest
        inside, beside = group.values.get(ORIGINAL), self.config.get(ORIGINAL)
        return whole_number(inside if inside is not None else beside)

    @property
    def longest(self) -> int | None:
        """The length that the config states."""
        return whole_number(self.config.get(LONGEST, self.config.get("n_positions")))

    @property
    def head_dim(self) -> int | None:
        """The width of a head, written or hidden_size / num_attention_heads."""
        for key in ("head_dim", "qk_rope_head_dim"):
            if (width := whole_number(self.config.get(key))) is not None:
                return width
        for width, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
            hidden, count = whole_number(self.config.get(width)), whole_number(self.config.get(heads))
            if hidden is not None and count is not None:
                return hidden // count
        return None

    def settings(self) -> dict[str | None, RopeSettings | None]:
        """Rule and rotated share by layer type, None the one for all; ValueError where they contradict."""
        read = from_hf(self.whole)
        return {None: read} if isinstance(read, RopeSettings) else {**read}


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def whole_number(value: Any) -> int | None:
    """A whole number from 1, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def number(value: Any) -> float | None:
    """A finite number above 0, or None for anything else."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return float(value) if valid else None
