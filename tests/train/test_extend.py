"""Extending a checkpoint: what changes, what stays, what is refused, and that stopping loses nothing."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter

from phasewise.evaluate import measure
from phasewise.frequencies import Linear, LongRoPE, YaRN
from phasewise.interrupt import Interrupted
from phasewise.model.folder import load, save
from phasewise.model.history import read_history
from phasewise.train import extend as module
from phasewise.train.continuation import ExtendRecipe, read_begun
from phasewise.train.extend import extend
from phasewise.train.extension import Report, table
from phasewise.train.folder import read
from phasewise.train.kept import keep
from phasewise.train.loop import train
from tests.train.extended import request
from tests.train.small import CPU, corpus, recipe

TRAINED = 12
SETTINGS = {"warmup": 1, "evaluate_tokens": 200, "batch_size": 2, "checkpoint_every": 2}


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch):
    monkeypatch.setattr(module, "load", lambda _name, *, tokenizer: corpus())


@pytest.fixture
def checkpoint(tmp_path):
    return trained(tmp_path)


def trained(tmp_path, encoding="rope"):
    first = recipe(encoding, context=TRAINED)
    done = train(first, corpus(), tmp_path / "first", device=CPU)
    keep(done.model, tmp_path / "first" / "model", first, corpus())
    return tmp_path / "first"


def asked(checkpoint, *, rule="yarn", length=(48,), steps=(3,), **changes):
    return ExtendRecipe(
        checkpoint=str(checkpoint), rule=rule, length=length, steps=steps, **SETTINGS | changes
    )


def losses(extension):
    return {row.name: [measured.loss for measured in row.measurements] for row in extension.rows}


def test_extended_model_has_the_rule_and_the_history_and_what_it_was_is_untouched(checkpoint, tmp_path):
    before = {path: path.read_bytes() for path in (checkpoint / "model").iterdir()}
    found = extend(asked(checkpoint, rule="pi"), tmp_path / "out", figure=False)
    model = load(tmp_path / "out" / "model")
    assert model.config.encoding.frequencies == Linear(base=1e4, factor=4.0)
    assert [(stage.length, stage.tokens) for stage in read_history(tmp_path / "out" / "model")] == [
        (TRAINED, 8 * 3 * TRAINED),
        (48, 3 * 2 * 48),
    ]
    assert {path: path.read_bytes() for path in (checkpoint / "model").iterdir()} == before
    assert list(losses(found)) == ["before", "pi", "pi, 3 steps"]
    assert [measured.length for measured in found.rows[0].measurements] == [12, 24, 48]
    assert {measured.tokens for row in found.rows for measured in row.measurements} == {200}


def test_reported_losses_are_those_of_the_models_it_names(checkpoint, tmp_path):
    found = extend(asked(checkpoint), tmp_path / "out", figure=False)
    plan = module.windows(corpus(), "test", length=24, stride=12, limit_tokens=200)
    for name, folder in (("before", checkpoint), ("yarn, 3 steps", tmp_path / "out")):
        expected = measure(load(folder / "model"), plan, length=24, stride=12, device=CPU).loss
        assert losses(found)[name][1] == pytest.approx(expected, rel=1e-6)


def test_no_steps_change_the_rates_and_no_weight(checkpoint, tmp_path):
    found = extend(asked(checkpoint, steps=(0,)), tmp_path / "out", figure=False)
    before, after = load(checkpoint / "model"), load(tmp_path / "out" / "model")
    assert after.config.encoding.frequencies == YaRN(base=1e4, factor=4.0, original_length=TRAINED)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert list(losses(found)) == ["before", "yarn"]
    assert read_history(tmp_path / "out" / "model") == read_history(checkpoint / "model")


@pytest.mark.parametrize("encoding", ["pope", "tapa"])
def test_encodings_that_need_no_rule_are_continued_as_they_are(tmp_path, encoding):
    checkpoint = trained(tmp_path, encoding)
    found = extend(asked(checkpoint, rule="none"), tmp_path / "out", figure=False)
    assert load(tmp_path / "out" / "model").config == load(checkpoint / "model").config
    assert list(losses(found)) == ["before", "none, 3 steps"]


def test_a_schedule_continues_each_length_from_the_one_before_with_the_rule_of_its_length(
    checkpoint, tmp_path
):
    found = extend(asked(checkpoint, length=(24, 48), steps=(2, 3)), tmp_path / "out", figure=False)
    assert [stage.rule.factor for stage in found.stages] == [2.0, 4.0]
    between = tmp_path / "out" / "stages" / "24" / "model"
    facts = next((tmp_path / "out" / "stages" / "48").glob("checkpoint-*/facts.json"))
    assert json.loads(facts.read_text())["recipe"]["initial"]["folder"] == str(between)
    assert [stage.length for stage in read_history(tmp_path / "out" / "model")] == [12, 24, 48]


def test_the_search_finds_divisors_no_worse_than_the_published_ones(checkpoint, tmp_path):
    way = {"kind": "longrope", "population": 4, "generations": 2, "children": 2, "tokens": 60}
    found = extend(asked(checkpoint, rule=way, steps=(0,)), tmp_path / "out", figure=False)
    assert found.stages[0].candidates == 8
    assert isinstance(found.stages[0].rule, LongRoPE)
    tried = json.loads((tmp_path / "out" / "stages" / "48" / "search.json").read_text())
    assert found.stages[0].rule.long_factor == tuple(min(tried, key=lambda c: c["loss"])["divisors"])


def test_a_stopped_extension_ends_as_an_unstopped_one(checkpoint, tmp_path, monkeypatch):
    wanted = asked(checkpoint, length=(24, 48), steps=(2, 5))
    whole = extend(wanted, tmp_path / "whole", figure=False)

    class Impatient:
        asked = 0

        def __call__(self):
            Impatient.asked += 1
            return Impatient.asked % 4 == 0

    monkeypatch.setattr(module, "stoppable", lambda _agreed: nullcontext(Impatient()))
    stops, resume = 0, False
    while True:
        try:
            parts = extend(wanted, tmp_path / "parts", resume=resume, figure=False)
            break
        except Interrupted:
            stops, resume = stops + 1, True
    assert stops >= 2
    assert losses(parts) == losses(whole)
    assert read_begun(tmp_path / "parts").recipe == wanted


@pytest.mark.parametrize("lost", ["model", "stages/24/model"])
def test_a_model_that_is_gone_is_made_again_from_its_last_checkpoint(checkpoint, tmp_path, lost):
    wanted, out = asked(checkpoint, length=(24, 48), steps=(2, 5)), tmp_path / "out"
    whole = extend(wanted, out, figure=False)
    weights = (out / lost / "model.safetensors").read_bytes()
    for path in (out / lost, out / "evaluations"):
        shutil.rmtree(path)
    (out / "report.json").unlink()
    assert losses(extend(wanted, out, resume=True, figure=False)) == losses(whole)
    assert (out / lost / "model.safetensors").read_bytes() == weights


def test_table_and_figure_hold_every_row(checkpoint, tmp_path):
    found = extend(asked(checkpoint, steps=(0,)), tmp_path / "out")
    assert table(found).row_count == 2
    assert "yarn" in (tmp_path / "out" / "figure.svg").read_text()
    assert json.loads((tmp_path / "out" / "report.json").read_text())["recipe"]["recipe"]["rule"] == {
        "kind": "yarn"
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": (12,)}, "length 12 is not above 12, at which .* was trained: choose a longer one"),
        ({"length": (1024,), "evaluate_tokens": 5000}, "1024 needs a document of 1025"),
        ({"evaluate_tokens": 40}, "evaluate_tokens 40 do not fill one window of 48"),
        ({"rule": "longrope", "length": (48,)}, None),
        ({"trained_length": 16}, "trained_length is 16, but .* was trained at 12: leave it out"),
        ({"steps": (1,)}, "warmup 1 leaves nothing of steps 1"),
        ({"steps": (0,), "rule": "none"}, "0 steps change rates alone"),
        ({"length": (24, 48)}, "2 lengths have 1 numbers of steps"),
        ({"length": (48, 24), "steps": (2, 2)}, "lengths must rise, but are 48, 24"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(checkpoint, tmp_path, changes, message):
    if message is None:
        changes = {**changes, "rule": {"kind": "longrope", "tokens": 40}}
        message = "tokens of the rule's search 40 do not fill one window of 48"
    with pytest.raises(ValueError, match=message):
        extend(asked(checkpoint, **changes), tmp_path / "out", figure=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("yarn", "rule 'yarn' changes rates, and the encoding has none; use --rule none"),
        (
            "longrope",
            "rule 'longrope' searches from plain rates, and the checkpoint has none; use --rule none",
        ),
    ],
)
def test_a_rule_that_does_not_apply_is_refused_before_anything_is_written(tmp_path, rule, said):
    checkpoint = trained(tmp_path, "tapa")
    with pytest.raises(ValueError, match=said):
        extend(asked(checkpoint, rule=rule), tmp_path / "out", figure=False)
    assert not (tmp_path / "out").exists()


def test_a_grid_for_other_sizes_is_refused(checkpoint, tmp_path):
    rule = {"kind": "grid", "frequencies": {"kind": "explicit", "values": [1.0]}}
    with pytest.raises(ValueError, match="Explicit lists 1 channels and n is 4"):
        extend(asked(checkpoint, rule=rule), tmp_path / "out", figure=False)


def test_a_checkpoint_that_does_not_say_its_length_is_told_it(checkpoint, tmp_path):
    save(load(checkpoint / "model"), tmp_path / "bare")
    with pytest.raises(ValueError, match="does not say the length it was trained at: give --trained-length"):
        extend(asked(tmp_path / "bare"), tmp_path / "out", figure=False)
    found = extend(asked(tmp_path / "bare", steps=(0,), trained_length=12), tmp_path / "out", figure=False)
    assert found.trained_length == 12


def test_a_checkpoint_of_other_tokens_is_refused(checkpoint, tmp_path, monkeypatch):
    wide = replace(corpus(), vocab_size=17)
    monkeypatch.setattr(module, "load", lambda _name, *, tokenizer: wide)
    with pytest.raises(ValueError, match="has 17 tokens and the model knows 16"):
        extend(asked(checkpoint), tmp_path / "out", figure=False)


def test_resuming_as_something_else_or_from_other_weights_is_refused(checkpoint, tmp_path):
    wanted = asked(checkpoint)
    extend(wanted, tmp_path / "out", figure=False)
    with pytest.raises(ValueError, match=r"another steps"):
        extend(asked(checkpoint, steps=(4,)), tmp_path / "out", resume=True, figure=False)
    (tmp_path / "out" / "report.json").unlink()
    model = load(checkpoint / "model")
    with torch.no_grad():
        model.norm.weight.mul_(1.5)
    save(model, checkpoint / "model")
    with pytest.raises(ValueError, match="the checkpoint or the corpus has changed since"):
        extend(wanted, tmp_path / "out", resume=True, figure=False)


@pytest.mark.slow
@pytest.mark.parametrize("context_processes", [1, 2])
def test_two_processes_extend_as_one(checkpoint, tmp_path, context_processes):
    pytest.importorskip("accelerate")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    program = ["-m", "tests.train.extended", str(checkpoint), str(tmp_path / "two"), str(context_processes)]
    done = subprocess.run([*launch, *program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    two = read(tmp_path / "two" / "report.json", TypeAdapter(Report), "", "").values
    one = extend(request(str(checkpoint), 1), tmp_path / "one", figure=False)
    for mine, other in zip(two.rows, one.rows, strict=True):
        assert mine.name == other.name
        for at, expected in zip(mine.measurements, other.measurements, strict=True):
            assert at.loss == pytest.approx(expected.loss, rel=1e-5)
    assert [stage.rule for stage in two.stages][:1] == [stage.rule for stage in one.stages][:1]
