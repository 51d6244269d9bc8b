import os
import resource
import traceback

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from phasewise.train import checkpoint as checkpoints
from phasewise.train.checkpoint import Checkpoint, load, save, saved


def state(value: float) -> dict:
    return {
        "model": {"weight": torch.full((50, 50), value)},
        "optimizer": {
            "state": {"weight": {"step": torch.tensor(value)}},
            "param_groups": [{"lr": value, "betas": (0.9, 0.99)}],
        },
        "random": {"cpu0": torch.get_rng_state()},
    }


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step=step,
        seconds=1.5,
        recipe={"seed": 0, "model": {"encoding": {"kind": "rope"}}},
        corpus="hash",
        state=state(float(step)),
    )


def test_what_is_read_is_what_was_written(tmp_path):
    written, read = checkpoint(7), state(0.0)
    torch.rand(1)
    known = load(save(tmp_path, written), read)
    for name in ("step", "seconds", "recipe", "corpus"):
        assert getattr(known, name) == getattr(written, name)
    assert torch.equal(read["model"]["weight"], written.state["model"]["weight"])
    assert torch.equal(read["random"]["cpu0"], written.state["random"]["cpu0"])
    assert read["optimizer"] == written.state["optimizer"]


def test_generators_that_the_checkpoint_does_not_know_are_left_out(tmp_path):
    read = state(0.0)
    read["random"]["cpu1"] = torch.get_rng_state()
    load(save(tmp_path, checkpoint(7)), read)
    assert list(read["random"]) == ["cpu0"]


def test_state_of_another_shape_is_refused(tmp_path):
    read = state(0.0)
    read["model"]["weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"does not fit this model \(.*[Ss]ize.*: use another folder"):
        load(save(tmp_path, checkpoint(7)), read)


def test_the_last_two_are_kept_in_order_of_steps(tmp_path):
    paths = [save(tmp_path, checkpoint(step)) for step in (9, 10, 100)]
    assert saved(tmp_path) == paths[1:]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "facts.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "lose"])
def test_damaged_checkpoint_is_refused_and_names_the_one_before(tmp_path, harm, name):
    before, last = save(tmp_path, checkpoint(1)), save(tmp_path, checkpoint(2))
    content = bytearray((last / name).read_bytes())
    (last / name).unlink()
    if harm == "cut":
        (last / name).write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        content[len(content) // 2] ^= 1
        (last / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"is damaged \({name} .*delete it to go on from {before.name}"):
        load(last, state(0.0))
    assert load(before, state(0.0)).step == 1


def test_damaged_first_checkpoint_says_to_start_again(tmp_path):
    path = save(tmp_path, checkpoint(1))
    (path / "facts.json").write_bytes(b"")
    with pytest.raises(ValueError, match="delete it to start this run again"):
        load(path, state(0.0))


def test_leftovers_of_a_killed_write_are_no_checkpoint_and_do_not_disturb_the_next(tmp_path):
    path = save(tmp_path, checkpoint(1))
    (tmp_path / "checkpoint.partial").mkdir()
    (tmp_path / "checkpoint.partial" / "__0_0.distcp").write_bytes(b"half")
    assert saved(tmp_path) == [path]
    after = save(tmp_path, checkpoint(2))
    assert sorted(tmp_path.iterdir()) == [path, after]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_failed_write_leaves_the_earlier_checkpoints_and_nothing_else(tmp_path, monkeypatch, fails):
    earlier = [save(tmp_path, checkpoint(step)) for step in (1, 2)]

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, no_space)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, checkpoint(3))
    assert sorted(tmp_path.iterdir()) == earlier
    assert load(earlier[1], state(0.0)).step == 2


@pytest.mark.parametrize("room", [2_000, 10_300])
def test_full_disk_is_named_with_the_path_whatever_torch_makes_of_it(tmp_path, room):
    earlier = [save(tmp_path, checkpoint(step)) for step in (1, 2)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*checkpoint\.partial"):
            save(tmp_path, checkpoint(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(tmp_path.iterdir()) == earlier


def test_full_disk_that_another_process_tells_of_is_named_with_the_path(tmp_path, monkeypatch):
    lost = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598\nframes")

    def no_space(*_, **_options):
        raise CheckpointException("write", {1: (lost, traceback.StackSummary())})

    monkeypatch.setattr(checkpoints, "save_sharded", no_space)
    with pytest.raises(
        OSError, match=r"checkpoint.partial is not whole, as on a full disk: \[enforce .* 598$"
    ):
        save(tmp_path, checkpoint(7))
    assert not list(tmp_path.iterdir())
