"""What a model was trained at lies beside it, and whoever opens it knows."""

import pytest

from phasewise.encodings import RoPEConfig
from phasewise.hf.language_model import open_language_model
from phasewise.lens.capture import open_checkpoint
from phasewise.model.folder import save
from phasewise.model.history import HISTORY, Stage, read_history, trained_length, write_history
from tests.model.small import model_of


def stages(*lengths):
    return tuple(
        Stage(length=length, tokens=10, corpus="made", corpus_sha256="0", encoding=RoPEConfig())
        for length in lengths
    )


def test_history_is_read_as_written_and_its_last_length_is_the_trained_one(tmp_path):
    save(model_of(RoPEConfig()), tmp_path)
    assert (read_history(tmp_path), trained_length(tmp_path)) == ((), None)
    write_history(tmp_path, stages(16, 64))
    assert (read_history(tmp_path), trained_length(tmp_path)) == (stages(16, 64), 64)


def test_readers_and_language_models_know_the_trained_length(tmp_path):
    save(model_of(RoPEConfig()), tmp_path)
    write_history(tmp_path, stages(16, 64))
    model = open_language_model(tmp_path)
    assert (model.config.trained_length, model.config.native_length) == (64, 64)
    assert model.reader().facts.trained_length == 64
    assert open_checkpoint(tmp_path).facts.trained_length == 64
    assert open_checkpoint(tmp_path, trained_length=32).facts.trained_length == 32


def test_a_damaged_history_is_named(tmp_path):
    (tmp_path / HISTORY).write_text('[{"length": 0}]')
    with pytest.raises(
        ValueError, match=r"history.json is not a model's history \(.*\): delete it, or restore it"
    ):
        read_history(tmp_path)
