import pytest
import torch


@pytest.mark.parametrize("turn", ["first", "again"])
def test_every_test_draws_the_same_from_the_global_generator(turn):
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.rand(3), expected), turn
