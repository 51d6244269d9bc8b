"""Scaling rules from and to Hugging Face configs, refusing what is contradictory rather than choosing.

Two forms: v5's `rope_parameters`, flat or nested by layer type; legacy `rope_scaling` (`type`) beside a
top-level `rope_theta`. A quantity given in several places must have one value; None means not given.
"""

from collections.abc import Mapping
from numbers import Integral
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from phasewise.frequencies import (
    NTK,
    AnyFrequencies,
    DynamicNTK,
    Frequencies,
    Geometric,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)

RULES = {
    "default": Geometric,
    "linear": Linear,
    "dynamic": DynamicNTK,
    "yarn": YaRN,
    "longrope": LongRoPE,
    "llama3": Llama3,
    "proportional": Proportional,
}
NAMES = {rule: name for name, rule in RULES.items()}
EARLIER_NAMES = {"su": "longrope"}
KEYS = {
    "base": "rope_theta",
    "original_length": "original_max_position_embeddings",
    "attention": "attention_factor",
    "fraction": "partial_rotary_factor",
}
UNREAD = ("compress_rope_theta", "global_rope_theta", "layer_rope_theta", "local_rope_theta")
"""Top-level keys that change the rates of some layers in a way of one architecture's own."""

NUMBERS = (
    "rope_theta",
    "rotary_emb_base",
    "rope_local_base_freq",
    "head_dim",
    "hidden_size",
    "num_attention_heads",
    "rotary_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "factor",
)


class RopeSettings(BaseModel, frozen=True, extra="forbid", strict=True):
    """A rule and the share of each head's channels that it turns (partial rotation)."""

    frequencies: AnyFrequencies
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0

    def channels(self, head_dim: int) -> int:
        """How many pairs of a head turn, as transformers counts: int(head_dim * fraction) // 2.

        >>> RopeSettings(frequencies=Geometric(base=10_000.0), fraction=0.25).channels(64)
        8
        """
        if not isinstance(head_dim, Integral):
            raise ValueError(f"head_dim is {head_dim!r}; give the width of a head, as 64")
        rotated = int(head_dim * self.fraction)
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"fraction {self.fraction} of head_dim {head_dim} turns {rotated} dimensions; pairs need an "
                "even number, at least 2"
            )
        return rotated // 2


NestedSettings = dict[str, RopeSettings | None]


def from_hf(config: Any) -> RopeSettings | NestedSettings:
    """The rule and rotated share of a Hugging Face config, or one of each by layer type (None: no rotation).

    `config` is a config object (with `to_dict` or plain attributes), its dict, or a flat `rope_parameters`
    alone; of a multimodal config, its `text_config`. Gemma 3's legacy `rope_local_base_freq` reads as nested.
    A missing partial_rotary_factor means 1, as in transformers' rope functions. Of families where it means less
    (GPT-NeoX, Phi) give the config object, which has it, or `phasewise.hf.settings.completed` of the dict.

    Raises ValueError naming what is wrong: no rope_theta (never 10 000 by default), a quantity given twice
    with different values, unknown keys and rule names (multi-axis "mrope" and "axial" are not read), no
    original length, a yarn or longrope `factor` that contradicts max_position_embeddings / original length.
    That ratio may be anything from 1 (a config not yet extended) to the factor; without a factor it is the factor.

    >>> from_hf({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}).frequencies
    Linear(kind='linear', base=10000.0, factor=2.0)
    """
    config = _plain(config)
    _check_numbers(config, "")
    if not {"rope_parameters", "rope_scaling"} & config.keys() and {"rope_type", "type"} & config.keys():
        config = {"rope_parameters": config}
    parameters = _parameters(config)
    for key in UNREAD:
        if config.get(key) is not None:
            raise ValueError(
                f"{key} is {config[key]} and not read; give rope_parameters nested by layer type instead"
            )
    nested = any(isinstance(value, Mapping) for value in parameters.values())
    local = config.get("rope_local_base_freq")
    if nested:
        loose = [
            key for key, value in parameters.items() if not (value is None or isinstance(value, Mapping))
        ]
        if loose or local is not None:
            raise ValueError(
                f"rope_parameters is nested by layer type, but {', '.join(loose) or 'rope_local_base_freq'} "
                "stands outside; move it into each layer type"
            )
        return {
            layer: None if value is None else _settings(value, config, f"rope_parameters['{layer}']")
            for layer, value in parameters.items()
        }
    older = config.get("rope_parameters") is None and config.get("rope_scaling") is not None
    settings = _settings(parameters, config, "rope_scaling" if older else "rope_parameters")
    if local is None:
        return settings
    alone = {key: value for key, value in config.items() if key != "rope_theta"}
    return {
        "full_attention": settings,
        "sliding_attention": _settings({"rope_theta": local}, alone, "rope_local_base_freq"),
    }


def to_hf(
    settings: Frequencies | RopeSettings | Mapping[str, Frequencies | RopeSettings | None],
    *,
    head_dim: int | None = None,
    legacy: bool = False,
) -> dict[str, Any]:
    """The part of a Hugging Face config that says the same: `from_hf(to_hf(settings)) == settings`.

    Writes every value out, so that nothing is left to an engine's default, as v5's `rope_parameters` or in
    the legacy form (flat only), and max_position_embeddings where dynamic keeps its original length. NTK
    needs `head_dim` and becomes "default" with the base it amounts to. DynamicYaRN and Explicit have no such
    form: ValueError with the remedy.

    >>> to_hf(Geometric(base=500_000.0))
    {'rope_parameters': {'rope_type': 'default', 'rope_theta': 500000.0}}
    >>> to_hf(Linear(base=10_000.0, factor=4.0), legacy=True)
    {'rope_theta': 10000.0, 'rope_scaling': {'type': 'linear', 'factor': 4.0}}
    """
    if not isinstance(settings, Frequencies | RopeSettings | Mapping):
        raise ValueError(f"{settings!r} is no rule; give one, as Geometric(base=10_000.0), or RopeSettings")
    if isinstance(settings, Mapping):
        if legacy:
            raise ValueError(
                f"legacy has no form for layer types ({', '.join(settings)}); write v5's, legacy=False"
            )
        nested, beside = {}, {}
        for layer, value in settings.items():
            nested[layer], lengths = (None, {}) if value is None else _written(value, head_dim)
            if beside and lengths and lengths != beside:
                raise ValueError(
                    f"layer type {layer} needs {lengths}, an earlier one {beside}, but a config has one; "
                    "give every dynamic_ntk rule the same original_length"
                )
            beside |= lengths
        if beside:
            # All layer types share max_position_embeddings: one original length may contradict another.
            from_hf({"rope_parameters": nested, **beside})
        return {"rope_parameters": nested, **beside}
    parameters, beside = _written(settings, head_dim)
    if not legacy:
        return {"rope_parameters": parameters, **beside}
    name = parameters.pop("rope_type")
    if name == "proportional":
        raise ValueError("legacy has no rule named proportional; write v5's form, legacy=False")
    outside = {
        key: parameters.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in parameters
    }
    return {**outside, "rope_scaling": None if name == "default" else {"type": name, **parameters}, **beside}


def lengths_of(rule: Frequencies) -> tuple[int, int | None]:
    """The least and the largest max_position_embeddings that do not contradict a rule; None: there is no largest.

    >>> lengths_of(YaRN(base=10_000.0, factor=4.0, original_length=4096))
    (4096, 16384)
    """
    least = getattr(rule, "original_length", 1)
    if isinstance(rule, DynamicNTK):
        return least, least
    if not isinstance(rule, YaRN | LongRoPE) or rule.factor is None:
        return least, None
    return least, stretched(least, rule.factor)


def stretched(length: int, factor: float) -> int:
    """The most tokens that are no more than `factor` times a length, as floats divide.

    >>> stretched(7, 1000 / 7), stretched(64, 4.01)
    (1000, 256)
    """
    nearest = round(length * factor)
    return nearest - (nearest / length > factor)


def require_length(rule: Frequencies, length: int) -> None:
    """Raise ValueError for a length that a config cannot name beside a rule.

    >>> require_length(YaRN(base=10_000.0, factor=4.0, original_length=4096), 8192)
    """
    least, largest = lengths_of(rule)
    if least <= length and (largest is None or length <= largest):
        return
    span = "or more" if largest is None else f"to {largest}"
    raise ValueError(
        f"length {length} contradicts the {rule.kind} rule, which is for {least} {span} tokens: give such a length, "
        "or a rule for this one"
    )


def _plain(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        found = dict(config)
    elif hasattr(config, "to_dict"):
        found = config.to_dict()
    elif hasattr(config, "__dict__"):
        found = dict(vars(config))
    else:
        raise ValueError(f"{config!r} is no config; give a dict, or an object with to_dict or attributes")
    rotary = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "rope_type", "type")
    if found.get("text_config") is not None and all(found.get(key) is None for key in rotary):
        return _plain(found["text_config"])
    return found


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` or `rope_scaling`; both only when they say the same."""
    given = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{key} is {value!r}; give a dict of the rule's parameters, as {{'rope_type': 'yarn', ..}}"
            )
    if len(given) < 2:
        return dict(next(iter(given.values()), {}))
    merged = {}
    for name in dict.fromkeys(key for parameters in given.values() for key in parameters):
        places = {f"{place}['{name}']": parameters.get(name) for place, parameters in given.items()}
        merged[name] = _agree(name, places)
    incomplete = [
        place for place, parameters in given.items() if _rule_part(parameters) != _rule_part(merged)
    ]
    if incomplete:
        raise ValueError(
            f"rope_parameters is {given['rope_parameters']} and rope_scaling {given['rope_scaling']}; they "
            "disagree: keep the one the checkpoint is to be used with"
        )
    return merged


def _rule_part(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the legacy `rope_scaling` holds: all but the base and the rotated fraction."""
    apart = ("type", "rope_type", "rope_theta", "partial_rotary_factor")
    rest = {key: value for key, value in parameters.items() if value is not None and key not in apart}
    return {"rope_type": _name(parameters), **rest}


def _name(parameters: Mapping[str, Any]) -> str:
    names = {key: parameters[key] for key in ("rope_type", "type") if parameters.get(key) is not None}
    for key, name in names.items():
        if not isinstance(name, str):
            raise ValueError(f"{key} is {name!r}; give the name of a rule: {', '.join(RULES)}")
    name = _agree("the rule's name", {key: EARLIER_NAMES.get(name, name) for key, name in names.items()})
    name = "default" if name is None else name
    if name not in RULES:
        raise ValueError(f"rope_type is {name!r}; the rules read are {', '.join([*RULES, *EARLIER_NAMES])}")
    return name


def _agree(what: str, given: Mapping[str, Any]) -> Any:
    """The one value of a quantity that may stand in several places, or None."""
    found = {place: value for place, value in given.items() if value is not None}
    values = list(found.values())
    if any(value != values[0] for value in values):
        places = ", ".join(f"{place} = {value}" for place, value in found.items())
        raise ValueError(f"{what} is given twice with different values: {places}; keep the right one")
    return values[0] if values else None


def _settings(parameters: Mapping[str, Any], config: Mapping[str, Any], where: str) -> RopeSettings:
    """One flat set of parameters, with what the config says beside it."""
    given = {key: value for key, value in parameters.items() if value is not None}
    _check_numbers(given, f"{where}: ")
    name = _name(given)
    rule = RULES[name]
    given.pop("rope_type", None)
    given.pop("type", None)

    theta = ("rope_theta", "rotary_emb_base")
    base = _agree(
        "the base", {f"{where}['rope_theta']": given.pop("rope_theta", None), **_select(config, theta)}
    )
    if base is None:
        raise ValueError(
            f"{where} has no rope_theta, and the config none beside it; give the base the checkpoint was "
            "trained with (a guess of 10000 would change every rate)"
        )
    values: dict[str, Any] = {"base": base}

    head_dim = _head_dim(config)
    share = {f"{where}['partial_rotary_factor']": given.pop("partial_rotary_factor", None)}
    share |= _select(config, ("partial_rotary_factor", "rotary_pct"))
    if config.get("rotary_dim") is not None:
        if head_dim is None:
            raise ValueError(f"rotary_dim is {config['rotary_dim']}; give head_dim, of which it is a share")
        share["rotary_dim / head_dim"] = config["rotary_dim"] / head_dim
    fraction = _agree("the rotated fraction", share)
    fraction = 1.0 if fraction is None else fraction
    if rule is Proportional:
        values["fraction"], fraction = fraction, 1.0

    if "original_length" in rule.model_fields:
        values["original_length"] = _original_length(name, given, config, where)
    if rule in (YaRN, LongRoPE):
        values["factor"] = _factor(name, given, config, values["original_length"])
    for field in rule.model_fields.keys() - values.keys() - {"kind"}:
        if (key := KEYS.get(field, field)) in given:
            values[field] = given.pop(key)
    if given:
        valid = [KEYS.get(field, field) for field in rule.model_fields if field != "kind"]
        valid = ", ".join(dict.fromkeys([*valid, "partial_rotary_factor"]))
        raise ValueError(
            f"{where} has {', '.join(given)}, unknown to rope_type {name!r}, which takes {valid}; remove it "
            "or correct the rope_type"
        )
    settings = RopeSettings(frequencies=rule(**values), fraction=fraction)
    if isinstance(settings.frequencies, LongRoPE) and head_dim is not None:
        settings.frequencies.rates(settings.channels(head_dim), length=1)
    return settings


def _select(config: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: config.get(key) for key in keys}


def _head_dim(config: Mapping[str, Any]) -> int | None:
    for key in ("head_dim", "qk_rope_head_dim"):
        if config.get(key) is not None:
            return config[key]
    for width, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
        if config.get(width) is not None and config.get(heads) is not None:
            return config[width] // config[heads]
    return None


def _check_numbers(values: Mapping[str, Any], where: str) -> None:
    for key in NUMBERS:
        value = values.get(key)
        number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if value is not None and not (number and value > 0):
            raise ValueError(f"{where}{key} is {value!r}; give a number above 0")


def _original_length(name: str, given: dict[str, Any], config: Mapping[str, Any], where: str) -> int:
    """The trained length, which "dynamic" alone keeps in max_position_embeddings."""
    key = "original_max_position_embeddings"
    longest = config.get("max_position_embeddings")
    places = {f"{where}['{key}']": given.pop(key, None), key: config.get(key)}
    if name == "dynamic":
        if longest is None:
            raise ValueError("dynamic needs max_position_embeddings beside it, the length trained on")
        places["max_position_embeddings"] = longest
    length = _agree("the original length", places)
    if length is None:
        raise ValueError(
            f"{name} needs {key}, the length the model was trained on; max_position_embeddings "
            f"({longest}) may already be the extended one"
        )
    if longest is not None and longest < length:
        raise ValueError(
            f"max_position_embeddings is {longest}, below {key} {length}; correct one: the original is the "
            "smaller"
        )
    return length


def _factor(name: str, given: dict[str, Any], config: Mapping[str, Any], original: int) -> float | None:
    """The factor given, which the two lengths may not contradict, or else their ratio."""
    factor, longest = given.pop("factor", None), config.get("max_position_embeddings")
    if longest is None:
        return factor
    ratio = longest / original
    if factor is None:
        if name == "yarn" and ratio == 1:
            raise ValueError(f"yarn has no factor and both lengths are {original}; give wanted / original")
        return ratio
    if not 1 <= ratio <= factor:
        raise ValueError(
            f"factor is {factor}, but max_position_embeddings / original_max_position_embeddings = "
            f"{longest} / {original} = {ratio:g}; correct one, or leave max_position_embeddings at {original}"
        )
    return factor


def _written(
    settings: Frequencies | RopeSettings, head_dim: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flat v5 parameters, and what stands beside them in the config."""
    if isinstance(settings, Frequencies):
        settings = RopeSettings.model_validate({"frequencies": settings})
    if not isinstance(settings, RopeSettings):
        raise ValueError(f"{settings!r} is no rule; give one, as Geometric(base=10_000.0), or RopeSettings")
    rule = settings.frequencies
    if isinstance(rule, NTK):
        if head_dim is None:
            raise ValueError('ntk is written as "default" with another base; give head_dim, which decides it')
        rule = rule.geometric(settings.channels(head_dim))
    if type(rule) not in NAMES:
        raise ValueError(
            f"Hugging Face has no rule for {rule.kind}; write the YaRN of one length, rule.at(length, n)"
            if rule.kind == "dynamic_yarn"
            else f"Hugging Face has no rule for {rule.kind}; write a LongRoPE with short_factor and "
            "long_factor both base ** (-i / n) / rate"
        )
    values = {
        KEYS.get(field, field): list(value) if isinstance(value, tuple) else value
        for field, value in dict(rule).items()
        if field != "kind" and value is not None
    }
    beside = {}
    if isinstance(rule, DynamicNTK):
        beside["max_position_embeddings"] = values.pop("original_max_position_embeddings")
    if isinstance(rule, Proportional) and rule.factor == 1:
        # transformers reads this factor but logs it as an unknown key.
        del values["factor"]
    if settings.fraction != 1:
        values["partial_rotary_factor"] = settings.fraction
    return {"rope_type": NAMES[type(rule)], **values}, beside
