"""What tuning chooses between can be begun on any GPU, at any widths."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.bench import tune
from phasewise.bench.tunable import chains


@pytest.mark.parametrize("device", ["NVIDIA H200", "a GPU that the table does not know"])
def test_every_family_has_rows_to_begin_with(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: device)
    for chain in chains([16, 64, 96, 128, 256], [1, 2048, 32_768]):
        for stage in chain:
            assert stage
            for subject in stage:
                for length in subject.lengths:
                    present = tune.present(subject, length)
                    assert subject.candidates([present], 0)[0] == present
