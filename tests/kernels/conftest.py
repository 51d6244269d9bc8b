"""Uninitialised memory is NaN in every kernel test, so that an element nobody writes is found."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _memory_is_filled_with_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
