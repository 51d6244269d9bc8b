import json
import math

import pytest
import torch

from phasewise.data import load
from phasewise.encodings import ENCODINGS, named
from phasewise.interrupt import Interrupted
from phasewise.train import loop, side_by_side
from phasewise.train.checkpoint import saved
from phasewise.train.loop import Diverged
from phasewise.train.processes import Processes
from phasewise.train.side_by_side import train_side_by_side
from phasewise.train.trainer import Trainer

from .small import CPU, corpus, recipe


def recipes(**changes):
    """Two encodings, two seeds."""
    options = {"dropout": 0.2, "checkpoint_every": 4, **changes}
    return {name: recipe(name, seed=seed, **options) for seed, name in enumerate(("rope", "pope"))}


def run(folder, given, **options):
    return train_side_by_side(
        given, options.pop("data", corpus()), folder, device=CPU, **{"block": 2, **options}
    )


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def interrupt_at(block):
    """A `stop` that says yes when asked after this many blocks of a sitting."""
    asked = iter(range(1, 1000))
    return lambda: next(asked) == block


def test_models_side_by_side_take_the_steps_of_the_ordinary_loop_to_the_last_digit(tmp_path):
    given = {name: recipe(name, dropout=0.2, checkpoint_every=4) for name in ENCODINGS}
    found = run(tmp_path / "together", given)
    for name, each in given.items():
        alone = loop.train(each, corpus(), tmp_path / name, device=CPU)
        assert metrics(tmp_path / "together" / name) == metrics(tmp_path / name)
        assert found[name].loss == alone.loss
        for key, weight in alone.model.state_dict().items():
            assert torch.equal(found[name].model.state_dict()[key], weight), key


def test_phases_with_a_rate_of_their_own_move_so_much_further_here_and_in_the_ordinary_loop(tmp_path):
    given = {
        share: recipe("pope", steps=1, warmup=0, checkpoint_every=1, encoding_rate=share)
        for share in (1.0, 8.0)
    }
    start = Trainer(given[1.0], Processes(rank=0, size=1, device=CPU)).model.state_dict()
    moved = {}
    for share, each in given.items():
        found = run(tmp_path / f"together{share}", {"pope": each}, block=1)["pope"].model.state_dict()
        alone = loop.train(each, corpus(), tmp_path / f"alone{share}", device=CPU).model.state_dict()
        assert all(torch.equal(found[key], alone[key]) for key in start)
        moved[share] = {key: found[key] - start[key] for key in start}
    for key, step in moved[1.0].items():
        torch.testing.assert_close(moved[8.0][key], 8 * step if "phase" in key else step)


def test_several_sittings_equal_one_to_the_last_digit(tmp_path):
    given = recipes()
    run(tmp_path / "whole", given)
    for block in (1, 2):
        with pytest.raises(Interrupted, match=r"step [26] of 8"):
            run(tmp_path / "parts", given, stop=interrupt_at(block))
    run(tmp_path / "parts", given)
    for name in given:
        assert metrics(tmp_path / "parts" / name) == metrics(tmp_path / "whole" / name)


def test_run_killed_between_checkpoints_repeats_the_blocks_since_the_last(tmp_path):
    given = recipes()
    run(tmp_path / "whole", given)

    def kill(steps, _models):
        if steps == 6:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "parts", given, on_block=kill)
    told = []
    run(tmp_path / "parts", given, on_block=lambda steps, _models: told.append(steps))
    assert told == [6, 8]
    for name in given:
        assert metrics(tmp_path / "parts" / name) == metrics(tmp_path / "whole" / name)


@pytest.mark.parametrize(("at", "times"), [(4, 1), (8, 1), (8, 2)])
def test_run_killed_between_the_checkpoints_of_two_models_goes_on_from_the_last_of_both(
    tmp_path, monkeypatch, at, times
):
    given = recipes()
    run(tmp_path / "whole", given)
    saving = side_by_side.save

    def kill(folder, checkpoint):
        if folder.name == "pope" and checkpoint.step == at:
            raise RuntimeError("killed")
        saving(folder, checkpoint)

    monkeypatch.setattr(side_by_side, "save", kill)
    for _ in range(times):
        with pytest.raises(RuntimeError, match="killed"):
            run(tmp_path / "parts", given)
    monkeypatch.setattr(side_by_side, "save", saving)
    told = []
    run(tmp_path / "parts", given, on_block=lambda steps, _models: told.append(steps))
    assert told == list(range(at - 2, 9, 2))
    for name in given:
        assert metrics(tmp_path / "parts" / name) == metrics(tmp_path / "whole" / name)


def test_the_size_of_a_block_changes_no_number(tmp_path):
    given = recipes()
    for block in (1, 4):
        run(tmp_path / str(block), given, block=block)
    for name in given:
        assert metrics(tmp_path / "1" / name) == metrics(tmp_path / "4" / name)


def test_evaluating_between_blocks_changes_no_number(tmp_path):
    def evaluate(_steps, models):
        for model in models.values():
            model.eval()(torch.zeros(1, 4, dtype=torch.int64))
            torch.rand(3)

    given = recipes()
    run(tmp_path / "plain", given)
    run(tmp_path / "watched", given, on_block=evaluate)
    for name in given:
        assert metrics(tmp_path / "plain" / name) == metrics(tmp_path / "watched" / name)


def test_padding_and_the_columns_that_nothing_fills_change_no_loss(tmp_path):
    task = load("indirect-indexing")
    small = recipe("pope", context=50, steps=2, warmup=1, checkpoint_every=2)
    small = small.model_copy(update={"model": small.model.model_copy(update={"vocab_size": task.vocab_size})})
    loop.train(small, task, tmp_path / "alone", device=CPU)
    run(tmp_path, {"pope": small}, data=task)
    for key in ("loss", "gradient_norm"):
        found, expected = ([line[key] for line in metrics(tmp_path / name)] for name in ("pope", "alone"))
        assert found == pytest.approx(expected, rel=1e-5)


def test_callers_random_state_is_left_alone(tmp_path):
    before = torch.get_rng_state()
    run(tmp_path, recipes())
    assert torch.equal(torch.get_rng_state(), before)


def test_divergence_names_the_model_and_the_step_and_the_checkpoints_stay(tmp_path, monkeypatch):
    genuine, calls = side_by_side.Padded.loss, iter(range(1, 100))

    def broken(self, *batch):
        loss = genuine(self, *batch)
        return loss * math.nan if next(calls) == 12 else loss  # the second model's step 6

    monkeypatch.setattr(side_by_side.Padded, "loss", broken)
    with pytest.raises(Diverged, match=r"pope: training diverged at step 6: .*nan.*Lower the learning rate"):
        run(tmp_path, recipes())
    assert [path.name[:19] for path in saved(tmp_path / "pope")] == ["checkpoint-00000004"]
    monkeypatch.undo()
    assert run(tmp_path, recipes())["pope"].loss > 0


def test_models_that_are_not_equally_far_are_refused(tmp_path):
    given = recipes()
    with pytest.raises(Interrupted):
        run(tmp_path, {"rope": given["rope"]}, stop=interrupt_at(1))
    with pytest.raises(ValueError, match=r"no checkpoint of one step \(the last: \{'rope': 2, 'pope': 0\}\)"):
        run(tmp_path, given)


def test_folder_of_another_recipe_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, recipes(), stop=interrupt_at(2))
    with pytest.raises(ValueError, match="another learning_rate"):
        run(tmp_path, recipes(learning_rate=2e-2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 10}, r"one number of steps, not \[8, 10\]"),
        ({"accumulate": 3}, "leave out .*accumulate"),
        ({"packed": True}, "leave out packed"),
        ({"evaluate_every": 2}, "leave out evaluate_every"),
        ({"context_processes": 2}, "leave out context_processes"),
        ({"checkpoint_every": 3}, "checkpoint_every 3 is no multiple of 2"),
    ],
)
def test_recipes_that_cannot_be_trained_side_by_side_are_refused(tmp_path, changes, words):
    given = {**recipes(), "other": recipes(**changes)["rope"]}
    with pytest.raises(ValueError, match=words):
        run(tmp_path, given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("given", "block"), [({}, 2), (recipes(), 0)])
def test_nothing_to_train_is_refused(tmp_path, given, block):
    with pytest.raises(ValueError, match="at least one recipe and a block of at least 1 step"):
        run(tmp_path, given, block=block)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_captured_steps_of_several_sittings_equal_those_of_one_and_of_each_alone(tmp_path, dropout):
    task = load("indirect-indexing")
    model = recipe(dropout=dropout).model.model_copy(
        update={"vocab_size": task.vocab_size, "width": 64, "head_dim": 32, "hidden": 192}
    )
    given = {
        name: recipe(context=50, checkpoint_every=2, precision="bfloat16", seed=seed).model_copy(
            update={"model": model.model_copy(update={"encoding": named(name)})}
        )
        for seed, name in enumerate(("rope", "pope"))
    }
    device, found = torch.device("cuda"), {}
    for folder, chosen, sittings in (
        ("whole", given, [9]),
        ("parts", given, [1, 2, 9]),
        ("alone", {"pope": given["pope"]}, [9]),
    ):
        for block in sittings:
            try:
                train_side_by_side(
                    chosen, task, tmp_path / folder, device=device, block=2, stop=interrupt_at(block)
                )
            except Interrupted:
                continue
        found[folder] = {name: metrics(tmp_path / folder / name) for name in chosen}
    assert found["parts"] == found["whole"]
    assert found["alone"]["pope"] == found["whole"]["pope"]
