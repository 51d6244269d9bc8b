"""Operators run with the device of their tensors current."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from phasewise.kernels import hardware
from phasewise.kernels.hardware import on_its_device


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda:1", [torch.device("cuda:1")]), ("cuda:0", []), ("cpu", [])]
)
def test_an_operator_runs_with_the_device_of_its_first_tensor_current(device, expected, monkeypatch):
    made_current = []

    def current(device):
        made_current.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    first = SimpleNamespace(device=torch.device(device))
    assert on_its_device(lambda x, y: (x, y))(first, 2) == (first, 2)
    assert made_current == expected


def test_a_device_of_rocm_has_no_cuda_capability_whatever_it_calls_itself(monkeypatch):
    """An MI250 says (9, 0) of itself; the kernels hold instructions of CUDA's."""
    mi250 = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(hardware, "_properties", lambda device: mi250)
    assert hardware.capability(torch.device("cuda:0")) == (9, 0)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert hardware.capability(torch.device("cuda:0")) is None
    assert hardware.capability(torch.device("cpu")) is None
