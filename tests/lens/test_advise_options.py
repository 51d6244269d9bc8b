import math

import numpy as np
import pytest
import torch

from phasewise.frequencies import (
    NTK,
    DynamicNTK,
    Explicit,
    Geometric,
    Linear,
    Llama3,
    LongRoPE,
    YaRN,
    changed_base,
)
from phasewise.frequencies_hf import RopeSettings, from_hf
from phasewise.lens.advise.evidence import DataNeed, weigh
from phasewise.lens.advise.grid import fitted, most_turns, share_beyond
from phasewise.lens.advise.options import options
from phasewise.lens.advise.published import correction_range, llama3_range
from phasewise.lens.advise.settings import settings
from phasewise.lens.dependency import Curve, log_spaced
from phasewise.lens.profile import read
from phasewise.lens.width import kernel

FAR = log_spaced(4096)


def need(values, *, input_length=100_000):
    """The need of data whose mutual information at distance r is values(r), nearly without noise."""
    wiggle = 1 + 0.01 * np.random.default_rng(0).standard_normal((32, len(FAR)))
    value = values(FAR.astype(float))
    parts = value / 32 * wiggle / wiggle.mean(0)
    shares = np.full((32, len(FAR)), 1 / 32)
    curve = Curve(FAR, np.full(len(FAR), 10**6), parts, shares, np.zeros(len(FAR)), "documents")
    return DataNeed(read(curve), kernel(curve), input_length)


FLAT, NEAR = need(lambda r: r**-0.5), need(lambda r: np.exp(-r / 20))


def evidence(rule, data=FLAT, *, channels=32, trained=1024, wanted=4096):
    return weigh(rule, channels=channels, trained=trained, wanted=wanted, inspection=None, need=data)


def offered(rule, data=FLAT, **sizes):
    found = options(evidence(rule, data, **sizes))
    return {option.kind: option for option in found}


BASE = Geometric(base=10_000.0)


@pytest.mark.parametrize(
    ("model", "n", "base", "length", "pair"),
    [
        ("LLaMA-2", 64, 1e4, 4096, 46),
        ("LLaMA-3", 64, 5e5, 8192, 35),
        ("Phi-3-mini", 48, 1e4, 2048, 31),
        ("Qwen3", 64, 1e6, 32_768, 40),
        ("Llama-3.1", 64, 5e5, 131_072, 49),
    ],
)
def test_critical_pairs_are_those_published(model, n, base, length, pair):
    assert correction_range(n, base, length)[1] == pair


@pytest.mark.parametrize(
    ("model", "base", "length", "ramp"),
    [
        ("Qwen3", 1e6, 32_768, (23, 40)),
        ("LLaMA-2", 1e4, 4096, (20, 46)),
        ("LLaMA-3", 5e5, 8192, (18, 35)),
    ],
)
def test_correction_ranges_are_those_published(model, base, length, ramp):
    assert correction_range(64, base, length) == ramp


def test_llama3_changes_pairs_from_29_and_in_full_from_35():
    assert llama3_range(64, 5e5, 8192) == (29, 35)
    kept = Geometric(base=5e5).rates(64)
    slowed = kept / Llama3(base=5e5, factor=8.0, original_length=8192).rates(64)
    assert (slowed > 1 + 1e-9).nonzero()[0].item() == 29
    assert (slowed > 8 - 1e-9).nonzero()[0].item() == 35


def test_changed_base_keeps_the_critical_pair():
    new = changed_base(1e4, 4096, 32_768)
    assert correction_range(64, new.base, 32_768)[1] == correction_range(64, 1e4, 4096)[1] == 46


def test_grid_keeps_what_turned_where_nothing_lies_beyond_and_never_shows_a_new_phase():
    rates = BASE.rates(32).numpy()
    for kept_from in (1.0, 4.0, 32.0):
        grid = fitted(rates, trained=1024, wanted=4096, kept_from=kept_from)
        slow = rates * 1024 < 2 * math.pi
        assert np.allclose(grid[slow] * 4096, rates[slow] * 1024)
        assert (grid <= rates).all()
        assert (grid >= rates / 4 - 1e-15).all()
        assert (np.diff(grid) < 0).all()
    kept = fitted(rates, trained=1024, wanted=4096, kept_from=1.0)
    assert np.array_equal(kept[~slow], rates[~slow])


def test_grid_slows_more_rates_the_more_lies_beyond_the_trained_length():
    flat, near = evidence(BASE, FLAT).beyond, evidence(BASE, NEAR).beyond
    assert near < 0.01 < 0.2 < flat
    assert share_beyond(np.ones(400), trained=400, wanted=400) == 0
    rates = BASE.rates(32).numpy()
    less, more = (
        fitted(rates, trained=1024, wanted=4096, kept_from=most_turns(share)) for share in (near, flat)
    )
    assert (less < rates).sum() < (more < rates).sum()


def test_what_hides_in_the_noise_is_not_taken_for_nothing():
    hidden = FLAT.profile.width.model_copy(update={"kind": "hidden", "hidden": 0.9})
    noisy = DataNeed(FLAT.profile.model_copy(update={"width": hidden}), FLAT.kernel, FLAT.input_length)
    assert evidence(BASE, noisy).beyond is None
    grid = offered(BASE, noisy)["fitted grid"]
    assert "not known: up to 90% of them may hide" in grid.reasons[0]
    slowed = BASE.rates(32).numpy() / np.array(grid.rates)
    turns = BASE.rates(32).numpy() * 1024 / (2 * math.pi)
    assert (slowed[turns > 4] == 1).all()
    assert (slowed[turns < 4] > 1).all()


def test_published_settings_are_formed_with_the_factor_relative_to_the_trained_length():
    found = offered(BASE)
    assert found["PI"].rule == Linear(base=1e4, factor=4.0)
    assert found["NTK"].rule == NTK(base=1e4, factor=4.0)
    assert found["YaRN"].rule == YaRN(base=1e4, factor=4.0, original_length=1024)
    assert found["Llama3-style"].rule == Llama3(base=1e4, factor=4.0, original_length=1024)
    assert found["leave alone"].rule == BASE
    assert "factor 4 = 4096 / 1024" in found["PI"].reasons[0]


@pytest.mark.parametrize(
    ("rule", "stretched"),
    [
        (
            Llama3(base=5e5, factor=8.0, original_length=128),
            Llama3(base=5e5, factor=32.0, original_length=128),
        ),
        (YaRN(base=1e4, factor=4.0, original_length=256), YaRN(base=1e4, factor=16.0, original_length=256)),
        (Linear(base=1e4, factor=2.0), Linear(base=1e4, factor=8.0)),
    ],
    ids=lambda rule: rule.kind,
)
def test_native_scaling_is_stretched_from_its_own_base_and_never_overwritten(rule, stretched):
    found = offered(rule)
    assert found["own scaling stretched"].rule == stretched
    for kind in ("PI", "NTK", "base change", "YaRN", "Llama3-style"):
        assert found[kind].rule is None
        assert f"own {rule.kind} scaling would be overwritten" in found[kind].refused
    grid = found["fitted grid"].rule
    native = rule.rates(32)
    assert (grid.rates(32) <= native).all()
    assert grid.attention == pytest.approx(rule.attention_factor(32) * (0.1 * math.log(4) + 1))


def test_scaling_that_follows_the_length_is_no_native_scaling():
    found = offered(DynamicNTK(base=1e4, factor=2.0, original_length=1024))
    assert found["YaRN"].rule == YaRN(base=1e4, factor=4.0, original_length=1024)
    assert found["leave alone"].rates != tuple(BASE.rates(32).tolist())


def test_yarn_is_refused_and_leaving_alone_first_where_95_percent_of_the_inputs_fit():
    fits = need(lambda r: r**-0.5, input_length=900)
    found = options(evidence(BASE, fits))
    assert found[0].kind == "leave alone"
    assert found[0].confidence == "high"
    yarn = next(option for option in found if option.kind == "YaRN")
    assert "at most 900 tokens" in yarn.refused
    assert yarn.rank is None


def test_prediction_names_unseen_phases_and_lost_resolution():
    share = np.full(32, 1 / 32)
    known = evidence(BASE).model_copy(update={"share": tuple(share.tolist())})
    found = {option.kind: option for option in options(known)}
    slow = sum(rate * 1024 < 2 * math.pi for rate in known.rates) / 32
    assert found["leave alone"].unseen == pytest.approx(slow)
    assert found["leave alone"].coarsened == 0
    assert found["PI"].unseen == pytest.approx(0, abs=1e-9)
    assert found["PI"].coarsened == pytest.approx(1 - slow)
    assert found["fitted grid"].unseen == pytest.approx(0, abs=1e-9)
    assert found["PI"].rank > found["fitted grid"].rank


def test_rates_listed_one_by_one_are_interpolated_and_fitted():
    rule = Explicit(values=tuple(BASE.rates(8).tolist()), attention=1.1)
    found = offered(rule, channels=8)
    assert found["PI"].rule.values == tuple((BASE.rates(8) / 4).tolist())
    assert found["PI"].rule.attention == 1.1
    assert found["fitted grid"].refused is None


RULES = [
    BASE,
    Linear(base=1e4, factor=4.0),
    NTK(base=1e4, factor=4.0),
    YaRN(base=1e4, factor=4.0, original_length=1024),
    Llama3(base=1e4, factor=4.0, original_length=1024),
    Explicit(values=tuple((BASE.rates(32) / 2).tolist()), attention=1.2),
]


def pasted(rule):
    return settings(rule, head_dim=64, channels=32, trained=1024, wanted=4096)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_config_to_paste_reads_back_as_the_rates_it_stands_for(rule):
    found = from_hf(pasted(rule).transformers)
    assert isinstance(found, RopeSettings)
    read_back = found.frequencies.at(4096, 32)
    assert torch.allclose(read_back.rates(32), rule.rates(32), rtol=1e-12)
    assert read_back.attention_factor(32) == pytest.approx(rule.attention_factor(32))


def test_vllm_is_not_told_a_linear_factor_twice():
    said = pasted(Linear(base=1e4, factor=4.0)).vllm
    assert "max_position_embeddings" not in said
    assert '"factor": 4.0' in said
    assert said.endswith("--max-model-len 4096")
    assert '"max_position_embeddings": 4096' in pasted(BASE).vllm


def test_vllm_gets_the_attention_factor_of_a_list_as_its_mscales():
    said = pasted(RULES[-1]).vllm
    assert '"short_mscale": 1.2, "long_mscale": 1.2' in said
    assert '"rope_type": "longrope"' in said


@pytest.mark.parametrize(
    ("rule", "flags"),
    [
        (NTK(base=1e4, factor=4.0), f"--rope-scaling none --rope-freq-base {1e4 * 4 ** (32 / 31):.10g}"),
        (
            YaRN(base=1e4, factor=4.0, original_length=1024),
            "--rope-scaling yarn --rope-freq-base 10000 --rope-freq-scale 0.25 --yarn-orig-ctx 1024 "
            "--yarn-beta-fast 32 --yarn-beta-slow 1",
        ),
        (
            YaRN(base=1e4, factor=4.0, original_length=1024, attention=1.0),
            f"--yarn-attn-factor {1 / (0.1 * math.log(4) + 1):.10g}",
        ),
    ],
)
def test_llama_cpp_gets_flags_that_amount_to_the_rule(rule, flags):
    assert flags in pasted(rule).llama_cpp


@pytest.mark.parametrize(
    "rule",
    [
        RULES[-1],
        Llama3(base=1e4, factor=4.0, original_length=1024),
        LongRoPE(base=1e4, short_factor=[1] * 32, long_factor=[2] * 32, original_length=1024, factor=4.0),
    ],
    ids=lambda rule: rule.kind,
)
def test_what_llama_cpp_cannot_express_is_said(rule):
    found = pasted(rule)
    assert found.llama_cpp is None
    assert "no flag" in found.notes["llama.cpp"]
