"""flash-attn-4 is used when it is the known version and loads; otherwise auto takes the next and says why."""

import warnings

import pytest
import torch

from phasewise import TAPA, RoPE, choose
from phasewise.fused import Hardware
from phasewise.kernels import packages

ENCODINGS = {"rope": (RoPE(head_dim=64), "cudnn"), "tapa": (TAPA(head_dim=64), "triton")}


@pytest.fixture
def installed(monkeypatch):
    """Pretends that some version of flash-attn-4 is installed, or none; what it loads is what this machine has."""
    packages._failure.cache_clear()
    yield lambda version: monkeypatch.setattr(packages, "_FLASH", version)
    packages._failure.cache_clear()


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"not installed; `pip install phasewise\[flash\]`"),
        ("4.1.0", f"flash-attn-4 4.1.0 is installed.*pip install flash-attn-4=={packages.FLASH_VERSION}"),
        (packages.FLASH_VERSION, r"does not load \(ImportError: no libcuda\)"),
    ],
)
def test_auto_passes_over_a_flash_that_cannot_be_used_and_says_why(
    installed, monkeypatch, name, version, message
):
    def broken(module):
        raise ImportError("no libcuda\nand more lines")

    installed(version)
    monkeypatch.setattr(packages.importlib, "import_module", broken)
    encoding, following = ENCODINGS[name]
    q = torch.empty(1, 2, 128, 64, device="meta", dtype=torch.bfloat16)
    hopper = Hardware("cuda", (9, 0))
    choice = choose(q, q, q, encoding, hardware=hopper)
    assert choice.impl == following
    assert "flash-attn-4" in choice.reason
    with pytest.raises(ValueError, match=message):
        choose(q, q, q, encoding, hardware=hopper, impl="flash")


def test_a_module_that_does_not_load_is_tried_once(installed, monkeypatch):
    tried = []

    def broken(module):
        tried.append(module)
        raise RuntimeError("broken")

    installed(packages.FLASH_VERSION)
    monkeypatch.setattr(packages.importlib, "import_module", broken)
    assert packages.flash_obstacle("some.module") == packages.flash_obstacle("some.module")
    assert tried == ["some.module"]


def test_what_a_module_warns_of_as_it_loads_does_not_keep_it_from_loading(installed, monkeypatch):
    def warning(module):
        warnings.warn("Arch from arch.py is deprecated", DeprecationWarning, stacklevel=1)

    installed(packages.FLASH_VERSION)
    monkeypatch.setattr(packages.importlib, "import_module", warning)
    assert packages.flash_obstacle("some.module") is None
