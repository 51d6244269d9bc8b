"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before anything imports triton."""

import fcntl
import gc
import os
import shutil

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope):
        """Triton 3.6 converts one-element arrays with int(), which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test draws the same from the global generator in any order and any selection."""
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """What a test held of a GPU's memory is free for the processes that share it."""
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def tens_of_gigabytes(tmp_path_factory):
    """For tests that take much of a GPU's memory: one at a time, of all processes that share the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with open(folder / "tens-of-gigabytes.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder of a small Hugging Face decoder."""
    pytest.importorskip("transformers", reason="Hugging Face checkpoints need transformers")
    from tests.hf.tiny import tiny

    folder = tmp_path_factory.mktemp("llama")
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def copy(llama, tmp_path):
    return shutil.copytree(llama, tmp_path / "copy")
