"""How far every scaling rule is from transformers' own function: largest relative difference per rule.

Two columns: against the function as it is, which computes in float32, and against the same code run in
float64. The first is transformers' own rounding, the second that of two float64 computations of one formula.

    python -m experiments.compare_with_transformers --out results/frequencies/transformers.json
"""

import argparse
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, modeling_rope_utils
from transformers.models.glm4 import modeling_glm4

from phasewise.frequencies import (
    DynamicNTK,
    Frequencies,
    Geometric,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)
from phasewise.frequencies_hf import RopeSettings, to_hf
from phasewise.record import record

SEED = 0
HEAD_DIMS = (8, 16, 64, 80, 128, 256)
BASES = (100.0, 10_000.0, 500_000.0, 100_000_000.0)
FACTORS = (1.0, 1.5, 8.0, 64.0)
ORIGINAL_LENGTHS = (4, 64, 4096, 10_000_000)
FRACTIONS = (0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Case:
    rule: Frequencies
    head_dim: int
    fraction: float = 1.0
    length: int | None = None

    @property
    def settings(self) -> RopeSettings:
        return RopeSettings.model_validate({"frequencies": self.rule, "fraction": self.fraction})

    @property
    def channels(self) -> int:
        return self.settings.channels(self.head_dim)


def cases() -> Iterator[Case]:
    """Every rule that transformers has, at ordinary and extreme settings."""
    for head_dim, base, fraction in product(HEAD_DIMS, BASES, FRACTIONS):
        yield Case(Geometric(base=base), head_dim, fraction)
        yield Case(Proportional(base=base, fraction=fraction, factor=1.0), head_dim)
        yield Case(Proportional(base=base, fraction=fraction / 3, factor=8.0), head_dim)
        for factor in FACTORS:
            yield Case(Linear(base=base, factor=factor), head_dim, fraction)
    yield from length_dependent()
    for head_dim, base, factor, original in product(HEAD_DIMS, BASES, FACTORS, ORIGINAL_LENGTHS):
        yield Case(Llama3(base=base, factor=factor, original_length=original), head_dim)
        for truncate in (True, False):
            yield Case(YaRN(base=base, factor=factor, original_length=original, truncate=truncate), head_dim)
    for fraction, (fast, slow) in product(FRACTIONS, ((32, 1), (64.0, 0.5), (1.5, 1.25))):
        turns = {"low_freq_factor": slow, "high_freq_factor": fast}
        yield Case(Llama3(base=5e5, factor=8.0, original_length=8192, **turns), 64, fraction)
        for truncate in (True, False):
            betas = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate}
            yield Case(YaRN(base=1e4, factor=4.0, original_length=4096, **betas), 64, fraction)
    for factor, attention, pair in product(
        FACTORS, (None, 1.0, 1.3), ((None, None), (1.0, 1.0), (0.707, 1.2))
    ):
        weights = {"attention": attention, "mscale": pair[0], "mscale_all_dim": pair[1]}
        yield Case(YaRN(base=1e4, factor=factor, original_length=4096, **weights), 64)


def length_dependent() -> Iterator[Case]:
    draw = random.Random(SEED)
    for head_dim, base, factor, original in product(HEAD_DIMS, BASES, FACTORS, ORIGINAL_LENGTHS):
        rule = DynamicNTK(base=base, factor=factor, original_length=original)
        for length in (original // 2, original, original + 1, 5 * original):
            yield Case(rule, head_dim, length=length)
        lists = {
            name: [draw.uniform(1, most) for _ in range(head_dim // 2)]
            for name, most in (("short_factor", 1.5), ("long_factor", 64.0))
        }
        for attention, length in product((None, 1.19), (original, original + 1)):
            longrope = LongRoPE(
                base=base, original_length=original, factor=factor, attention=attention, **lists
            )
            yield Case(longrope, head_dim, length=length)
    for fraction in FRACTIONS[1:]:
        yield Case(DynamicNTK(base=1e4, factor=2.0, original_length=2048), 64, fraction, 6000)


@contextmanager
def in_float64() -> Iterator[None]:
    """transformers' rope functions name float32 everywhere; here they get float64 instead."""

    class Doubled:
        float = float32 = torch.float64

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

    with ExitStack() as patches:
        for module in (modeling_rope_utils, modeling_glm4):
            patches.enter_context(patch.object(module, "torch", Doubled()))
        patches.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def ours(case: Case) -> tuple[Tensor, float]:
    return (
        case.rule.rates(case.channels, length=case.length),
        case.rule.attention_factor(case.channels, length=case.length),
    )


def theirs(case: Case) -> tuple[Tensor, float]:
    """transformers' rates, in whichever precision it computes, and its attention factor."""
    written = {"max_position_embeddings": 4096, **to_hf(case.settings)}
    config = LlamaConfig(
        hidden_size=2 * case.head_dim, num_attention_heads=2, head_dim=case.head_dim, **written
    )
    name = config.rope_parameters["rope_type"]
    if name == "default":
        return modeling_glm4.Glm4RotaryEmbedding.compute_default_rope_parameters(config)
    return modeling_rope_utils.ROPE_INIT_FUNCTIONS[name](config, seq_len=case.length)


def relative(value: Tensor, reference: Tensor) -> Tensor:
    """|value / reference - 1| by channel, 0 where both are 0."""
    difference = (value.double() - reference).abs()
    return torch.where(difference == 0, 0.0, difference / reference.abs())


def differences() -> dict[str, dict[str, float]]:
    """By rule: number of cases, largest relative difference of a rate (float32, float64), of a factor."""
    found: dict[str, dict[str, float]] = {}
    for case in cases():
        rates, factor = ours(case)
        as_it_is, their_factor = theirs(case)
        with in_float64():
            exact, _ = theirs(case)
        row = found.setdefault(case.rule.kind, {"cases": 0, "float32": 0.0, "float64": 0.0, "factor": 0.0})
        row["cases"] += 1
        row["float32"] = max(row["float32"], relative(as_it_is, rates).max().item())
        row["float64"] = max(row["float64"], relative(exact, rates).max().item())
        row["factor"] = max(row["factor"], abs(their_factor / factor - 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="also write the table to this JSON file")
    out = parser.parse_args().out
    transformers.logging.set_verbosity_error()
    found = differences()
    print(f"{'rule':<14}{'cases':>7}{'float32':>12}{'float64':>12}{'factor':>12}")
    for kind, row in found.items():
        print(
            f"{kind:<14}{row['cases']:>7}{row['float32']:>12.1e}{row['float64']:>12.1e}{row['factor']:>12.1e}"
        )
    if out:
        recipe = {
            "command": "python -m experiments.compare_with_transformers",
            "seeds": [SEED],
            "head_dims": HEAD_DIMS,
            "bases": BASES,
            "factors": FACTORS,
            "original_lengths": ORIGINAL_LENGTHS,
            "fractions": FRACTIONS,
        }
        record(out, recipe=recipe, values=found)


if __name__ == "__main__":
    main()
