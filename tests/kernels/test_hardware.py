"""Operators run with the device of their tensors current."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from phasewise.kernels.hardware import on_its_device


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", [torch.device("cuda:1")]), ("cpu", [])])
def test_an_operator_runs_with_the_device_of_its_first_tensor_current(device, expected, monkeypatch):
    made_current = []

    def current(device):
        made_current.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", current)
    first = SimpleNamespace(device=torch.device(device))
    assert on_its_device(lambda x, y: (x, y))(first, 2) == (first, 2)
    assert made_current == expected
