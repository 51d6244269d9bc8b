"""Tuning writes the launch table row by row; what it measures needs a GPU."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.bench import tune
from phasewise.kernels import table


def row(**changes):
    meta = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    return {"kernel": "tapa.forward", "device": "a GPU", "dtype": "bfloat16", "qk": 64, "v": 64,
            "length": None, "meta": meta, **changes}  # fmt: skip


def test_a_row_takes_the_place_of_its_predecessor_and_nothing_else_changes(tmp_path):
    path = tmp_path / "launch.json"
    before = dict(table.launch_table())
    path.write_text(json.dumps(before))
    tune.write(row(), path)
    tune.write(row(meta={"BLOCK_M": 32}), path)
    after = json.loads(path.read_text())
    assert after["rows"] == [*before["rows"], row(meta={"BLOCK_M": 32})]
    assert after["flash_tiles"] == before["flash_tiles"]


def test_a_row_on_trial_wins_over_the_table_and_leaves_it_as_it_was():
    before = list(table.launch_table()["rows"])
    x = torch.zeros(1)
    trial = row(device="cpu", dtype="float32", meta={"BLOCK_M": 128})
    with tune._first(table.launch_table()["rows"], trial):
        assert table.launch("tapa.forward", x, qk=64, v=64, length=9) == {"BLOCK_M": 128}
    assert table.launch_table()["rows"] == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_tuning_and_measuring_without_a_gpu_say_so():
    from phasewise.cli import main

    with pytest.raises(ValueError, match="CUDA device"):
        tune.tune([64])
    assert main(["bench", "attention", "--out", "x.json"]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tuning_measures_and_keeps_what_is_right(monkeypatch, tmp_path):
    monkeypatch.setattr(
        tune, "SIZES", {"BLOCK_M": (64,), "BLOCK_N": (32, 64), "num_warps": (4,), "num_stages": (2,)}
    )
    monkeypatch.setattr(tune, "write", lambda row: None)
    for found in tune.tune([64], only="forward"):
        assert found["meta"]["BLOCK_M"] == 64
