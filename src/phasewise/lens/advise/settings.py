"""A setting ready to paste, for transformers, vLLM and llama.cpp, or what an engine cannot express.

vLLM: --hf-overrides with rope_parameters (its documentation, "Context extension"). It counts a linear factor
from max_position_embeddings, so that is left as it is there (a factor counted twice serves 8192 tokens for
2048 x 2), and yarn's from the original length; for other rules max_position_embeddings is what it serves. Its
longrope takes the attention factor as short_mscale and long_mscale.
llama.cpp: flags of llama-server and llama-cli. Its yarn multiplies the attention factor by 0.1 ln(factor) + 1
itself. It has no flag for a list of rates: llama3's factors are written into a file when a config with them is
converted, those of longrope for the architectures that have it.
"""

from __future__ import annotations

import json
import math

from phasewise.frequencies import (
    NTK,
    AnyFrequencies,
    DynamicNTK,
    DynamicYaRN,
    Explicit,
    Geometric,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from phasewise.frequencies_hf import RopeSettings, to_hf
from phasewise.hf.settings import listed
from phasewise.lens.spectrum import Values

NO_LIST = (
    "no flag: lists of rates are read from the file, where its converter has written one for the architecture"
)


class Settings(Values):
    """What to paste. Each is None where the engine cannot express it, and `notes` says why, by engine.

    transformers: for config.json, or AutoConfig. vllm, llama_cpp: arguments of the command line.
    phasewise: the rule itself, for a model of this library.
    """

    transformers: dict[str, object] | None
    vllm: str | None
    llama_cpp: str | None
    phasewise: AnyFrequencies
    notes: dict[str, str]


def settings(
    rule: AnyFrequencies, *, head_dim: int, channels: int, trained: int, wanted: int, fraction: float = 1.0
) -> Settings:
    """How to serve `wanted` tokens with the rule, where `trained` were trained on; fraction: of channels that turn.

    >>> from phasewise.frequencies import Linear
    >>> found = settings(Linear(base=1e4, factor=4.0), head_dim=64, channels=32, trained=2048, wanted=8192)
    >>> found.llama_cpp
    '--ctx-size 8192 --rope-scaling linear --rope-freq-base 10000 --rope-freq-scale 0.25'
    """
    written: AnyFrequencies = rule
    notes = {}
    if isinstance(rule, DynamicYaRN):
        static = rule.at(wanted, channels)
        assert isinstance(static, YaRN)
        written = static
        notes["transformers"] = "no rule follows the length as this one does: the YaRN of the wanted length"
    if isinstance(written, Explicit):
        written = listed(written, original_length=trained)
    config = to_hf(RopeSettings(frequencies=written, fraction=fraction), head_dim=head_dim)
    longest = {} if isinstance(written, DynamicNTK) else {"max_position_embeddings": wanted}
    if isinstance(written, YaRN | LongRoPE):
        notes["short inputs"] = "static: also inputs that fit the trained length are served with these rates"
    vllm, refused = _vllm(config, written, wanted)
    if refused:
        notes["vllm"] = refused
    flags, refused = _llama_cpp(written, channels, wanted)
    if refused:
        notes["llama.cpp"] = refused
    return Settings(
        transformers={**config, **longest}, vllm=vllm, llama_cpp=flags, phasewise=rule, notes=notes
    )


def own_settings(rule: AnyFrequencies) -> Settings:
    """For a model of this library, which no other engine serves."""
    said = (
        "a model of this library: give its encoding these frequencies, or continue it with `phasewise extend`"
    )
    return Settings(transformers=None, vllm=None, llama_cpp=None, phasewise=rule, notes={"engines": said})


def _vllm(config: dict[str, object], rule: AnyFrequencies, wanted: int) -> tuple[str | None, str | None]:
    if isinstance(rule, Proportional):
        return None, "vLLM has no rule named proportional"
    parameters = config["rope_parameters"]
    assert isinstance(parameters, dict)
    overrides: dict[str, object] = {"rope_parameters": parameters}
    if isinstance(rule, Geometric | NTK | Llama3):
        overrides["max_position_embeddings"] = wanted
    if isinstance(rule, LongRoPE):
        factor = rule.attention_factor(len(rule.long_factor), length=wanted)
        overrides["rope_parameters"] = {**parameters, "short_mscale": factor, "long_mscale": factor}
        overrides["max_position_embeddings"] = wanted
    return f"--hf-overrides '{json.dumps(overrides)}' --max-model-len {wanted}", None


def _llama_cpp(rule: AnyFrequencies, channels: int, wanted: int) -> tuple[str | None, str | None]:
    size = f"--ctx-size {wanted}"
    if isinstance(rule, NTK):
        rule = rule.geometric(channels)
    match rule:
        case Geometric():
            return f"{size} --rope-scaling none --rope-freq-base {rule.base:.10g}", None
        case Linear():
            scale = f"--rope-freq-base {rule.base:.10g} --rope-freq-scale {1 / rule.factor:.10g}"
            return f"{size} --rope-scaling linear {scale}", None
        case YaRN():
            scale = f"--rope-freq-base {rule.base:.10g} --rope-freq-scale {1 / rule.factor:.10g}"
            own = 0.1 * math.log(rule.factor) + 1
            attention = rule.attention_factor(channels) / own
            extra = "" if math.isclose(attention, 1) else f" --yarn-attn-factor {attention:.10g}"
            ramp = f"--yarn-beta-fast {rule.beta_fast:g} --yarn-beta-slow {rule.beta_slow:g}"
            said = f"{size} --rope-scaling yarn {scale} --yarn-orig-ctx {rule.original_length} {ramp}{extra}"
            return said, None if rule.truncate else "llama.cpp rounds the ramp's ends (truncate)"
        case Llama3():
            return (
                None,
                "no flag: convert the checkpoint with this config, the converter writes llama3's factors",
            )
        case DynamicNTK():
            return None, "no rule follows the length: take the changed base of the wanted length instead"
        case _:
            return None, NO_LIST
