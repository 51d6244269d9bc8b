"""Decoders that are not whole, as they lie on disks: refused in one sentence, by whichever command opens them."""

import pytest
import torch

pytest.importorskip("transformers", reason="Hugging Face checkpoints need transformers")

from transformers.utils import logging

from phasewise.hf.checkpoint import load, read_config, require_weights
from phasewise.hf.language_model import open_language_model
from phasewise.lens.capture import open_checkpoint
from phasewise.lens.doctor.examine import doctor
from tests.hf.folders import change_config
from tests.hf.tiny import tiny

OPENERS = {"lens": open_checkpoint, "evaluation": open_language_model, "doctor": doctor}


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "64"}, "expected int, got str"),
        ({"max_position_embeddings": None}, "expected int, got NoneType"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"num_attention_heads": 0}, "modulo by zero"),
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"rope_parameters": {"rope_type": "wild", "rope_theta": 1e4}}, "KeyError: 'wild'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "big"}}, "TypeError"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "pip install optimum"),
        ({"quantization_config": "4bit"}, "no attribute 'to_dict'"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}, "code of its own, and none is run"),
    ],
)
def test_a_config_that_transformers_cannot_use_is_refused_in_one_sentence(copy, opener, changes, said):
    change_config(copy, **changes)
    with pytest.raises(ValueError, match="copy") as caught:
        opener(copy)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("opener", OPENERS.values(), ids=OPENERS)
def test_a_cut_shard_is_refused_by_name(copy, opener):
    load(copy).save_pretrained(copy, max_shard_size="50KB")
    (copy / "model.safetensors").unlink(missing_ok=True)
    cut = sorted(copy.glob("model-*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"{cut.name} cannot be loaded \(.*\); fetch them again"):
        opener(copy)


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_beside_whole_weights_is_not_read_by_us_as_it_is_not_by_transformers(copy, index):
    (copy / index).write_text('{"weight_map": {"lm_head.weight": "another-00001-of-00002.bin"}}')
    require_weights(copy)
    assert open_language_model(copy).config.family == "llama"


def test_rates_that_are_no_numbers_are_refused_with_what_to_correct(copy):
    change_config(copy, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0})
    with pytest.raises(
        ValueError, match=r"rates that are nan.*: correct the rotary settings in config\.json"
    ):
        open_checkpoint(copy).read(torch.zeros(1, 8, dtype=torch.int64), lambda *_read: None)


def test_a_doctor_finds_rates_that_are_no_numbers_and_goes_on(copy):
    change_config(copy, rope_parameters={"rope_type": "default", "rope_theta": -1.0})
    found = doctor(copy)
    assert found.wrong
    assert {check.name: check.outcome for check in found.checks}["pairing"] == "not made"


def test_a_doctor_names_the_examination_that_needs_no_weights(copy):
    (copy / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"phasewise doctor \S+/copy/config.json"):
        doctor(copy)


def test_what_transformers_would_say_of_a_config_is_not_printed(tmp_path, monkeypatch):
    tiny("llama").save_pretrained(tmp_path)
    change_config(tmp_path, bos_token_id=10**6)
    said = []
    logger = logging.get_logger("transformers.configuration_utils")
    monkeypatch.setattr(logger, "handle", said.append)
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    try:
        read_config(tmp_path)
    finally:
        logging.set_verbosity(before)
    assert not said
