import json
import math

import pytest
import torch

from phasewise.encodings import ENCODINGS
from phasewise.interrupt import Interrupted
from phasewise.model import Transformer
from phasewise.train import objective
from phasewise.train.checkpoint import load, saved
from phasewise.train.loop import Diverged, train

from .small import CPU, corpus, recipe


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(folder, given, **options):
    return train(given, options.pop("data", corpus()), folder, device=CPU, **options)


def interrupt_at(step):
    """A `stop` that says yes when asked after `step` steps of a sitting."""
    asked = iter(range(1, 1000))
    return lambda: next(asked) == step


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_resumed_run_equals_the_uninterrupted_one_to_the_last_digit(tmp_path, encoding):
    given = recipe(encoding, dropout=0.2)
    whole = run(tmp_path / "whole", given)
    for step in (2, 3):
        with pytest.raises(Interrupted, match="step"):
            run(tmp_path / "parts", given, stop=interrupt_at(step))
    parts = run(tmp_path / "parts", given)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert parts.loss == whole.loss
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[name], weight), name


def test_run_killed_between_checkpoints_repeats_the_steps_since_the_last(tmp_path):
    given = recipe(dropout=0.2)
    run(tmp_path / "whole", given)

    def kill(step, _loss):
        if step == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "parts", given, on_step=kill)
    steps = []
    run(tmp_path / "parts", given, on_step=lambda step, _loss: steps.append(step))
    assert steps == [4, 5, 6, 7, 8]
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_one_seed_gives_equal_losses_and_another_seed_other_ones(tmp_path):
    runs = [run(tmp_path / str(number), recipe(seed=seed)) for number, seed in enumerate((5, 5, 6))]
    assert metrics(tmp_path / "0") == metrics(tmp_path / "1") != metrics(tmp_path / "2")
    assert runs[0].loss == runs[1].loss != runs[2].loss


def test_callers_random_state_is_left_alone(tmp_path):
    before = torch.get_rng_state()
    run(tmp_path, recipe(dropout=0.2))
    assert torch.equal(torch.get_rng_state(), before)


def test_recipes_threads_are_used_and_the_callers_are_given_back(tmp_path):
    before, used = torch.get_num_threads(), set()
    run(tmp_path, recipe(threads=3), on_step=lambda *_: used.add(torch.get_num_threads()))
    assert (used, torch.get_num_threads()) == ({3}, before)


def test_training_learns_what_can_be_learned(tmp_path):
    trained = run(tmp_path, recipe(steps=150, warmup=10, batch_size=8, context=24))
    assert math.log(2) - 0.05 < trained.loss < math.log(2) + 0.1  # one of two tokens follows


def test_metrics_hold_a_line_a_step_with_its_learning_rate_and_gradient_norm(tmp_path):
    run(tmp_path, recipe())
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["learning_rate"] for line in lines][:2] == [5e-3, 1e-2]
    assert all(line["gradient_norm"] > 0 for line in lines)


def test_trained_loss_is_the_mean_of_the_last_tenth_of_the_steps(tmp_path):
    trained = run(tmp_path, recipe(steps=20, warmup=2))
    assert trained.loss == pytest.approx(sum(line["loss"] for line in metrics(tmp_path)[-2:]) / 2, rel=1e-15)


def test_clipping_bounds_the_step_but_reports_the_norm_before_it(tmp_path):
    run(tmp_path / "free", recipe(clip=1e9))
    run(tmp_path / "clipped", recipe(clip=1e-9))
    free, clipped = metrics(tmp_path / "free"), metrics(tmp_path / "clipped")
    assert free[0] == clipped[0]
    assert free[-1]["loss"] < clipped[-1]["loss"]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_divergence_stops_at_its_step_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, kind):
    calls = iter(range(1, 100))
    genuine = objective.summed_loss

    def broken(logits, targets):
        loss = genuine(logits, targets)
        if next(calls) < 6:
            return loss
        return loss * math.nan if kind == "loss" else loss + (logits.sum() * 0).sqrt()

    monkeypatch.setattr(objective, "summed_loss", broken)
    with pytest.raises(Diverged, match=r"at step 6: .*nan.*checkpoint-00000003-.*Lower the learning rate"):
        run(tmp_path, recipe())
    state = {"model": Transformer(recipe().model).state_dict(), "random": {}}
    assert load(saved(tmp_path)[-1], state).step == 3
    assert all(weight.isfinite().all() for weight in state["model"].values())
    monkeypatch.undo()
    assert run(tmp_path, recipe()).loss > 0


def test_folder_of_another_recipe_is_refused_naming_what_differs(tmp_path):
    run(tmp_path, recipe())
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="another learning_rate, seed: use another folder"):
        run(tmp_path, recipe(learning_rate=2e-2, seed=1))
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_changed_corpus_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, recipe(), stop=interrupt_at(3))
    with pytest.raises(ValueError, match="the corpus small has changed"):
        run(tmp_path, recipe(), data=corpus(seed=1))


def test_metrics_shorter_than_the_checkpoint_are_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, recipe(), stop=interrupt_at(3))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds 0 of the checkpoint's 3 steps"):
        run(tmp_path, recipe())


@pytest.mark.parametrize("line", ["{}", "[]", "garbage", '{"loss": null}', "3", "\udcff"])
def test_damaged_metrics_are_named_and_deleting_the_folder_trains_again(tmp_path, line):
    run(tmp_path, recipe())
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([line, *text[1:]]), errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"metrics.jsonl is damaged .* or delete {tmp_path} to train this"):
        run(tmp_path, recipe())


def test_missing_metrics_are_named_and_deleting_the_folder_trains_again(tmp_path):
    run(tmp_path, recipe())
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(
        ValueError, match=rf"holds 0 of the checkpoint's 8 steps: restore it, or delete {tmp_path}"
    ):
        run(tmp_path, recipe())


def test_divergence_at_the_first_step_speaks_of_no_checkpoint(tmp_path):
    with pytest.raises(Diverged) as diverged:
        run(tmp_path, recipe(learning_rate=1e30, final_learning_rate=0, warmup=0))
    assert "checkpoint" not in str(diverged.value)
