"""Of what pydantic finds wrong, each field's own problem is said, with the value given, in one line."""

from typing import Any

import pytest
from pydantic import ValidationError

from phasewise.encodings import NoPEConfig
from phasewise.model import ModelConfig
from phasewise.problems import first, problems
from phasewise.train.continuation import ExtendRecipe

MODEL = {"vocab_size": 256, "width": 64, "layers": 2, "heads": 4, "encoding": NoPEConfig()}
EXTENSION = {"checkpoint": "run", "length": (32,), "steps": (1,), "rule": "yarn"}


def refusal(kind: Any, settings: dict[str, Any]) -> ValidationError:
    with pytest.raises(ValidationError) as refused:
        kind(**settings)
    return refused.value


def test_what_follows_from_another_problem_is_left_out():
    found = problems(refusal(ExtendRecipe, {**EXTENSION, "length": (-5,), "steps": (-1, 2)}))
    assert found == [
        (("length", 0), "Input should be greater than or equal to 2, but is -5"),
        (("steps", 0), "Input should be greater than or equal to 0, but is -1"),
    ]
    assert first(refusal(ExtendRecipe, {**EXTENSION, "length": ()})) == "length: give at least 1"
    defaults = refusal(ModelConfig, {**MODEL, "heads": 0})
    assert problems(defaults) == [(("heads",), "Input should be greater than or equal to 1, but is 0")]


@pytest.mark.parametrize(
    "name", ["vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "hidden", "window"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "x", 10**30])
def test_a_size_of_a_model_is_named_with_what_it_may_be(name, value):
    message = first(refusal(ModelConfig, {**MODEL, name: value}))
    assert message.startswith(name)
    assert message.endswith(f", but is {value!r}")
    assert "\n" not in message


def test_a_long_value_is_cut_and_a_missing_one_is_none():
    assert len(first(refusal(ModelConfig, {**MODEL, "activation": "x" * 9999}))) < 250
    assert first(refusal(ModelConfig, {**MODEL, "encoding": None})) == "encoding: Field required"


def test_an_unknown_kind_is_named_with_those_there_are():
    message = first(refusal(ModelConfig, {**MODEL, "encoding": {"kind": "fire"}}))
    assert message.endswith(": unknown kind 'fire'; choose from 'nope', 'rope', 'pope', 'tapa', 'alibi'")
