"""Stored score gradients by the kernel for compute capability 9.0, as it compiles; on a GPU: test_separable_gpu.py."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import stored_hopper
from tests.kernels.compiled_gluon import compiled_each, holds_barriers, tile_of, ttgir

FORMS = [{"parts": parts} for parts in (False, True)]


@pytest.fixture(scope="module")
def intermediates():
    return compiled_each(compiled, FORMS)


@pytest.mark.slow
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_a_partition_takes_every_barrier_that_is_made(form, intermediates):
    holds_barriers(intermediates[form], least=4)


def compiled(form: dict) -> str:
    """The kernel of PoPE's 128 channels; in parts: with sums that wait for the next queries."""
    from triton.experimental.gluon import language as gl

    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    square = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    types = {
        **{
            f"{name}_desc": tile_of(64, columns) for name, columns in zip("qkv", (256, 256, 128), strict=True)
        },
        **{f"{name}_desc": f"tensordesc<fp32[1, 64],{plain!r}>" for name in ("lse2", "delta")},
        **{"dout_desc": tile_of(64, 128), "ds_desc": f"tensordesc<bf16[64, 64],{square!r}>"},
        **{"dv_ptr": "*bf16", "sum_ptr": "*fp32", "scale_log2": "fp32"},
    }
    constants = {"CAUSAL": True, "SIDE": 128, "BLOCK_M": 64, "STAGES": 2}
    if not form["parts"]:
        constants["sum_ptr"] = None
    return ttgir(stored_hopper.score_grad_kernel, types, constants)
