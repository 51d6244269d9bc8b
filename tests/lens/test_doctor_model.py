import copy
import inspect
import math

import pytest
import torch

from phasewise.encodings import PoPEConfig, RoPEConfig, TAPAConfig
from phasewise.frequencies import DynamicNTK, YaRN
from phasewise.lens.doctor.examine import MODEL_CHECKS, doctor
from phasewise.model import folder as own
from phasewise.model.history import Stage, write_history
from tests.hf.tiny import BY_LAYER_TYPE, LLAMA3, MODELS, STILL, YARN, tiny
from tests.model.small import ENCODINGS, ORIGINAL, model_of

transformers = pytest.importorskip("transformers", reason="examining checkpoints needs transformers")

CROSSING = "phi3, longrope beyond its original length"


def said(found, severity="wrong"):
    return [finding.check for finding in found.findings if finding.severity == severity]


def finding(found, check):
    [one] = [finding for finding in found.findings if finding.check == check]
    return one


def outcomes(found):
    return {check.name: check.outcome for check in found.checks}


def built(name, family, **changes):
    """The tiny model of that name with changes to its config."""
    sizes = {key: value for key, value in tiny(name).config.to_dict().items() if key != "model_type"}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**sizes, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def with_rates(change):
    """A llama whose buffer of rates was changed."""
    model = tiny("llama")
    with torch.no_grad():
        change(model.model.rotary_emb.inv_freq)
    return model


def forwarding(model, change):
    """The model, called with changed options."""
    forward = model.forward
    model.forward = lambda **options: forward(**change(options))
    model.forward.__signature__ = inspect.signature(forward)
    return model


@pytest.mark.parametrize("name", [*MODELS, *STILL])
def test_nothing_is_wrong_with_a_healthy_decoder_of_any_family(name):
    found = doctor(tiny(name))
    assert said(found) == []
    assert said(found, "warning") == {"llama, dynamic": ["dynamic"], CROSSING: ["switch"]}.get(name, [])
    made = {check for check, outcome in outcomes(found).items() if outcome == "passed"}
    assert {"buffers", "rates", "phases", "pairing", "decoding", "left padding", "packing"} <= made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nothing_is_wrong_with_a_decoder_loaded_in_half_precision(dtype):
    found = doctor(tiny("llama", dtype=dtype), length=4096)
    assert said(found) == []


def test_model_cast_after_loading_has_rates_in_half_precision_and_phases_off():
    found = doctor(tiny("llama").to(torch.bfloat16), length=2048)
    assert said(found) == ["buffers", "phases"]
    # A rate of 10^-0.5 is 1.8e-4 off in bfloat16.
    assert finding(found, "phases").evidence["largest error, radians"] == pytest.approx(0.36, abs=0.01)


def test_positions_in_bfloat16_are_most_of_a_radian_off_at_512():
    model = tiny("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids.bfloat16())
    found = doctor(model, length=512)
    evidence = finding(found, "phases").evidence
    # Above 256 every other position is lost: one token off, a rate of 1 radian at pair 0.
    assert evidence["largest error, radians"] == pytest.approx(1.0, abs=1e-3)
    assert (evidence["pair"], evidence["at position"] % 2) == (0, 1)
    assert "phases" in said(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda rates: rates.fill_(math.nan),
        lambda rates: rates.zero_(),
        lambda rates: rates.mul_(-1),
        lambda rates: rates.copy_(torch.rand(8, generator=torch.Generator().manual_seed(0))),
        lambda rates: rates.div_(4),
    ],
    ids=["nan", "zero", "negative", "arbitrary", "divided"],
)
def test_rates_left_uninitialised_are_found(change):
    found = doctor(with_rates(change))
    assert "rates" in said(found)
    assert outcomes(found)["phases"] == "not made"


def test_scaling_set_after_loading_is_found_to_do_nothing():
    model = tiny("llama")
    model.config.rope_parameters = dict(YARN)
    rates = finding(doctor(model), "rates")
    assert rates.severity == "wrong"
    assert "as without scaling" in rates.said
    assert rates.evidence["factor by the config"] == pytest.approx(0.1 * math.log(4) + 1)


def test_base_lost_between_versions_is_found_as_ten_thousand():
    model = tiny("llama")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert "as with a base of 10 000" in finding(doctor(model), "rates").said


def test_settings_that_the_reader_lost_are_found(tmp_path, monkeypatch):
    tiny("mistral").save_pretrained(tmp_path)
    monkeypatch.setattr("phasewise.hf.checkpoint.load", lambda *_path, **_options: tiny("llama"))
    found = doctor(tmp_path)
    assert said(found) == ["config read"]
    assert "base=1000000.0" in finding(found, "config read").evidence["stated"]


def test_scaling_replaced_after_loading_is_found():
    model = tiny("llama, llama3 rule")
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
    assert "rates" in said(doctor(model))
    assert LLAMA3["rope_theta"] == 5e5


def test_partial_and_proportional_rotation_are_told_apart():
    changed = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = built("llama", "llama", rope_parameters=changed)
    assert said(doctor(model)) == []
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    assert "as proportional rotation of 0.5" in finding(doctor(model), "rates").said


def test_truncate_passed_over_by_layer_type_is_found_in_the_model_too():
    full = {**YARN, "original_max_position_embeddings": 128, "truncate": False}
    rope = {**BY_LAYER_TYPE, "full_attention": full}
    found = doctor(built("gemma3", "gemma3_text", rope_parameters=rope))
    assert said(found) == ["layer types", "rates"]
    assert "as with the opposite truncate" in finding(found, "rates").said


def test_frequencies_of_one_layer_that_are_others_are_found():
    model = tiny("gemma3")
    model.config.rope_parameters["full_attention"]["factor"] = 4.0
    evidence = finding(doctor(model), "rates").evidence
    assert (evidence["layers"], evidence["layer"]) == ("1 of 2", 1)


def paired(*, permuted):
    """A llama of nine layers whose pairs have energies that fall with their rate, as trained ones do."""
    model = built("llama", "llama", num_hidden_layers=9)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                rows = projection.weight.unflatten(0, (-1, 2, 8))
                rows.mul_(torch.logspace(0, 1, 8)[:, None])
                if permuted:
                    projection.weight.copy_(rows.transpose(1, 2).reshape(projection.weight.shape))
    return model


def test_weights_made_for_the_other_pairing_are_found():
    assert said(doctor(paired(permuted=False))) == []
    assert said(doctor(paired(permuted=True))) == ["pairing"]


def test_decoding_one_position_off_is_found():
    def one_on(options):
        cached = options.get("cache", options.get("past_key_values")) is not None
        return {**options, "position_ids": options["position_ids"] + cached}

    found = doctor(forwarding(tiny("llama"), one_on))
    assert said(found) == ["decoding"]
    assert finding(found, "decoding").evidence["logits apart, relative"] > 0.1


def test_padding_that_is_seen_is_found():
    def unmasked(options):
        mask = options.get("attention_mask")
        return options if mask is None else {**options, "attention_mask": torch.ones_like(mask)}

    assert said(doctor(forwarding(tiny("llama"), unmasked))) == ["left padding"]


def test_packed_documents_that_see_each_other_are_a_warning():
    def one_document(options):
        mask = options.get("attention_mask")
        return {**options, "attention_mask": torch.ones_like(options["input_ids"]) if mask is None else mask}

    assert said(doctor(forwarding(tiny("llama"), one_document)), "warning") == ["packing"]


def test_text_that_changes_where_it_is_moved_is_found():
    model = tiny("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids.float() ** 1.2)
    assert "moved text" in said(doctor(model))


def test_decoding_past_the_switch_is_judged_only_where_the_length_passes_it():
    assert outcomes(doctor(tiny(CROSSING), length=32))["switch"] == "not made"
    crossing = finding(doctor(tiny(CROSSING), length=33), "switch")
    assert crossing.evidence["trained length"] == 32


@pytest.mark.parametrize("name", ENCODINGS)
def test_nothing_is_wrong_with_a_model_of_this_library_of_any_encoding(name):
    found = doctor(model_of(ENCODINGS[name], dtype=torch.float32), length=64, trained_length=ORIGINAL)
    assert said(found) == []
    assert outcomes(found)["decoding"] == outcomes(found)["packing"] == "passed"
    if any(rule in name for rule in ("longrope", "dynamic")):
        assert outcomes(found)["switch"] == "passed"


def test_phases_of_this_library_are_exact_at_a_million_positions():
    found = doctor(model_of(PoPEConfig()), length=1_000_000, trained_length=1_000_000)
    assert outcomes(found)["phases"] == "passed"


def test_frequencies_beyond_their_field_are_a_warning_for_rope_and_a_note_for_pope():
    for encoding, severity in ((RoPEConfig(), "warning"), (PoPEConfig(), "note")):
        found = doctor(model_of(encoding), length=4096, trained_length=512)
        assert finding(found, "field").severity == severity
    scaled = RoPEConfig(frequencies=YaRN(base=1e4, factor=8.0, original_length=512))
    assert outcomes(doctor(model_of(scaled), length=4096, trained_length=512))["field"] == "passed"


def test_frequencies_reach_no_further_than_the_windows_of_their_layers():
    (note,) = doctor(model_of(RoPEConfig(), window=48), length=4096, trained_length=128).findings
    assert (note.severity, note.evidence["their window"], note.evidence["trained length"]) == (
        "note",
        48,
        128,
    )
    (beyond,) = doctor(model_of(RoPEConfig(), window=256), length=4096, trained_length=128).findings
    assert beyond.severity == "warning"
    assert beyond.evidence["largest reach beyond"] == pytest.approx(2)


def test_trained_length_that_is_not_known_leaves_the_field_unjudged():
    checks = {check.name: check for check in doctor(model_of(RoPEConfig())).checks}
    assert checks["field"].said == "the trained length is not known; give it as trained_length"


def test_phases_frozen_by_a_clamp_are_counted():
    model = model_of(PoPEConfig(phase_bound="clamp"))
    with torch.no_grad():
        model.blocks[0].attention.encoding.phase.view(-1)[:16] = 0.5
    found = finding(doctor(model), "frozen phases")
    assert found.evidence["most in a layer"] == pytest.approx(0.5)
    assert found.evidence["share of phases"] == pytest.approx(0.25)


def wide_tapa(dtype):
    model = model_of(TAPAConfig(alpha=0.1), dtype=torch.float32)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query.weight.mul_(4)
            block.attention.key.weight.mul_(4)
    return model.to(dtype)


def test_argument_of_tapa_in_half_precision_is_off_by_what_is_said():
    in_half, in_full = (
        doctor(wide_tapa(torch.bfloat16), length=2048),
        doctor(wide_tapa(torch.float32), length=2048),
    )
    assert finding(in_half, "phase argument").severity in ("warning", "wrong")
    predicted = finding(in_full, "phase argument")
    assert predicted.severity == "note"
    moved = []

    def sink(layer, q, k):
        part = slice(layer.encoding.amplitude_dim, None)
        q, k = q[..., part], k[..., part].repeat_interleave(2, 1)
        off = (q.bfloat16().double() @ k.bfloat16().double().mT) - q.double() @ k.double().mT
        turn = 2 * math.pi * layer.encoding.phase_dim**-0.5 * 2047**0.1
        moved.append(turn * off.square().mean().sqrt().item())

    from phasewise.model.reading import TransformerReader

    tokens = torch.randint(13, (1, 64), generator=torch.Generator().manual_seed(0))
    TransformerReader(wide_tapa(torch.float32)).read(tokens, sink)
    assert predicted.evidence["radians, rms, worst layer"] == pytest.approx(max(moved), rel=0.5)


def test_folders_of_both_kinds_are_examined_in_the_dtype_they_are_served_in(tmp_path):
    tiny("qwen3").save_pretrained(tmp_path / "theirs")
    own.save(model_of(RoPEConfig(), dtype=torch.float32), tmp_path / "ours")
    for name in ("theirs", "ours"):
        found = doctor(tmp_path / name, dtype="bfloat16", length=256)
        assert (found.dtype, said(found)) == ("bfloat16", [])


def test_phase_error_by_position_and_turns_are_kept():
    found = doctor(tiny("llama"), length=512)
    assert found.phase_error.x[-1] == 511
    assert max(found.phase_error.y) < 1e-4
    trained, served = found.turns
    assert (trained.y[0], served.y[0]) == pytest.approx((256 / (2 * math.pi), 512 / (2 * math.pi)))


def test_dynamic_rule_is_judged_at_the_length_served():
    encoding = RoPEConfig(frequencies=DynamicNTK(base=100.0, factor=4.0, original_length=ORIGINAL))
    assert outcomes(doctor(model_of(encoding), length=1000, trained_length=ORIGINAL))["phases"] == "passed"


@pytest.mark.parametrize("switch", [31, 33])
def test_rates_that_change_one_token_off_the_original_length_are_found(switch):
    model = tiny(CROSSING)
    rotary = model.model.rotary_emb
    rotary.config = copy.deepcopy(rotary.config)
    rotary.config.rope_parameters["original_max_position_embeddings"] = switch
    rotary.config.original_max_position_embeddings = switch
    evidence = finding(doctor(model), "phases").evidence
    assert evidence["of a length of"] == max(switch, 32)
    assert evidence["largest error, radians"] > 0.3


def test_examination_that_is_interrupted_says_what_is_missing():
    answers = iter([False, False, True])
    found = doctor(tiny("llama"), stop=lambda: next(answers))
    left = list(MODEL_CHECKS)[2:]
    assert found.partial == f"interrupted before {', '.join(left)}"
    assert [check.name for check in found.checks if check.said == "interrupted"] == left


def test_model_is_as_it_was_after_being_examined():
    model = tiny("llama, dynamic")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    chosen = model.config._attn_implementation
    doctor(model, length=1024)
    assert model.config._attn_implementation == chosen
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_what_is_no_model_and_options_that_do_not_apply_are_refused():
    config = transformers.AutoConfig.for_model("gpt2", n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="no layer of this gpt2 model is given rotary positions"):
        doctor(model)
    with pytest.raises(ValueError, match="is no model"):
        doctor(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="leave dtype out"):
        doctor(tiny("llama"), dtype="float16")
    with pytest.raises(ValueError, match="length must be at least"):
        doctor(tiny("llama"), length=1)


def test_the_model_of_a_training_knows_the_length_it_was_trained_at(tmp_path):
    own.save(model_of(RoPEConfig()), tmp_path / "model")
    stage = Stage(length=64, tokens=1, corpus="austen", corpus_sha256="0", encoding=RoPEConfig())
    write_history(tmp_path / "model", (stage,))
    for given in (tmp_path, tmp_path / "model" / "config.json"):
        found = doctor(given)
        assert (found.trained_length, found.length) == (64, 64)
        assert doctor(given, trained_length=32).trained_length == 32
    assert [finding.check for finding in doctor(tmp_path, length=4096).findings] == ["field"]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gptj", {"n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 64}),
        (
            "deepseek_v3",
            {
                "hidden_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "first_k_dense_replace": 1,
                "n_routed_experts": 8,
            },
        ),
    ],
    ids=["when it is read", "when it decodes"],
)
def test_a_config_whose_sizes_do_not_fit_each_other_is_said_in_a_line(family, sizes):
    config = transformers.AutoConfig.for_model(family, vocab_size=64, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=f"cannot run this {family} model .RuntimeError: .*; correct its"):
        doctor(model)
