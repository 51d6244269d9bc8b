"""Kernels in Gluon as the compiler makes them for compute capability 9.0, which needs no GPU."""

import multiprocessing
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

spawn = multiprocessing.get_context("spawn")


def compiled_each(make: Callable[[dict], str], rows: list[dict]) -> list[str]:
    """What `make` gives of each, in a process that interprets nothing."""
    with ProcessPoolExecutor(1, spawn, initializer=interpret_nothing) as process:
        return list(process.map(make, rows))


def interpret_nothing() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def tile_of(rows: int, columns: int) -> str:
    """The type of a descriptor of so much of one head, in half precision."""
    from triton.experimental.gluon import language as gl

    shape = [1, 1, rows, columns]
    return f"tensordesc<bf16{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.float16)!r}>"


def ttgir(kernel, types: dict, constants: dict) -> str:
    """The kernel in Triton's language for GPUs. Strides are of dense channels, what has no type an int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    def kind(name: str) -> str | tuple[str, ...]:
        if name.endswith("_strides"):
            return ("i32", "i32", "i32", "constexpr")
        return "constexpr" if name in constants else types.get(name, "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    at = {name: number for number, name in enumerate(signature)}
    fixed = {(at[name],): value for name, value in constants.items()}
    fixed |= {(at[name], 3): 1 for name in signature if name.endswith("_strides")}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=fixed)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ttgir"]


def holds_barriers(kernel: str, *, least: int = 6) -> None:
    """A partition takes each, or the compiler writes over it, which a GPU puts back when it changes processes."""
    barrier_of = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", kernel))
    made = {barrier_of.get(name, name) for name in re.findall(r"ttng\.init_barrier (%\w+)", kernel)}
    (taken,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", kernel)
    assert len(made) >= least
    assert made <= set(re.findall(r"%\w+", taken))
