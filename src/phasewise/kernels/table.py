"""The committed launch table, `launch.json`: what a device takes for a dtype, widths and a length, as was measured.

A row has a kernel, a device (its name, "cpu" or "any"), a dtype (or "any"), and the greatest widths of queries and of
values and the greatest length that it serves, null for all. Its meta is what the kernel is launched with, or names the
bodies that a choice takes. The tightest row wins, one of this device before one of any.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phasewise.kernels.hardware import name_of
from phasewise.kernels.rows import BODIES as BODIES
from phasewise.kernels.rows import REMEDY, read
from phasewise.kernels.rows import Row as Row

PATH = Path(__file__).with_name("launch.json")
Ranking = tuple[int | None, int | None, int | None, tuple[str, ...]]


@functools.cache
def launch_table() -> Mapping[str, list[Row]]:
    """The committed launch table.

    Raises ValueError for what is none, naming the row and the value that no kernel can be launched with.
    """
    return {"rows": read(PATH)}


def launch(kernel: str, x: Tensor, *, qk: int, v: int, length: int) -> dict[str, Any]:
    """Meta-parameters of `kernel` for tensors like x."""
    return dict(chosen(kernel, x.device, x.dtype, qk, v, length))


@functools.lru_cache(maxsize=4096)
def chosen(
    kernel: str, on: torch.device, kind: torch.dtype, qk: int, v: int, length: int
) -> Mapping[str, Any]:
    """What `launch` gives: a function of the table, which whoever changes it forgets."""
    return row(kernel, name_of(on) or on.type, kind, qk=qk, v=v, length=length)["meta"]


def row(kernel: str, device: str, kind: torch.dtype, *, qk: int, v: int, length: int) -> Row:
    """The row that serves these sizes on a device, by its name."""
    for one in _rows(kernel, device, kind):
        if qk <= (one["qk"] or qk) and v <= (one["v"] or v) and length <= (one["length"] or length):
            return one
    name = str(kind).removeprefix("torch.")
    raise ValueError(
        f"{PATH} has no row of {kernel} for {name}, widths {qk} and {v} and length {length} on {device}; {REMEDY}, "
        "and impl='reference' needs none"
    )


@functools.lru_cache(maxsize=4096)
def exact(kernel: str, on: torch.device, kind: torch.dtype, qk: int, v: int) -> Mapping[str, Any] | None:
    """The meta of a row for just these widths; None without one."""
    rows = _rows(kernel, name_of(on) or on.type, kind)
    return next((row["meta"] for row in rows if (row["qk"], row["v"]) == (qk, v)), None)


def ranked(
    kernel: str, device: str | None, kind: torch.dtype, *, qk: int, v: int, length: int
) -> tuple[str, ...]:
    """The bodies of a choice, fastest first; device None is one that the table does not know.

    >>> ranked("tapa.forward.body", None, torch.bfloat16, qk=64, v=64, length=2048)
    ('flash', 'triton')
    """
    for widest, widest_v, longest, order in _rankings(kernel, device or "any", kind):
        if widest is not None and qk > widest:
            continue
        if widest_v is not None and v > widest_v:
            continue
        if longest is None or length <= longest:
            return order
    raise AssertionError(f"the launch table has no row of {kernel} for any device")


def forget_choices() -> None:
    """Choose anew from now on, as the table has changed."""
    chosen.cache_clear()
    exact.cache_clear()
    _rows.cache_clear()


def reread() -> None:
    """Read the table anew, as its file may have changed."""
    launch_table.cache_clear()
    forget_choices()


@functools.cache
def _rows(kernel: str, device: str, kind: torch.dtype) -> list[Row]:
    """The rows of a kernel that serve a device and a dtype, the tightest first."""
    dtype = str(kind).removeprefix("torch.")
    rows = [
        row
        for row in launch_table()["rows"]
        if row["kernel"] == kernel and row["device"] in (device, "any") and row["dtype"] in (dtype, "any")
    ]

    def distance(row: Row) -> tuple:
        sizes = (row[name] or math.inf for name in ("qk", "v", "length"))
        return (row["device"] == "any", row["dtype"] == "any", *sizes)

    return sorted(rows, key=distance)


def _rankings(kernel: str, device: str, kind: torch.dtype) -> tuple[Ranking, ...]:
    """Of `_rows`, what torch.compile can compare sizes with."""
    rows = _rows(kernel, device, kind)
    return tuple((row["qk"], row["v"], row["length"], tuple(row["meta"]["order"])) for row in rows)


# As of `hardware.capability`: torch.compile asks, and does not look inside.
_rankings._dynamo_marked_constant = True  # type: ignore[attr-defined]
