"""Kernels in Gluon, as they compile for compute capability 9.0: what the compilers must not have done to them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import hopper_forward, joint, stored_hopper, tapa_joint
from phasewise.kernels.table import launch_table
from tests.kernels.compiled_gluon import (
    Compiled,
    compiled,
    compiled_each,
    holds_barriers,
    holds_operands,
    tile_of,
)

pytestmark = [pytest.mark.slow, *([pytest.mark.gpu] if torch.cuda.is_available() else [])]


class Kernel(NamedTuple):
    """A kernel in the forms in which it runs."""

    compile: Callable[[Any], Compiled]
    forms: Sequence[Any]
    barriers: int
    """At least so many are made."""
    held: Callable[[Any], int] | None
    """At least so many registers of a form, or none, hold what tensor cores read over a loop; None: it is written."""


def rows(kernel: str) -> list[dict]:
    """What the launch table has of a kernel in bfloat16."""
    chosen = [row for row in launch_table()["rows"] if row["kernel"] == kernel]
    return [row for row in chosen if row["dtype"] in ("bfloat16", "any")]


def of_float32(rows: int, columns: int) -> str:
    """The type of a descriptor of a matrix in float32."""
    from triton.experimental.gluon import language as gl

    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return f"tensordesc<fp32{[rows, columns]},{plain!r}>"


def forward(row: dict) -> Compiled:
    """Behind a kernel that prepares."""
    meta, width, v_width = dict(row["meta"]), row["qk"], row["v"]
    keys = meta.pop("BLOCK_N")
    tensors = {"q_desc": tile_of(64, width), "k_desc": tile_of(keys, width), "v_desc": tile_of(keys, v_width)}
    pointers = {"out_ptr": "*bf16", "lse_ptr": "*fp32", "draw_ptr": "*i32"}
    constants = {**meta, "D": v_width, "CAUSAL": True}
    kernel = hopper_forward.forward_kernel
    return compiled(kernel, {**tensors, **pointers, "scale_log2": "fp32"}, constants)


def one_pass(row: dict) -> Compiled:
    width, v_width = row["qk"], row["v"]
    columns_of = {"q": width // 2, "k": width // 2, "v": v_width, "dout": v_width}
    sums = {"lse2": (1, 64), "delta": (1, 64), "sum": (width // 8, 256)}
    types = {
        **{f"{name}_desc": tile_of(64, columns) for name, columns in columns_of.items()},
        **{f"{name}_desc": of_float32(*shape) for name, shape in sums.items()},
        **{"dk_ptr": "*bf16", "dv_ptr": "*bf16", "turn_ptr": "*i32", "scale": "fp32", "scale_log2": "fp32"},
    }
    constants = {"GROUP": 1, **row["meta"], "BY_CHANNELS": width > v_width}
    return compiled(joint.joint_kernel, types, constants)


def stored(form: tuple[int, bool]) -> Compiled:
    """Of PoPE's 128 channels; in parts: with sums that wait for the next queries."""
    from triton.experimental.gluon import language as gl

    square = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    v_width, parts = form
    columns_of = {"q": 256, "k": 256, "v": v_width, "dout": v_width}
    types = {
        **{f"{name}_desc": tile_of(64, columns) for name, columns in columns_of.items()},
        **{f"{name}_desc": of_float32(1, 64) for name in ("lse2", "delta")},
        "ds_desc": f"tensordesc<bf16[64, 64],{square!r}>",
        **{"dv_ptr": "*bf16", "sum_ptr": "*fp32", "scale_log2": "fp32"},
    }
    constants = {"CAUSAL": True, "SIDE": 128, "BLOCK_M": 64, "STAGES": 2}
    if not parts:
        constants["sum_ptr"] = None
    return compiled(stored_hopper.score_grad_kernel, types, constants)


def tapa_one_pass(row: dict) -> Compiled:
    meta, width, v_width = dict(row["meta"]), row["qk"], row["v"]
    options = {name: meta.pop(name) for name in ("num_warps", "maxnreg")}
    queries, keys = meta.pop("BLOCK_M"), meta.pop("BLOCK_N")
    sums = {"sum_a": (8, 256), "sum_p": (8, 256), "lse": (1, queries), "delta": (1, queries)}
    types = {
        **{name: tile_of(queries, width // 2) for name in ("q_a", "q_p")},
        **{name: tile_of(keys, width // 2) for name in ("k_a", "k_p")},
        **{"v": tile_of(keys, v_width), "above": tile_of(queries, v_width)},
        **{name: of_float32(*shape) for name, shape in sums.items()},
        **{
            "grad_k_ptr": "*bf16",
            "grad_v_ptr": "*bf16",
            "turn_ptr": "*i32",
            "table_ptr": "*i64",
            "scale": "fp32",
        },
    }
    return compiled(tapa_joint.joint_kernel, types, {"GROUP": 1, **meta}, **options)


KERNELS = {
    "forward": Kernel(forward, rows("separable.hopper.forward"), barriers=6, held=None),
    "one pass": Kernel(
        one_pass, rows("separable.joint"), barriers=6, held=lambda row: 16 * row["meta"]["AHEAD"]
    ),
    "stored": Kernel(
        stored,
        [(v_width, parts) for v_width in (16, 32, 64, 128) for parts in (False, True)],
        barriers=4,
        held=lambda form: 64 * (form[0] == 128),
    ),
    "TAPA's one pass": Kernel(
        tapa_one_pass, rows("tapa.joint"), barriers=4, held=lambda row: int(row["qk"] == 64)
    ),
}


@pytest.fixture(scope="module", params=KERNELS)
def kernel(request) -> tuple[Kernel, list[Compiled]]:
    chosen = KERNELS[request.param]
    return chosen, compiled_each(chosen.compile, chosen.forms)


def test_a_partition_takes_every_barrier_that_is_made(kernel):
    described, forms = kernel
    for form in forms:
        holds_barriers(form, least=described.barriers)


@pytest.mark.parametrize("kernel", [name for name, kernel in KERNELS.items() if kernel.held], indirect=True)
def test_what_registers_hold_over_tiles_is_not_written_over(kernel):
    described, forms = kernel
    for form, made in zip(described.forms, forms, strict=True):
        held, least = holds_operands(made), described.held(form)
        assert held >= least if least else held == 0, form
