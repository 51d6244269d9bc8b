"""Every scaling rule against its formula restated in loops, against transformers, and by what all share."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from experiments import compare_with_transformers as comparison
from phasewise.frequencies import (
    NTK,
    AnyFrequencies,
    DynamicNTK,
    DynamicYaRN,
    Explicit,
    Frequencies,
    Geometric,
    Linear,
    Llama3,
    LongRoPE,
    Proportional,
    YaRN,
)

transformers.logging.set_verbosity_error()
CASES: dict[str, list[comparison.Case]] = {}
for found in comparison.cases():
    CASES.setdefault(found.rule.kind, []).append(found)


def turns(channel: float, base: float, n: int, length: int) -> float:
    """Full turns of a channel, not necessarily a whole one, within `length` positions."""
    return length * base ** (-channel / n) / (2 * math.pi)


def channel_turning(times: float, base: float, n: int, length: int) -> float:
    """The real-valued channel that turns `times` times within `length`: turns(channel) = times, solved."""
    channel = n * (math.log(length) - math.log(2 * math.pi * times)) / math.log(base)
    assert math.isclose(turns(channel, base, n, length), times, rel_tol=1e-9)
    return channel


def restated(rule: Frequencies, n: int, length: int | None) -> list[float]:
    """The rates by their formulas, one channel at a time."""
    if isinstance(rule, Explicit):
        return list(rule.values)
    plain = [math.exp(-math.log(rule.base) * i / n) for i in range(n)]
    match rule:
        case Geometric():
            return plain
        case Linear():
            return [rate / rule.factor for rate in plain]
        case NTK():
            return [rate / rule.factor ** (i / (n - 1)) for i, rate in enumerate(plain)]
        case DynamicNTK():
            served = max(length, rule.original_length)
            stretch = rule.factor * served / rule.original_length - (rule.factor - 1)
            return [rate / stretch ** (i / (n - 1)) for i, rate in enumerate(plain)]
        case YaRN() | DynamicYaRN():
            factor = rule.factor if isinstance(rule, YaRN) else max(1, length / rule.original_length)
            low = channel_turning(rule.beta_fast, rule.base, n, rule.original_length)
            high = channel_turning(rule.beta_slow, rule.base, n, rule.original_length)
            if rule.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, 2 * n - 1)
            rates = []
            for i, rate in enumerate(plain):
                share = (i - low) / (high - low) if high != low else math.inf * (i - low) if i != low else 0
                share = min(max(share, 0), 1)
                rates.append(share * rate / factor + (1 - share) * rate)
            return rates
        case LongRoPE():
            divisors = rule.short_factor if length <= rule.original_length else rule.long_factor
            return [rate / divisor for rate, divisor in zip(plain, divisors, strict=True)]
        case Llama3():
            rates = []
            for rate in plain:
                wavelength = 2 * math.pi / rate
                if wavelength < rule.original_length / rule.high_freq_factor:
                    rates.append(rate)
                elif wavelength > rule.original_length / rule.low_freq_factor:
                    rates.append(rate / rule.factor)
                else:
                    smooth = rule.original_length / wavelength - rule.low_freq_factor
                    smooth /= rule.high_freq_factor - rule.low_freq_factor
                    rates.append((1 - smooth) * rate / rule.factor + smooth * rate)
            return rates
        case Proportional():
            return [
                rate / rule.factor if i < math.floor(rule.fraction * n) else 0 for i, rate in enumerate(plain)
            ]
    raise AssertionError(rule)


def close(value: torch.Tensor, wanted: list[float], tolerance: float) -> bool:
    return torch.allclose(value, torch.tensor(wanted, dtype=torch.float64), rtol=tolerance, atol=0)


OURS_ALONE = [
    *(NTK(base=1e4, factor=factor) for factor in (1.0, 1.5, 32.0)),
    *(
        DynamicYaRN(base=base, original_length=length, truncate=truncate)
        for base in (1e3, 5e5)
        for length in (64, 32_768)
        for truncate in (True, False)
    ),
]


@pytest.mark.parametrize("kind", CASES)
def test_rates_equal_the_formula_restated_in_float64(kind):
    # log, exp and the ramp's ends are rounded differently; a factor of 64 enlarges what a ramp leaves.
    for case in CASES[kind][::7]:
        rates = case.rule.rates(case.channels, length=case.length)
        assert close(rates, restated(case.rule, case.channels, case.length), 1e-12), case


@pytest.mark.parametrize("base", [1.0001, 10_000.0, 500_000.0])
@pytest.mark.parametrize("n", [1, 2, 3, 64, 1000])
def test_rates_are_exact_powers_up_to_the_rounding_of_their_exponents(base, n):
    for i, rate in enumerate(Geometric(base=base).rates(n).tolist()):
        exact = Decimal(base) ** (Decimal(-i) / n)
        assert abs(float(Decimal(rate) / exact - 1)) < (1 + math.log(base)) * 2**-52


@pytest.mark.parametrize("rule", OURS_ALONE, ids=repr)
def test_rules_that_transformers_lacks_equal_their_formula(rule):
    for n, length in ((2, 64), (8, 65), (64, 4096), (128, 10_000_000)):
        assert close(rule.rates(n, length=length), restated(rule, n, length), 1e-12)


@pytest.mark.parametrize("kind", CASES)
def test_rates_equal_transformers_own_function(kind):
    for case in CASES[kind]:
        rates, factor = comparison.ours(case)
        as_it_is, their_factor = comparison.theirs(case)
        with comparison.in_float64():
            exact, _ = comparison.theirs(case)
        assert factor == their_factor, case
        assert exact.dtype == torch.float64
        assert comparison.relative(exact, rates).max() < 1e-14, case
        # In float32 the exponent's rounding is multiplied by ln(base), and where a ramp nearly reaches rate /
        # factor, by factor; a handful of roundings besides.
        enlarged = case.rule.factor if isinstance(case.rule, YaRN | Llama3) else 1
        bound = 2**-24 * (math.log(case.rule.base) + 8) * enlarged
        assert comparison.relative(as_it_is, rates).max() < bound, case


def test_attention_factor_is_the_given_one_else_the_mscale_ratio_else_the_logarithm():
    yarn = {"base": 1e4, "original_length": 4096}
    assert YaRN(factor=64.0, **yarn).attention_factor(64) == pytest.approx(1.4159, abs=1e-4)
    assert YaRN(factor=16.0, mscale=1.0, mscale_all_dim=1.0, **yarn).attention_factor(64) == 1.0
    ratio = (0.1 * 0.707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    assert YaRN(factor=40.0, mscale=0.707, mscale_all_dim=1.0, **yarn).attention_factor(64) == ratio
    given = YaRN(factor=40.0, mscale=0.707, mscale_all_dim=1.0, attention=1.25, **yarn)
    assert given.attention_factor(64) == 1.25
    lists = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_length": 4096}
    phi = LongRoPE(base=1e4, factor=32.0, **lists)
    assert (
        phi.attention_factor(48, length=1) == phi.attention_factor(48, length=4097) == math.sqrt(1 + 5 / 12)
    )
    assert LongRoPE(base=1e4, attention=1.1, **lists).attention_factor(48, length=9) == 1.1


@pytest.mark.parametrize(
    ("base", "length", "kept", "interpolated"),
    [(1e6, 32_768, 23, 40), (1e4, 4096, 20, 46), (5e5, 8192, 18, 35)],
    ids=["Qwen3", "LLaMA-2", "LLaMA-3"],
)
def test_yarn_ramp_of_known_models_starts_and_ends_where_published(base, length, kept, interpolated):
    plain = Geometric(base=base).rates(64)
    change = YaRN(base=base, factor=4.0, original_length=length).rates(64) / plain
    assert (change[: kept + 1] == 1).all()
    assert (change[kept + 1] < 1).all()
    assert change[interpolated - 1] > 0.25
    assert (change[interpolated:] == 0.25).all()


def test_llama3_first_changes_pair_29_and_interpolates_from_pair_35():
    change = Llama3(base=5e5, factor=8.0, original_length=8192).rates(64) / Geometric(base=5e5).rates(64)
    assert (change[:29] == 1).all()
    assert change[29] < 1
    assert change[34] > 1 / 8
    assert (change[35:] == 1 / 8).all()


def test_proportional_keeps_the_fast_rates_where_partial_rotation_respaces_them():
    proportional, whole = Proportional(base=1e4, fraction=0.25).rates(64), Geometric(base=1e4).rates(64)
    assert torch.equal(proportional[:16], whole[:16])
    assert (proportional[16:] == 0).all()
    partial = Geometric(base=1e4).rates(16)
    assert partial[15] < 0.01 * proportional[15]


BASE = st.floats(1.5, 1e9)
FACTOR = st.floats(1, 256)
LENGTH = st.integers(1, 10_000_000)
CHANNELS = st.integers(2, 160)
BETAS = st.tuples(st.floats(0.1, 64), st.floats(1.01, 100)).map(
    lambda pair: {"beta_slow": pair[0], "beta_fast": pair[0] * pair[1]}
)


@st.composite
def scaled(draw) -> Frequencies:
    """A rule that divides rates by at most its factor."""
    base, factor, length = draw(BASE), draw(FACTOR), draw(LENGTH)
    low, ratio = draw(st.floats(0.1, 8)), draw(st.floats(1.01, 16))
    rules = [
        Linear(base=base, factor=factor),
        NTK(base=base, factor=factor),
        YaRN(base=base, factor=factor, original_length=length, truncate=draw(st.booleans()), **draw(BETAS)),
        Llama3(
            base=base,
            factor=factor,
            original_length=length,
            low_freq_factor=low,
            high_freq_factor=low * ratio,
        ),
    ]
    return draw(st.sampled_from(rules))


@st.composite
def dynamic(draw) -> DynamicNTK | DynamicYaRN:
    base, length = draw(BASE), draw(LENGTH)
    rules = [
        DynamicNTK(base=base, factor=draw(FACTOR), original_length=length),
        DynamicYaRN(base=base, original_length=length, truncate=draw(st.booleans()), **draw(BETAS)),
    ]
    return draw(st.sampled_from(rules))


@settings(deadline=None)
@given(scaled(), CHANNELS)
def test_scaled_rates_descend_between_the_base_rates_and_those_over_factor(rule, n):
    plain, rates = Geometric(base=rule.base).rates(n), rule.rates(n)
    rounding = 1e-12
    assert (rates <= plain * (1 + rounding)).all()
    assert (rates >= plain / rule.factor * (1 - rounding)).all()
    assert (rates.diff() <= rates[:-1] * rounding).all()


@settings(deadline=None)
@given(scaled(), CHANNELS)
def test_a_factor_of_one_changes_nothing(rule, n):
    same = rule.model_copy(update={"factor": 1.0})
    assert torch.equal(same.rates(n), Geometric(base=rule.base).rates(n))
    assert same.attention_factor(n) == 1


@settings(deadline=None)
@given(dynamic(), CHANNELS, LENGTH)
def test_dynamic_rules_are_the_trained_ones_up_to_the_original_length_and_slower_beyond(rule, n, length):
    plain, rates = Geometric(base=rule.base).rates(n), rule.rates(n, length=length)
    if length <= rule.original_length:
        assert torch.equal(rates, plain)
        assert rule.attention_factor(n, length=length) == 1
    assert (rates <= plain).all()
    assert (rates > 0).all()


@settings(deadline=None)
@given(dynamic(), CHANNELS, LENGTH)
def test_the_rule_at_a_length_is_static_and_has_the_rates_of_that_length(rule, n, length):
    fixed = rule.at(length, n)
    assert not fixed.depends_on_length
    assert torch.equal(fixed.rates(n), rule.rates(n, length=length))
    assert fixed.attention_factor(n) == rule.attention_factor(n, length=length)
    assert fixed.at(length + 1, n) is fixed


def longrope(**changes) -> LongRoPE:
    fields = {"base": 1e4, "short_factor": [1.0, 1.1], "long_factor": [1.0, 8.0], "original_length": 4096}
    return LongRoPE(**{**fields, "factor": 8.0, **changes})


def test_longrope_switches_between_the_original_length_and_the_next():
    rule = longrope()
    short, long = (rule.rates(2, length=length) for length in (4096, 4097))
    assert close(short, [1, 0.01 / 1.1], 1e-15)
    assert close(long, [1, 0.01 / 8], 1e-15)
    assert rule.regimes == ((1, 4096), (4097, None))
    assert torch.equal(rule.rates(2, length=1), short)
    assert torch.equal(rule.rates(2, length=1_000_000), long)
    assert torch.equal(rule.at(4097, 2).rates(2), long)
    assert rule.at(4097, 2).attention_factor(2) == rule.attention_factor(2, length=4097)


def test_regimes_tell_constant_rates_from_continuous_ones():
    assert Geometric(base=1e4).regimes == ((1, None),)
    assert DynamicNTK(base=1e4, factor=2.0, original_length=8).regimes is None
    assert DynamicYaRN(base=1e4, original_length=8).regimes is None


EVERY_RULE = [
    Geometric(base=1e4),
    Linear(base=1e4, factor=2.0),
    NTK(base=1e4, factor=2.0),
    DynamicNTK(base=1e4, factor=2.0, original_length=64),
    YaRN(base=1e4, factor=2.0, original_length=64, mscale=0.7, mscale_all_dim=1.1, truncate=False),
    DynamicYaRN(base=1e4, original_length=64, attention=1.25),
    longrope(),
    Llama3(base=5e5, factor=8.0, original_length=8192),
    Proportional(base=1e4, fraction=0.5),
    Explicit(values=[0.5, 0.1], attention=1.1),
]


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.kind)
def test_every_rule_is_frozen_hashable_and_survives_json(rule):
    adapter = TypeAdapter(AnyFrequencies)
    again = adapter.validate_json(adapter.dump_json(rule))
    assert again == rule
    assert hash(again) == hash(rule)
    assert torch.equal(again.rates(2, length=100), rule.rates(2, length=100))
    with pytest.raises(ValidationError, match="frozen"):
        rule.kind = "other"


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.kind)
def test_rates_are_float64_on_the_device_asked_for_whatever_the_default_dtype(rule):
    assert rule.rates(2, length=100, device="meta").device.type == "meta"
    wanted, default = rule.rates(2, length=100), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        rates = rule.rates(2, length=100)
    finally:
        torch.set_default_dtype(default)
    assert rates.dtype == torch.float64
    assert torch.equal(rates, wanted)


NEEDED = {"base": 1e4, "factor": 2.0, "original_length": 4096}


@pytest.mark.parametrize(
    ("rule", "fields", "message"),
    [
        (Geometric, {"base": 1.0}, "base is 1.0; give a finite base above 1"),
        (Geometric, {"base": math.nan}, "base is nan"),
        (Geometric, {"base": math.inf}, "base is inf"),
        (Geometric, {"base": "10000"}, "base.*valid number"),
        (Geometric, {}, "Geometric is missing base; it takes"),
        (Geometric, {"base": 1e4, "theta": 1e4}, "theta is not permitted; Geometric takes kind, base"),
        (Linear, {"base": 1e4, "factor": 0.5}, r"factor is 0.5; give wanted / original length"),
        (NTK, {"base": 1e4, "factor": math.inf}, "factor is inf"),
        (DynamicNTK, {"base": 1e4, "factor": 2.0}, "DynamicNTK is missing original_length"),
        (YaRN, {"base": 1e4, "factor": 2.0}, "YaRN is missing original_length"),
        (YaRN, {**NEEDED, "factor": 0.99}, "factor is 0.99"),
        (YaRN, {**NEEDED, "original_length": 0}, "original_length is 0; give the number of positions"),
        (YaRN, {**NEEDED, "original_length": 4096.5}, "original_length.*valid integer"),
        (YaRN, {**NEEDED, "beta_fast": 1.0}, "beta_fast is 1.0 and beta_slow 1.0; .* the larger"),
        (YaRN, {**NEEDED, "mscale": 0.7}, "mscale is 0.7 and mscale_all_dim None; .* give both or neither"),
        (YaRN, {**NEEDED, "attention": 0.0}, "attention is 0.0; give a finite number above 0"),
        (DynamicYaRN, {"base": 1e4, "original_length": 64, "factor": 2.0}, "factor.*not permitted"),
        (Llama3, {**NEEDED, "low_freq_factor": 4.0}, "high_freq_factor is 4.0 and low_freq_factor 4.0"),
        (Proportional, {"base": 1e4, "fraction": 1.5}, "fraction is 1.5; give a share of the channels"),
        (Explicit, {"values": []}, r"values is \(\); list finite radians"),
        (Explicit, {"values": [1.0, -0.5]}, r"values is \(1.0, -0.5\)"),
        (Explicit, {"values": [1.0, math.nan]}, "values is .*nan"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_the_remedy(rule, fields, message):
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        rule(**fields)


FURTHEST = {"base": 1e100, "factor": 2.0**62, "original_length": 1}


@pytest.mark.parametrize(
    "rule",
    [
        Geometric(base=1e308),
        Linear(base=1e308, factor=2.0**62),
        NTK(base=1e100, factor=2.0**62),
        DynamicNTK(**FURTHEST),
        YaRN(**FURTHEST, mscale=1e100, mscale_all_dim=1e-100, beta_fast=1e100, beta_slow=1e-100),
        YaRN(**{**FURTHEST, "original_length": 2**62}, attention=1e100),
        DynamicYaRN(base=1e308, original_length=1),
        LongRoPE(**{**FURTHEST, "original_length": 2}, short_factor=[1e100] * 2, long_factor=[1e-100] * 2),
        Llama3(**{**FURTHEST, "original_length": 2**62}, low_freq_factor=1e-100, high_freq_factor=1e100),
        Proportional(base=1e308, fraction=1.0, factor=2.0**62),
        Explicit(values=[1e100, 0.0], attention=1e100),
    ],
)
def test_the_furthest_settings_give_finite_rates_and_what_lies_beyond_is_refused(rule):
    for length in (1, 2, 2**62):
        assert rule.rates(2, length=length).isfinite().all()
        assert math.isfinite(rule.attention_factor(2, length=length) ** 2)
    with pytest.raises(ValueError, match=r"length is .*from 1 to 2\^62"):
        rule.rates(2, length=2**62 + 1)
    for name, value in rule:
        if isinstance(value, tuple | float | int) and not isinstance(value, bool) and name != "fraction":
            beyond = (
                (math.inf,) * 2
                if isinstance(value, tuple)
                else math.inf
                if isinstance(value, float)
                else 2**63
            )
            with pytest.raises(ValueError, match=f"{name} is .*; (give|list)"):
                type(rule)(**{**dict(rule), name: beyond})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"long_factor": [1.0]}, "short_factor lists 2 channels, long_factor 1"),
        ({"long_factor": [1.0, 0.0]}, r"long_factor is \(1.0, 0.0\); list one finite number above 0"),
        ({"factor": None}, "LongRoPE is missing factor; give longest length / original_length"),
        ({"original_length": 1}, "original_length is 1, .* give attention"),
    ],
)
def test_longrope_refuses_lists_and_factors_it_cannot_use(changes, message):
    with pytest.raises(ValueError, match=message):
        longrope(**changes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Geometric(base=1e4).rates(0), "n is 0; give the number of channels"),
        (lambda: Geometric(base=1e4).rates(2.0), "n is 2.0"),
        (lambda: Geometric(base=1e4).rates(True), "n is True"),
        (lambda: NTK(base=1e4, factor=2.0).rates(1), "n is 1; .* use 2 or more, or Linear"),
        (lambda: Explicit(values=[0.5]).rates(2), "Explicit lists 1 channels and n is 2"),
        (lambda: longrope().rates(3, length=1), "LongRoPE lists 2 channels and n is 3"),
        (lambda: longrope().rates(2), "length is None; LongRoPE takes the number of positions served"),
        (lambda: longrope().attention_factor(2), "length is None; LongRoPE"),
        (lambda: DynamicNTK(**NEEDED).rates(2, length=0), "length is 0; DynamicNTK takes"),
        (lambda: Geometric(base=1e4).at(-1, 2), "length is -1; Geometric takes"),
    ],
)
def test_a_call_that_has_no_answer_says_what_would(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("given", [1e4, None, "yarn", [1.0, 0.1], torch.ones(2)], ids=str)
def test_what_stands_in_a_rules_place_is_named_with_what_would(given):
    with pytest.raises(ValueError, match=r"(?s)is no rule; give one, as Geometric\(base=10_000.0\)"):
        TypeAdapter(AnyFrequencies).validate_python(given)


def test_counts_and_lengths_may_be_numpys():
    lengths = np.array([16, 4096])
    rule = DynamicNTK(base=10_000.0, factor=2.0, original_length=lengths[0])
    assert rule == DynamicNTK(base=10_000.0, factor=2.0, original_length=16)
    assert torch.equal(rule.rates(np.int64(4), length=lengths[1]), rule.rates(4, length=4096))


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"(?s)'ropes'.*'geometric'.*'explicit'"):
        TypeAdapter(AnyFrequencies).validate_python({"kind": "ropes", "base": 1e4})


@pytest.mark.parametrize(
    "rule",
    [
        DynamicNTK(base=10_000.0, factor=2.0, original_length=16),
        DynamicYaRN(base=10_000.0, original_length=16),
        DynamicYaRN(base=10_000.0, original_length=4096, attention=1.25),
        DynamicYaRN(base=10_000.0, original_length=4096, mscale=0.7, mscale_all_dim=1.0),
    ],
)
def test_rates_along_lengths_are_those_of_each_length(rule):
    lengths = torch.tensor([[1, 16, 17], [100, 4096, 1_000_000]])
    rates, weights = rule.along(lengths[..., None], 32)
    assert (rates.shape, weights.shape) == ((2, 3, 32), (2, 3, 1))
    for length, found, weight in zip(
        lengths.flatten().tolist(), rates.view(6, 32), weights.flatten(), strict=True
    ):
        torch.testing.assert_close(found, rule.rates(32, length=length), rtol=1e-14, atol=0.0)
        assert weight.item() == pytest.approx(rule.attention_factor(32, length=length), rel=1e-14)
