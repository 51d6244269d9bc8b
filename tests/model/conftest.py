import pytest
import torch

from tests.model.small import ENCODINGS


@pytest.fixture(params=ENCODINGS)
def encoding(request):
    return ENCODINGS[request.param]


@pytest.fixture
def nan_memory():
    """Uninitialised memory holds NaN, so that whatever was never written shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
