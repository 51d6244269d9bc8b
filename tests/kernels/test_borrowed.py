"""What is lent by other packages is handed back as it was."""

import sys
from types import ModuleType

import pytest
import torch

borrowed = pytest.importorskip("phasewise.kernels.borrowed", reason="triton is not installed")


def their_choice(head_dim, head_dim_v):
    return "theirs", head_dim, head_dim_v


@pytest.fixture
def interface(monkeypatch):
    """A stand-in for flash-attn-4's interface, whose backward says which tiles it would take, or fails."""
    package, cute, interface = (ModuleType(f"flash_attn{end}") for end in ("", ".cute", ".cute.interface"))
    interface._tile_size_bwd_sm90 = their_choice
    interface.BwdConfig = lambda *tiles: ("ours", *tiles)
    package.cute, cute.interface = cute, interface
    for module in (package, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return interface


def backward(width, v_width):
    wide, narrow = torch.zeros(1, 1, 2, width), torch.zeros(1, 1, 2, v_width)
    lse = torch.zeros(1, 1, 2)
    borrowed.flash_backward(
        wide,
        wide,
        narrow,
        narrow,
        lse,
        narrow,
        None,
        (wide, wide, narrow),
        scale=1.0,
        causal=True,
        window=None,
    )


def test_flash_takes_our_tiles_during_our_call_and_its_own_afterwards(interface):
    taken = []
    interface._flash_attn_bwd = lambda q, k, v, *rest, **options: taken.append(
        interface._tile_size_bwd_sm90(q.shape[3], v.shape[3])
    )
    backward(128, 64)
    backward(64, 64)
    assert taken[0][0] == "ours"
    assert taken[1] == ("theirs", 64, 64)
    assert interface._tile_size_bwd_sm90 is their_choice


def test_flash_has_its_own_tiles_back_after_a_call_that_failed(interface):
    def fails(*arguments, **options):
        raise RuntimeError("out of memory")

    interface._flash_attn_bwd = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        backward(128, 64)
    assert interface._tile_size_bwd_sm90 is their_choice
