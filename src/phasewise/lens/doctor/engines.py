"""Where engines read one config differently: the numbers that each gets.

Sources: transformers 5.24, modeling_rope_utils.py. vLLM, model_executor/layers/rotary_embedding: get_rope hands
YaRN its own `attn_factor` and, until it took `attention_factor` and the mscales too, nothing else;
DynamicNTKScalingRotaryEmbedding forms one base for max_position_embeddings x factor;
Phi3LongRoPEScaledRotaryEmbedding goes by the ratio of the lengths. llama.cpp, src/llama-context.cpp: the factor
of YaRN is 0.1 ln(factor) + 1, whatever the config says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from phasewise.frequencies import DynamicNTK, Frequencies, Linear, LongRoPE, YaRN
from phasewise.lens.doctor.diagnosis import Finding, Number
from phasewise.lens.doctor.written import Group, Written, number

APART = 1e-4
"""Relative: factors that differ by less are printed alike and change scores by less than half precision does."""


def attention(written: Written) -> Iterator[Finding]:
    """What multiplies cos and sin, by engine."""
    for group in written.groups:
        if group.rule not in ("yarn", "longrope"):
            continue
        readings = _yarn(group) if group.rule == "yarn" else _longrope(written, group)
        values = [value for value in readings.values() if isinstance(value, float)]
        lone = [key for key in ("mscale", "mscale_all_dim") if number(group.values.get(key)) is not None]
        if len(lone) == 1 and "attention_factor" not in group.values:
            yield Finding(
                check="attention factor",
                severity="warning",
                said=f"{group.name} has {lone[0]} without its partner: transformers counts them only together",
                evidence={lone[0]: number(group.values[lone[0]]), **readings},
                remedy="give both, or the result as attention_factor",
                by_hand="what the missing one was in training is not in the config",
            )
        elif values and max(values) / min(values) > 1 + APART:
            yield Finding(
                check="attention factor",
                severity="warning",
                said=f"engines multiply cos and sin of {group.name} by different factors, scores by their squares",
                evidence=readings | {"largest ratio of scores": (max(values) / min(values)) ** 2},
                remedy="serve with the engine whose number the checkpoint was trained with, or set it there by hand "
                "(vLLM: attn_factor; llama.cpp: rope.scaling.attn_factor in the GGUF file)",
                by_hand="no key is read alike by all of them",
            )


def _yarn(group: Group) -> dict[str, Number]:
    factor = number(group.values.get("factor"))
    if factor is None or factor < 1:
        return {}
    usual = 0.1 * math.log(factor) + 1
    given = number(group.values.get("attention_factor"))
    above, below = (number(group.values.get(key)) for key in ("mscale", "mscale_all_dim"))
    read = usual if above is None or below is None else _scaled(above, factor) / _scaled(below, factor)
    return {
        "transformers": read if given is None else given,
        "vLLM, YaRN that reads attn_factor": usual * (number(group.values.get("attn_factor")) or 1.0),
        "llama.cpp": usual,
    }


def _scaled(mscale: float, factor: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1


def _longrope(written: Written, group: Group) -> dict[str, Number]:
    original, longest = written.original(group), written.longest
    if original is None or longest is None or original < 2 or longest < original:
        return {}
    factor, given = number(group.values.get("factor")), number(group.values.get("attention_factor"))

    def of(ratio: float) -> float:
        return math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0

    ratio = longest / original
    return {
        "transformers": of(factor or ratio) if given is None else given,
        "vLLM": number(group.values.get("long_mscale")) or of(ratio),
    }


def dynamic(rules: Mapping[str | None, Frequencies], length: int) -> Iterator[Finding]:
    """Dynamic NTK: one base in engines that compute it once, none where the length is below the trained one."""
    for rule in rules.values():
        if not isinstance(rule, DynamicNTK):
            continue
        n = 64
        follows, once = (rule.at(at, n) for at in (length, round(rule.original_length * rule.factor)))
        unclamped = rule.factor * length / rule.original_length - (rule.factor - 1)
        if unclamped <= 0:
            yield Finding(
                check="dynamic",
                severity="warning",
                said="dynamic's formula gives no base at this length in an engine that does not stop at the trained "
                "one: its stretch is not above 0",
                evidence={"length": length, "trained length": rule.original_length, "stretch": unclamped},
                remedy="serve such lengths without scaling, or where the stretch is kept at 1 and above",
                by_hand="nothing in the config is wrong",
            )
        ratio = getattr(once, "base", 1.0) / getattr(follows, "base", 1.0)
        if not math.isclose(ratio, 1.0):
            yield Finding(
                check="dynamic",
                severity="warning",
                said="engines read dynamic differently: transformers' base follows the length served, vLLM's is "
                "that of factor x trained length always",
                evidence={
                    "length": length,
                    "base, transformers": getattr(follows, "base", None),
                    "base, vLLM": getattr(once, "base", None),
                },
                remedy="write the base for the length you serve as a default rule, which every engine reads alike",
                by_hand="it depends on the length",
            )


def short_inputs(rules: Mapping[str | None, Frequencies], length: int) -> Iterator[Finding]:
    """A static rule scales inputs too that need no scaling."""
    for layer, rule in rules.items():
        if isinstance(rule, YaRN) and rule.factor > 1 and length <= rule.original_length:
            yield Finding(
                check="short inputs",
                severity="warning",
                said="yarn scales though every input fits the original length"
                + ("" if layer is None else f" ({layer})"),
                evidence={
                    "length": length,
                    "original length": rule.original_length,
                    "factor of scores": rule.attention_factor(1) ** 2,
                    "slow rates divided by": rule.factor,
                },
                remedy="serve without scaling, unless the checkpoint was trained with it; switch it on for inputs "
                "that need it",
                by_hand="whether the checkpoint was trained with it is not in the config",
            )
        if isinstance(rule, Linear | YaRN | LongRoPE) and rule.factor == 1:
            yield Finding(
                check="short inputs",
                severity="note",
                said=f"{rule.kind} has the factor 1 and scales nothing",
                evidence={"factor": 1.0},
                remedy="write default, or the factor that was meant",
                by_hand="which was meant is not in the config",
            )
