"""A config.json that leaves out the rotated share means its family's own, as transformers reads it."""

import logging

import pytest
import transformers
from transformers import CONFIG_MAPPING

from phasewise.frequencies_hf import RopeSettings, from_hf
from phasewise.hf.settings import completed
from phasewise.lens.doctor.examine import doctor

PARTIAL = ("gpt_neox", "phi", "stablelm", "persimmon", "glm", "glm4", "nemotron", "fuyu", "qwen3_next")


def families():
    """The model types whose configs can be made of a base alone and read as one rule."""
    for family in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[family](rope_theta=10_000.0)
            read = from_hf(config)
        except Exception:  # encoders, and configs that need more than a base
            continue
        if isinstance(read, RopeSettings) and config.get_text_config(decoder=True) is config:
            yield family, read.fraction


@pytest.mark.slow
def test_every_family_turns_the_share_that_its_config_class_says(caplog):
    caplog.set_level(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    known = dict(families())
    assert len(known) > 50
    assert {family for family, fraction in known.items() if fraction < 1} >= set(PARTIAL) & known.keys()
    for family, fraction in known.items():
        written = {"model_type": family, "rope_theta": 10_000.0, "head_dim": 128}
        if "rotary_dim" not in CONFIG_MAPPING[family]().to_dict():
            assert from_hf(completed(written)).fraction == fraction, family


@pytest.mark.parametrize(
    "written",
    [
        {"model_type": "gpt_neox", "rotary_pct": 0.5},
        {"model_type": "phi", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
        {"model_type": "phi", "partial_rotary_factor": 1.0},
        {"model_type": "llama", "rope_theta": 1e4},
        {"model_type": "of my own", "rope_theta": 1e4},
        {"model_type": "nougat", "rope_theta": 1e4},
        {"rope_theta": 1e4},
    ],
)
def test_what_is_written_stays_and_unknown_families_too(written):
    assert completed(written) == written


def test_text_part_of_a_multimodal_config_is_completed():
    config = {"model_type": "fuyu", "text_config": {"model_type": "persimmon", "rope_theta": 25_000.0}}
    assert from_hf(completed(config)).fraction == 0.5


def test_doctor_of_a_config_alone_counts_the_frequencies_that_its_family_turns(tmp_path):
    sizes = '"hidden_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 2048'
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt_neox", "rotary_emb_base": 10000, {sizes}}}')
    (field,) = [
        each for each in doctor(tmp_path / "config.json", length=8192).findings if each.check == "field"
    ]
    assert "of 16 frequencies" in field.said
