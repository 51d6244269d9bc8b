import dataclasses
import os
import resource

import pytest
import torch

from phasewise.train.checkpoint import Checkpoint, load, save, saved

from .small import CPU


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        step=step,
        seconds=1.5,
        recipe={"seed": 0, "model": {"encoding": {"kind": "rope"}}},
        corpus="hash",
        model={"weight": torch.full((50, 50), float(step))},
        optimizer={
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        random={"cpu": torch.get_rng_state()},
    )


def test_what_is_read_is_what_was_written(tmp_path):
    written = checkpoint(7)
    read = load(save(tmp_path, written), device=CPU)
    for field in dataclasses.fields(Checkpoint):
        assert repr(getattr(read, field.name)) == repr(getattr(written, field.name))
    assert torch.equal(read.model["weight"], written.model["weight"])
    assert torch.equal(read.random["cpu"], written.random["cpu"])


def test_the_last_two_are_kept_in_order_of_steps(tmp_path):
    paths = [save(tmp_path, checkpoint(step)) for step in (9, 10, 100)]
    assert saved(tmp_path) == paths[1:]


@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_damaged_checkpoint_is_refused_and_names_the_one_before(tmp_path, harm):
    before, last = save(tmp_path, checkpoint(1)), save(tmp_path, checkpoint(2))
    content = bytearray(last.read_bytes())
    if harm == "cut":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 1
    last.write_bytes(content)
    with pytest.raises(ValueError, match=f"is damaged.*delete it to go on from {before.name}"):
        load(last, device=CPU)
    assert load(before, device=CPU).step == 1


def test_damaged_first_checkpoint_says_to_start_again(tmp_path):
    path = save(tmp_path, checkpoint(1))
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="delete it to start this run again"):
        load(path, device=CPU)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_failed_write_leaves_the_earlier_checkpoints_and_nothing_else(tmp_path, monkeypatch, fails):
    earlier = [save(tmp_path, checkpoint(step)) for step in (1, 2)]

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, fails, no_space)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, checkpoint(3))
    assert sorted(tmp_path.iterdir()) == earlier
    assert load(earlier[1], device=CPU).step == 2


@pytest.mark.parametrize("room", [10_000, 10_300])
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
