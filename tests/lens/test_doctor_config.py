import json
import re
from pathlib import Path

import pytest

from phasewise.lens.doctor.examine import doctor
from phasewise.lens.doctor.repair import destination, repair, write

SIZES = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
PHI3 = {
    **SIZES,
    "hidden_size": 3072,
    "max_position_embeddings": 131_072,
    "original_max_position_embeddings": 4096,
    "rope_theta": 1e4,
}
GEMMA3 = {
    **SIZES,
    "head_dim": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 1024,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
WHOLE = "layers that see the whole context, without rates"
HEALTHY = {
    "LLaMA-2": {**SIZES, "rope_theta": 1e4},
    "Llama-3.1": {**SIZES, "max_position_embeddings": 131_072, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "Mistral": {**SIZES, "rope_theta": 1e6, "sliding_window": 4096, "rope_scaling": None},
    "v5, base in both places": {**SIZES, "rope_theta": 1e5, "rope_parameters": {"rope_theta": 1e5}},
    "Gemma-3": GEMMA3,
    "Pythia": {**SIZES, "model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10_000},
    "Phi-3, longrope": {**PHI3, "rope_scaling": LONGROPE},
    "yarn": {**SIZES, "rope_parameters": YARN},
    "text part": {"model_type": "llava", "text_config": {**SIZES, "rope_theta": 1e4}},
}


def examine(tmp_path, config, **options):
    path = tmp_path / "examined.json"
    path.write_text(json.dumps(config))
    return doctor(path, **options)


def scaled(**changes):
    return {**SIZES, "rope_parameters": {key: v for key, v in {**YARN, **changes}.items() if v != "absent"}}


def by_layer(**changes):
    return {
        **GEMMA3,
        "rope_parameters": {
            **GEMMA3["rope_parameters"],
            "full_attention": {**YARN, "rope_theta": 1e6},
            **changes,
        },
    }


BROKEN = {
    "two forms that disagree": (
        {**SIZES, "rope_parameters": YARN, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "two forms",
        "wrong",
    ),
    "no base beside a rule": (scaled(rope_theta="absent"), "base", "wrong"),
    "no base at all": (SIZES, "base", "warning"),
    "two bases": ({**scaled(), "rope_theta": 5e5}, "base", "wrong"),
    "base where old readers do not look": (scaled(rope_theta=5e5), "base", "note"),
    "scaling without a type": (
        {**SIZES, "rope_theta": 1e4, "rope_scaling": {"factor": 4.0}},
        "rule",
        "wrong",
    ),
    "two types": (scaled(type="linear"), "rule", "wrong"),
    "unknown type": (scaled(rope_type="yarm"), "rule", "wrong"),
    "llama3 overwritten by linear": (
        {**SIZES, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "rope_type": "linear"}},
        "keys",
        "wrong",
    ),
    "key that nothing reads": (scaled(betafast=32), "keys", "warning"),
    "factor of a default rule": (scaled(rope_type="default"), "keys", "wrong"),
    "no original length": (scaled(original_max_position_embeddings="absent"), "original length", "wrong"),
    "two original lengths": (
        {**scaled(), "original_max_position_embeddings": 4096},
        "original length",
        "wrong",
    ),
    "longest below original": (
        {**scaled(), "max_position_embeddings": 1024},
        "original length",
        "wrong",
    ),
    "factor applied twice, 2048 x 2 -> 8192": (scaled(factor=2.0), "factor", "wrong"),
    "factor too small": (scaled(factor=3.0), "factor", "wrong"),
    "factor of a length already extended": (scaled(factor=16.0), "factor", "warning"),
    "no factor": (scaled(factor="absent"), "factor", "wrong"),
    "head_dim null": ({**scaled(), "head_dim": None}, "head width", "warning"),
    "truncate by layer type": (
        by_layer(full_attention={**YARN, "rope_theta": 1e6, "truncate": False}),
        "layer types",
        "wrong",
    ),
    "key beside layer types": (by_layer(rope_theta=1e6), "layer types", "wrong"),
    "layer type that no layer has": (
        by_layer(chunked_attention={"rope_type": "default", "rope_theta": 1e4}),
        "layer types",
        "warning",
    ),
    "short list": ({**PHI3, "rope_scaling": {**LONGROPE, "long_factor": [4.0] * 47}}, "lists", "wrong"),
    "share written twice": (
        {**scaled(partial_rotary_factor=0.5), "partial_rotary_factor": 0.25},
        "rotated share",
        "wrong",
    ),
    "attention factor of some engines only": (scaled(attention_factor=1.0), "attention factor", "warning"),
    "both mscales, which some engines drop": (
        scaled(mscale=1.0, mscale_all_dim=1.0),
        "attention factor",
        "warning",
    ),
    "one mscale": (scaled(mscale=0.7), "attention factor", "warning"),
    "factor as text": (scaled(factor="8"), "contradictions", "wrong"),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_config_has_no_finding_above_a_note(tmp_path, name):
    found = examine(tmp_path, HEALTHY[name])
    assert [finding for finding in found.findings if finding.severity != "note"] == []
    assert not found.wrong


@pytest.mark.parametrize("name", BROKEN)
def test_broken_config_is_found_with_numbers_and_a_remedy(tmp_path, name):
    config, check, severity = BROKEN[name]
    found = examine(tmp_path, config)
    [finding] = [finding for finding in found.findings if finding.check == check]
    assert finding.severity == severity
    assert finding.evidence
    assert finding.remedy
    assert finding.edits or finding.by_hand
    assert found.wrong == any(other.severity == "wrong" for other in found.findings)


def evidence(tmp_path, config, check, **options):
    found = examine(tmp_path, config, **options).findings
    return next(finding.evidence for finding in found if finding.check == check)


def test_attention_factor_is_reported_as_each_engine_reads_it(tmp_path):
    config = scaled(factor=16.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=512)
    numbers = evidence(tmp_path, config, "attention factor")
    assert numbers["transformers"] == 1.0
    assert numbers["llama.cpp"] == pytest.approx(1.2773, abs=1e-4)
    wide = scaled(factor=64.0, original_max_position_embeddings=128, attention_factor=1.0)
    assert evidence(tmp_path, wide, "attention factor")["llama.cpp"] == pytest.approx(1.4159, abs=1e-4)


def test_factor_applied_twice_is_told_from_one_too_small(tmp_path):
    for factor, words in ((2.0, "applied twice"), (3.0, "out of its reach")):
        [found] = [f for f in examine(tmp_path, scaled(factor=factor)).findings if f.check == "factor"]
        assert words in found.said
        assert found.evidence["reach"] == factor * 2048


def test_truncate_that_is_passed_over_changes_rates_by_what_is_said(tmp_path):
    transformers = pytest.importorskip("transformers", reason="compared with transformers' own rates")
    rope = {**YARN, "rope_theta": 1e6, "truncate": False}
    said = evidence(tmp_path, by_layer(full_attention=rope), "layer types")
    config = transformers.Gemma3TextConfig(head_dim=256, max_position_embeddings=8192)
    rates = []
    for parameters in ({"full_attention": rope}, rope):
        config.rope_parameters = parameters
        layer = "full_attention" if "full_attention" in parameters else None
        rates.append(
            transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"](config, "cpu", layer_type=layer)[0]
        )
    nested, flat = rates
    measured = (nested / flat - 1).abs().max().item()
    assert said["largest relative error of a rate"] == pytest.approx(measured, rel=1e-4)


def test_yarn_on_inputs_that_fit_is_a_warning_and_none_beyond(tmp_path):
    checks = {
        length: [finding.check for finding in examine(tmp_path, scaled(), length=length).findings]
        for length in (2048, 2049)
    }
    assert checks == {2048: ["short inputs"], 2049: []}


def test_dynamic_below_the_trained_length_gives_some_engines_a_negative_base(tmp_path):
    config = {**SIZES, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    found = [
        finding for finding in examine(tmp_path, config, length=4096).findings if finding.check == "dynamic"
    ]
    assert found[0].evidence["stretch"] == pytest.approx(4 * 4096 / 8192 - 3)
    assert [finding.severity for finding in found] == ["warning", "warning"]


def test_dynamic_is_one_constant_base_in_some_engines(tmp_path):
    config = {**SIZES, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    numbers = evidence(tmp_path, config, "dynamic", length=16_384)
    assert numbers["base, transformers"] == pytest.approx(1e4 * 5 ** (64 / 63))
    assert numbers["base, vLLM"] == pytest.approx(1e4 * 13 ** (64 / 63))


@pytest.mark.parametrize(("length", "beyond"), [(8192, False), (8193, True), (65_536, True)])
def test_frequencies_beyond_the_trained_field_are_counted(tmp_path, length, beyond):
    found = [f for f in examine(tmp_path, HEALTHY["LLaMA-2"], length=length).findings if f.check == "field"]
    assert bool(found) == beyond
    if beyond:
        # 10 000^(-i / 64) 8192 < 2 pi from i = 50 on.
        assert (found[0].evidence["first of them"], found[0].evidence["frequencies beyond"]) == (50, 14)
        assert found[0].evidence["largest reach beyond"] == pytest.approx(length / 8192)


def test_scaling_keeps_frequencies_in_their_field_up_to_its_reach(tmp_path):
    checks = {
        length: "field" in [finding.check for finding in examine(tmp_path, scaled(), length=length).findings]
        for length in (8192, 16_384)
    }
    assert checks == {8192: False, 16_384: True}


@pytest.mark.parametrize("family", ["cohere2", "mistral"])
def test_windowed_rates_are_said_to_need_no_scaling_and_a_warning_where_they_have_one(tmp_path, family):
    pytest.importorskip("transformers", reason="a model is asked how far its layers see")
    config = {
        **SIZES,
        "model_type": family,
        "num_hidden_layers": 4,
        "sliding_window": 4096,
        "rope_theta": 1e6,
    }
    assert not of(examine(tmp_path, config), "field")
    (note,) = of(examine(tmp_path, config, length=65_536), "field")
    whole = 1 if family == "cohere2" else 0
    assert note.severity == "note"
    assert note.evidence["their window"] == 4096
    assert (note.evidence["layers with rates"], whole) == (4 - whole, note.evidence[WHOLE])
    scaled = {**config, "rope_scaling": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 8192}}
    (warning,) = of(examine(tmp_path, {**scaled, "max_position_embeddings": 32_768}), "field")
    assert warning.severity == "warning"
    assert "yarn changes what layers do within their windows" in warning.said


def of(diagnosis, check):
    return [finding for finding in diagnosis.findings if finding.check == check]


def test_page_has_a_row_for_every_check_in_the_order_in_which_they_are_made(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "rope_theta": 1e4}))
    made = [check.name for check in doctor(tmp_path / "config.json").checks]
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    section = page.partition("## What is checked")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-zA-Z ]+) \|", section, flags=re.MULTILINE)
    assert [row for row in rows if row != "check"] == made


def test_checks_that_need_weights_are_named_as_not_made(tmp_path):
    checks = {check.name: check for check in examine(tmp_path, HEALTHY["LLaMA-2"]).checks}
    assert (checks["decoding"].outcome, checks["decoding"].said) == ("not made", "needs the weights")
    assert checks["keys"].outcome == "passed"


def test_fix_makes_safe_corrections_alone_and_leaves_the_rest(tmp_path):
    config = {**scaled(betafast=32, factor="absent", rope_theta=5e5), "head_dim": None, "untouched": [1]}
    found = examine(tmp_path, config)
    fixed, done = repair(config, found)
    expected = {**SIZES, "untouched": [1], "head_dim": 128, "rope_theta": 5e5}
    assert fixed == {**expected, "rope_parameters": {**YARN, "rope_theta": 5e5}}
    assert len(done.changed) == 4
    assert done.left == ()
    assert examine(tmp_path, fixed).findings == ()
    assert config["head_dim"] is None


@pytest.mark.parametrize("name", BROKEN)
def test_fix_removes_what_it_edits_and_brings_no_new_finding(tmp_path, name):
    config, *_ = BROKEN[name]
    before = examine(tmp_path, config)
    fixed, done = repair(config, before)
    after = examine(tmp_path, fixed)
    edited = [finding.said for finding in before.findings if finding.edits]
    assert {finding.said for finding in after.findings}.isdisjoint(edited)
    assert len(done.left) == sum(not finding.edits for finding in before.findings)
    if not edited:
        assert fixed == config


def test_fix_is_never_written_in_place_or_over_a_file(tmp_path):
    source = tmp_path / "config.json"
    source.write_text("{}")
    with pytest.raises(ValueError, match="never changed in place"):
        destination(source, source)
    with pytest.raises(ValueError, match="never changed in place"):
        destination(tmp_path, source)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="already exists"):
        destination(tmp_path / "other.json", source)
    path = destination(tmp_path / "new", source)
    write({"a": 1}, path)
    assert json.loads((tmp_path / "new" / "config.json").read_text()) == {"a": 1}


JUNK = ["8", "", -1, 0, 2.5, 1e400, True, [], [1.0], {}, {"a": {}}, None]


@pytest.mark.parametrize("name", ["Llama-3.1", "Gemma-3", "Phi-3, longrope", "yarn", "text part"])
def test_values_of_any_kind_give_a_diagnosis_and_never_a_traceback(tmp_path, name):
    def places(config, path=()):
        for key, value in config.items():
            yield (*path, key)
            if isinstance(value, dict):
                yield from places(value, (*path, key))

    for path in places(HEALTHY[name]):
        for junk in JUNK:
            config = json.loads(json.dumps(HEALTHY[name]))
            target = config
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = junk
            found = examine(tmp_path, config, length=4096)
            repair(config, found)
            json.dumps(found.model_dump(mode="json"), allow_nan=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON: nested too deeply.*; fetch it again"),
        ("[]", "holds list"),
        ("\xff", "is not JSON"),
        ('{"encoding": 3}', "no config of a"),
    ],
)
def test_file_that_is_no_config_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=said) as error:
        doctor(path)
    assert "\n" not in str(error.value)
