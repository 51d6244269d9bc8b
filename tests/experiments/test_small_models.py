from argparse import ArgumentTypeError

import numpy as np
import pytest
import torch

from experiments import indirect_indexing, jsb_chorales, papers, small_model_speed
from phasewise.data import load
from phasewise.encodings import RoPEConfig
from phasewise.interrupt import Interrupted
from phasewise.model import Transformer
from phasewise.train.run import read_recipe

CPU = torch.device("cpu")


def small(name, encoding, **changes):
    """A paper's recipe with a small model and few steps."""
    given = papers.recipe(name, encoding, load("indirect-indexing"))
    sizes = {"width": 16, "head_dim": 8, "hidden": 32, "heads": 2, "kv_heads": 2, "layers": 1}
    model = given.model.model_copy(update=sizes)
    budget = {
        "steps": 8,
        "warmup": 2,
        "batch_size": 2,
        "checkpoint_every": 8,
        "compile": False,
        "precision": "float32",
    }
    return given.model_copy(update={**budget, "model": model, **changes})


@pytest.mark.parametrize("name", [indirect_indexing.RECIPE, jsb_chorales.RECIPE])
def test_recipes_of_the_two_encodings_differ_in_the_encoding_alone(name):
    rope, pope = (papers.recipe(name, kind, load("indirect-indexing")) for kind in ("rope", "pope"))
    assert rope.model.encoding == RoPEConfig()
    assert pope == rope.model_copy(update={"model": pope.model})
    assert pope.model == rope.model.model_copy(update={"encoding": read_recipe(name).encoding})


def test_accuracy_is_the_share_of_answers_at_their_places():
    corpus = load("indirect-indexing")
    examples = indirect_indexing.Examples.of(corpus, "validation", CPU, 50)

    class Knowing(torch.nn.Module):
        def hidden(self, tokens):
            logits = torch.zeros(*tokens.shape, corpus.vocab_size)
            for row, (at, answer) in enumerate(zip(examples.at, examples.answers, strict=True)):
                logits[row, at, answer if row < 30 else 0] = 100.0
            return logits

        def logits(self, hidden):
            return hidden

    found, loss = indirect_indexing.measure(Knowing(), examples)
    assert found == 0.6
    assert loss == pytest.approx(0.4 * 100)
    row = examples.tokens[0][: examples.at[0] + 1]
    assert corpus.decode(np.append(row, examples.answers[0])) == corpus.decode(corpus.split("validation")[0])


def shorten(monkeypatch):
    for name, value in {"BLOCK": 2, "EVERY": 4, "WATCHED": 20, "KEPT": 0.5}.items():
        monkeypatch.setattr(indirect_indexing, name, value)


def test_the_average_is_tested_where_it_leads_and_both_at_the_end(tmp_path, monkeypatch):
    shorten(monkeypatch)
    monkeypatch.setattr(indirect_indexing, "EVERY", 2)
    # Of each of the four points: the average, the weights, the average's test where it leads, both at the end.
    accuracies = iter([0.2, 0.9, 0.21, 0.4, 0.9, 0.41, 0.4, 0.9, 0.42, 0.3, 0.9, 0.33, 0.34])
    monkeypatch.setattr(indirect_indexing, "measure", lambda _model, _examples: (next(accuracies), 1.0))
    curve = indirect_indexing.run({"pope": small("pope-indirect-indexing", "pope")}, tmp_path, CPU)["pope"]
    assert [(point["average"], point.get("average_test")) for point in curve] == [
        (0.2, 0.21),
        (0.4, 0.41),
        (0.4, 0.42),
        (0.3, 0.33),
    ]
    assert [point.get("weights_test") for point in curve] == [None, None, None, 0.34]
    assert indirect_indexing.best(curve) == curve[2]


def test_paired_difference_and_its_interval_are_those_of_students_t():
    found = jsb_chorales.paired([1.0, 2.0, 3.0, 4.0, 5.0], [0.9, 1.8, 2.7, 3.6, 4.5])
    assert found["mean"] == pytest.approx(-0.3)
    assert found["interval_95"] == pytest.approx([-0.3 - 0.196299, -0.3 + 0.196299], abs=1e-5)


def test_indirect_indexing_resumed_equals_the_run_in_one_sitting(tmp_path, monkeypatch):
    shorten(monkeypatch)
    given = {"pope": small("pope-indirect-indexing", "pope", checkpoint_every=4)}
    whole = indirect_indexing.run(given, tmp_path / "whole", CPU)
    for block in (1, 2):
        asked = iter(range(1, 100))
        with pytest.raises(Interrupted):
            indirect_indexing.run(
                given, tmp_path / "parts", CPU, lambda asked=asked, block=block: next(asked) == block
            )
    assert indirect_indexing.run(given, tmp_path / "parts", CPU) == whole


def test_the_average_of_the_last_checkpoint_stays_until_another_is_whole(tmp_path):
    model = Transformer(small("pope-indirect-indexing", "pope").model)
    examples = indirect_indexing.Examples(*(torch.zeros(1, 1, dtype=torch.int64) for _ in range(3)))
    watch = indirect_indexing.Watch(model, examples, examples)

    def kept(*steps):
        for step in steps:
            watch.save(tmp_path, step)
        return sorted(int(path.stem.removeprefix("watch-")) for path in tmp_path.iterdir())

    # Ctrl-C at a checkpoint keeps the average twice; what was kept before a kill is ahead of the checkpoints.
    assert kept(4, 8, 8) == [4, 8]
    watch.load(tmp_path, 4)
    assert kept(6) == [4, 6]


def test_chorales_keep_the_best_validation_step_over_sittings(tmp_path, monkeypatch):
    class Found:
        def __init__(self, loss):
            self.loss, self.accuracy, self.tokens = loss, 0.5, 7

    told = iter(
        [
            Found(2.0),
            Found(2.5),
            Found(1.0),
            Found(1.5),
            Found(1.0),
            Found(1.5),
            Found(3.0),
            Found(0.9),
            Found(0.95),
        ]
    )
    monkeypatch.setattr(jsb_chorales, "BLOCK", 2)
    monkeypatch.setattr(jsb_chorales, "EVERY", 2)
    monkeypatch.setattr(jsb_chorales, "likelihood", lambda *_: next(told))
    given = small("pope-chorales", "pope", context=24, data="austen", checkpoint_every=2)
    given = {"pope": given.model_copy(update={"model": given.model.model_copy(update={"vocab_size": 256})})}

    def kill(curves):
        if curves["pope"][-1]["steps"] == 4:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        jsb_chorales.run(given, load("austen"), tmp_path, CPU, told=kill)
    curve = jsb_chorales.run(given, load("austen"), tmp_path, CPU)["pope"]
    assert [(point["steps"], point["validation"]) for point in curve] == [
        (2, 2.0),
        (4, 1.0),
        (6, 3.0),
        (8, 0.9),
    ]
    assert jsb_chorales.best(curve)["test"] == 0.95


def test_speed_counts_the_steps_of_all_models(monkeypatch):
    monkeypatch.setattr(small_model_speed, "BLOCK", 2)
    monkeypatch.setattr(small_model_speed, "BLOCKS", 3)
    monkeypatch.setattr(small_model_speed, "perf_counter", iter(range(0, 100, 4)).__next__)
    given = small("pope-indirect-indexing", "rope", checkpoint_every=2)
    assert small_model_speed.ordinary(given, "cpu") == 0.5
    assert small_model_speed.together({"one": given, "other": given}, "cpu") == 1.0
    with pytest.raises(ValueError, match="2 steps are too few to time: use 8"):
        small_model_speed.ordinary(given.model_copy(update={"steps": 2, "warmup": 0}), "cpu")


@pytest.mark.parametrize("model", ["pope0", "alibi-0", "pope-", "pope-one"])
def test_a_model_that_is_not_an_encoding_and_a_seed_is_refused(model):
    with pytest.raises(ArgumentTypeError, match=f"'{model}' is not ENCODING-SEED"):
        indirect_indexing.seeded(model)
    assert indirect_indexing.seeded("pope-2") == ("pope", 2)
