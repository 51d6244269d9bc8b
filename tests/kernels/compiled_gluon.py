"""Kernels in Gluon as the compiler makes them for compute capability 9.0, which needs no GPU."""

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

spawn = multiprocessing.get_context("spawn")


class Compiled(NamedTuple):
    """A kernel in Triton's language for GPUs, and as the machine reads it."""

    ttgir: str
    machine_code: str


def compiled_each(make: Callable[[Any], Compiled], forms: Sequence[Any]) -> list[Compiled]:
    """What `make` gives of each, in a process that interprets nothing."""
    with ProcessPoolExecutor(1, spawn, initializer=interpret_nothing) as process:
        return list(process.map(make, forms))


def interpret_nothing() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def tile_of(rows: int, columns: int) -> str:
    """The type of a descriptor of so much of one head, in half precision."""
    from triton.experimental.gluon import language as gl

    shape = [1, 1, rows, columns]
    return f"tensordesc<bf16{shape},{gl.NVMMASharedLayout.get_default_for(shape, gl.float16)!r}>"


def compiled(kernel, types: dict, constants: dict, **options: int) -> Compiled:
    """The kernel; options: those of a launch. Strides are of dense channels, what has no type an int32."""
    import triton
    from triton import knobs
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
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options}).asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        disassemble = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return Compiled(made["ttgir"], subprocess.check_output(disassemble, text=True))


def holds_operands(kernel: Compiled) -> int:
    """What tensor cores read from registers that were filled before a loop is not written over within it.

    ptxas 12.8 does so for some kernels. Returns how many registers are held.
    """
    held: set[str] = set()
    for loop in innermost_loops(kernel.machine_code):
        written: set[str] = set()
        read_before: set[str] = set()
        for instruction in loop:
            if found := re.match(r"HGMMA\.64x(\d+)x\S* R(\d+), (?:R(\d+), )?gdesc", instruction):
                columns, into, operand = found.groups()
                if operand:
                    read_before |= registers(operand, 4) - written
                written |= registers(into, int(columns) // 2)
            elif found := re.match(r"(?:@!?\w+ )?(\S+) R(\d+)\b", instruction):
                many = 4 if re.search("128|M88.4", found[1]) else 2 if re.search("64|WIDE", found[1]) else 1
                written |= registers(found[2], many)
        assert not read_before & written, sorted(read_before & written)
        held |= read_before
    return len(held)


def registers(first: str, count: int) -> set[str]:
    return {str(int(first) + number) for number in range(count)}


def innermost_loops(machine_code: str) -> Iterator[list[str]]:
    """The instructions of each loop that multiplies, from where it begins to where it goes back, without another's."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    begun = 0
    for line in machine_code.splitlines():
        if found := re.match(r"(\.L_x_\w+):", line):
            labels[found[1]] = len(instructions)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?) *;", line):
            instructions.append(" ".join(found[1].split()))
            back = re.search(r"\bBRA .*`\((\.L_x_\w+)\)", instructions[-1])
            start = labels.get(back[1], -1) if back else -1
            if start >= begun:
                begun = len(instructions)
                if any("HGMMA" in instruction for instruction in instructions[start:]):
                    yield instructions[start:]


def holds_barriers(kernel: Compiled, *, least: int = 6) -> None:
    """A partition takes each, or the compiler writes over it, which a GPU puts back when it changes processes."""
    barrier_of = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", kernel.ttgir))
    made = {barrier_of.get(name, name) for name in re.findall(r"ttng\.init_barrier (%\w+)", kernel.ttgir)}
    (taken,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", kernel.ttgir)
    assert len(made) >= least
    assert made <= set(re.findall(r"%\w+", taken))
