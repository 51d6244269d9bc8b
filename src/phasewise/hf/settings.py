"""A rule in a config of transformers: which one serves the whole context, and another in its place."""

from collections.abc import Callable, Mapping
from typing import Any

from phasewise.frequencies import AnyFrequencies, Explicit, LongRoPE
from phasewise.frequencies_hf import RopeSettings, from_hf, stretched, to_hf

SLIDING = "sliding_attention"
LISTED_BASE = 10_000.0
SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_dim")


def listed(rule: Explicit, *, original_length: int, base: float = LISTED_BASE) -> LongRoPE:
    """The same rates as divisors of base^(-i/n), the one form in which engines take a list of rates.

    original_length: where LongRoPE would switch between its two lists, which here are one and the same.
    Raises ValueError for a rate of 0, which no divisor gives.

    >>> listed(Explicit(values=[1.0, 0.005]), original_length=2048).long_factor
    (1.0, 2.0)
    """
    n = len(rule.values)
    if not all(rule.values):
        raise ValueError("a list with rates of 0 has no form in a Hugging Face config; give rates above 0")
    divisors = tuple(base ** (-i / n) / rate for i, rate in enumerate(rule.values))
    return LongRoPE(
        base=base,
        short_factor=divisors,
        long_factor=divisors,
        original_length=original_length,
        attention=rule.attention,
    )


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json with the rotated share that its family turns where none is written.

    GPT-NeoX turns a quarter of each head, Phi and Persimmon half, and their files need not say so: transformers'
    config class of that model_type does. What is written stays as it is, as do families that it does not know.

    >>> completed({"model_type": "gpt_neox", "rotary_emb_base": 10_000})["partial_rotary_factor"]
    0.25
    """
    from transformers import CONFIG_MAPPING

    found = dict(config)
    if isinstance(found.get("text_config"), Mapping):
        return found | {"text_config": completed(found["text_config"])}
    forms = [found.get("rope_parameters"), found.get("rope_scaling")]
    written = [found, *(form for form in forms if isinstance(form, Mapping))]
    family = str(found.get("model_type"))
    if family not in CONFIG_MAPPING or any(place.get(key) is not None for place in written for key in SHARES):
        return found
    default = _default_share(CONFIG_MAPPING[family])
    return found if default is None else {**found, "partial_rotary_factor": default}


def _default_share(kind: Callable[[], Any]) -> float | None:
    """The one share of the channels that a config of this class turns when it is told nothing; None for all of them."""
    from phasewise.hf.checkpoint import quiet

    try:
        with quiet():  # Arcee's own default has tokens beyond its vocabulary
            config = kind().get_text_config(decoder=True)
    except Exception:  # of several kinds, where a config is made of parts that it must be given
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    share = parameters.get("partial_rotary_factor")
    return None if share == 1 else share


def in_both_forms(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json, the same rates also where programs look that know no rope_parameters.

    These would take a base of 10 000. Rates by layer type have no such form, and stay as they are.

    >>> in_both_forms({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})["rope_theta"]
    500000.0
    """
    found = dict(config)
    if isinstance(found.get("text_config"), Mapping):
        return found | {"text_config": in_both_forms(found["text_config"])}
    parameters = found.get("rope_parameters") or {}
    name = parameters.get("rope_type")
    if name is None:
        return found
    beside = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return {**found, **beside, "rope_scaling": None if name == "default" else {**parameters, "type": name}}


def global_settings(config: Any) -> list[RopeSettings]:
    """The settings of the layers that see the whole context; none for a model without rates."""
    if not getattr(config.get_text_config(), "rope_parameters", None):
        return []
    settings = from_hf(config)
    if isinstance(settings, RopeSettings):
        return [settings]
    return [value for layer, value in settings.items() if value is not None and layer != SLIDING]


def head_dim(config: Any) -> int:
    """Channels of a query head in the layers that see the whole context; Gemma 4's others are narrower."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    whole = next((number for number, kind in enumerate(kinds) if kind != SLIDING), 0)
    layers = getattr(text, "per_layer_config", None)  # of every config, from transformers 5.24 on
    layer = layers[whole] if layers else text
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def rules_by_length(text: Any) -> set[str]:
    """Which of the config's rules change rates with the length of a call: of "dynamic" and "longrope"."""
    return {str(group.get("rope_type")) for group in _groups(text)} & {"dynamic", "longrope"}


def trained_length(text: Any) -> int | None:
    """Tokens a model was trained to attend over: the original length where its rope parameters name one."""
    originals = [group.get("original_max_position_embeddings") for group in _groups(text)]
    known = [length for length in originals if length is not None]
    return min(known) if known else getattr(text, "max_position_embeddings", None)


def native_length(text: Any) -> int | None:
    """The longest length that any part of the config names: a factor counts from the original length."""
    longest = getattr(text, "max_position_embeddings", None)
    if longest is None or not getattr(text, "rope_parameters", None):
        return longest
    extended = [
        stretched(group["original_max_position_embeddings"], group["factor"])
        for group in _groups(text)
        if group.get("original_max_position_embeddings") and group.get("factor")
    ]
    return max([longest, *extended])


def _groups(text: Any) -> list[Mapping[str, Any]]:
    """The rope parameters of each layer type, or the one set of them; none for a model without rates."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]


def write(config: Any, rule: AnyFrequencies) -> None:
    """Write the rule into the config, for the layers that see the whole context."""
    text, width = config.get_text_config(), head_dim(config)
    if not global_settings(config):
        raise ValueError(f"this {config.model_type} model has no rates to change; give one with RoPE")
    settings, trained = from_hf(config), trained_length(text)
    assert trained is not None  # without a length transformers makes no rates
    as_written = listed(rule, original_length=trained) if isinstance(rule, Explicit) else rule

    def changed(before: RopeSettings) -> RopeSettings:
        n = before.channels(width)
        rule.at(1, n).rates(n)  # raises where the rule does not fit
        return before.model_copy(update={"frequencies": as_written})

    if isinstance(settings, RopeSettings):
        written = to_hf(changed(settings), head_dim=width)
    else:
        nested = {
            layer: before if before is None or layer == SLIDING else changed(before)
            for layer, before in settings.items()
        }
        written = to_hf(nested, head_dim=width)
    for key, value in written.items():
        setattr(text, key, value)
    original = getattr(as_written, "original_length", None)
    if original is not None and getattr(text, "original_max_position_embeddings", None) is not None:
        # Phi-3's own, which transformers puts before the rule's.
        text.original_max_position_embeddings = original
