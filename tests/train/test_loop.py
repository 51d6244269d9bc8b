import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from phasewise.data import Documents, batch, windows
from phasewise.encodings import ENCODINGS
from phasewise.evaluate import measure
from phasewise.interrupt import Interrupted
from phasewise.model import Transformer
from phasewise.train import objective, prefetch
from phasewise.train.checkpoint import load, saved
from phasewise.train.loop import Diverged, train

from .small import CPU, VOCAB, corpus, recipe


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


@pytest.mark.parametrize("encoding", ["pope", "tapa"])
def test_recomputed_blocks_and_accumulated_parts_give_the_losses_of_the_plain_step(tmp_path, encoding):
    run(tmp_path / "plain", recipe(encoding, dropout=0.1))
    run(tmp_path / "recomputed", recipe(encoding, dropout=0.1, recompute=True))
    assert metrics(tmp_path / "recomputed") == metrics(tmp_path / "plain")
    run(tmp_path / "whole", recipe(encoding))
    run(tmp_path / "parts", recipe(encoding, accumulate=3))
    losses = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("parts", "whole"))
    assert next(losses) == pytest.approx(next(losses), rel=2e-6)


def test_parts_of_a_batch_weigh_as_many_tokens_as_they_score(tmp_path):
    """Rows of a short document score fewer tokens; the batch's loss is the mean over tokens, not over parts."""
    splits = dict(corpus().splits)
    short = [np.arange(length) % VOCAB for length in (3, 6, 14)]
    splits["train"] = Documents.join(short, vocab_size=VOCAB)
    data = dataclasses.replace(corpus(), splits=splits)
    run(tmp_path / "whole", recipe(), data=data)
    run(tmp_path / "parts", recipe(accumulate=3), data=data)
    losses = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("parts", "whole"))
    assert next(losses) == pytest.approx(next(losses), rel=2e-6)


def test_bfloat16_keeps_weights_and_phases_in_float32_and_learns_alike(tmp_path):
    wide, narrow = (
        run(tmp_path / precision, recipe("pope", steps=60, precision=precision))
        for precision in ("float32", "bfloat16")
    )
    assert {weight.dtype for weight in narrow.model.parameters()} == {torch.float32}
    assert narrow.loss == pytest.approx(wide.loss, rel=0.02)
    assert narrow.loss != wide.loss


def test_packed_rows_are_trained_on_and_documents_do_not_see_each_other(tmp_path):
    data = corpus()
    run(tmp_path / "packed", recipe(packed=True), data=data)
    drawn = batch(data, "train", step=0, context=12, batch_size=3, seed=0, packed=True)
    torch.manual_seed(0)
    model = Transformer(recipe().model)
    loss = objective.summed_loss(model(drawn.tokens, at=drawn.positions), drawn.targets) / drawn.scored
    assert metrics(tmp_path / "packed")[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_validation_loss_is_that_of_the_model_then_and_disturbs_nothing(tmp_path):
    given = recipe(dropout=0.2, evaluate_every=4, evaluate_tokens=100)
    trained = run(tmp_path / "watched", given)
    run(tmp_path / "plain", recipe(dropout=0.2))
    lines = metrics(tmp_path / "watched")
    assert [line["step"] for line in lines if "validation_loss" in line] == [4, 8]
    tiles = windows(corpus(), "validation", length=12, limit_tokens=100, batch_size=8)
    measured = measure(trained.model, tiles, length=12, stride=12, device=CPU)
    assert lines[-1].pop("validation_loss") == pytest.approx(measured.loss, rel=1e-6)
    del lines[3]["validation_loss"]
    assert lines == metrics(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_blocks_compile_once_for_all_layers_and_give_the_eager_losses(tmp_path):
    torch.compiler.reset()
    run(tmp_path / "eager", recipe("pope"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(tmp_path / "compiled", recipe("pope", compile=True))
    losses = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("compiled", "eager"))
    assert next(losses) == pytest.approx(next(losses), rel=1e-5)


def test_a_failing_corpus_is_heard_of_at_its_step_and_not_swallowed_by_the_thread(tmp_path, monkeypatch):
    genuine = prefetch.batch

    def broken(*arguments, step, **options):
        if step == 5:
            raise OSError("the disk has gone")
        return genuine(*arguments, step=step, **options)

    monkeypatch.setattr(prefetch, "batch", broken)
    with pytest.raises(OSError, match="the disk has gone"):
        run(tmp_path, recipe())
    assert len(metrics(tmp_path)) == 5
