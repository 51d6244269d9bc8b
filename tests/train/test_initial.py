"""A training starts from another model's weights only where these are what they were, and fit."""

import pytest

from phasewise.model import Transformer
from phasewise.model.folder import WEIGHTS, save
from phasewise.train.initial import Initial

from .small import recipe


def test_weights_of_another_shape_are_named_in_a_line(tmp_path):
    config = recipe().model
    save(Transformer(config), tmp_path)
    other = config.model_copy(update={"layers": 1, "vocab_size": 5})
    with pytest.raises(ValueError, match="do not fit the model to be trained: ") as refused:
        Initial.of(tmp_path).fill(Transformer(other))
    said = str(refused.value)
    assert "\n" not in said
    assert "of another shape (embedding.weight [16, 16], not [5, 16]" in said
    assert said.endswith("; give it their sizes")
    Initial.of(tmp_path).fill(Transformer(config))


def test_weights_that_have_changed_are_refused(tmp_path):
    save(Transformer(recipe().model), tmp_path)
    initial = Initial.of(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"others")
    with pytest.raises(ValueError, match="have changed since the run began: restore them"):
        initial.fill(Transformer(recipe().model))
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"has no {WEIGHTS}; give the folder"):
        Initial.of(tmp_path)
