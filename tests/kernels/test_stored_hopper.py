"""Stored score gradients by the kernel for compute capability 9.0, as it compiles; on a GPU: test_separable_gpu.py."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import stored_hopper
from tests.kernels.compiled_gluon import (
    Compiled,
    compiled,
    compiled_each,
    holds_barriers,
    holds_operands,
    tile_of,
)

FORMS = [(v_width, parts) for v_width in (16, 32, 64, 128) for parts in (False, True)]


@pytest.fixture(scope="module")
def intermediates():
    return compiled_each(compiled_form, FORMS)


@pytest.mark.slow
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_a_partition_takes_every_barrier_that_is_made(form, intermediates):
    holds_barriers(intermediates[form], least=4)


@pytest.mark.slow
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_keys_and_values_that_registers_hold_are_not_written_over(form, intermediates):
    held = holds_operands(intermediates[form])
    assert held >= 64 if FORMS[form][0] == 128 else held == 0


def compiled_form(form: tuple[int, bool]) -> Compiled:
    """The kernel of PoPE's 128 channels; in parts: with sums that wait for the next queries."""
    from triton.experimental.gluon import language as gl

    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    square = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    v_width, parts = form
    columns_of = {"q": 256, "k": 256, "v": v_width, "dout": v_width}
    types = {
        **{f"{name}_desc": tile_of(64, columns) for name, columns in columns_of.items()},
        **{f"{name}_desc": f"tensordesc<fp32[1, 64],{plain!r}>" for name in ("lse2", "delta")},
        "ds_desc": f"tensordesc<bf16[64, 64],{square!r}>",
        **{"dv_ptr": "*bf16", "sum_ptr": "*fp32", "scale_log2": "fp32"},
    }
    constants = {"CAUSAL": True, "SIDE": 128, "BLOCK_M": 64, "STAGES": 2}
    if not parts:
        constants["sum_ptr"] = None
    return compiled(stored_hopper.score_grad_kernel, types, constants)
