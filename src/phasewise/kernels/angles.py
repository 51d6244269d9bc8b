"""The operator `phasewise::angles`: the table that RoPE's and PoPE's queries and keys are prepared with.

No triton until it runs.
"""

import torch
from torch import Tensor

from phasewise.kernels.hardware import on_its_device
from phasewise.kernels.operators import operator


@operator
@on_its_device
def angles(rates: Tensor, index: Tensor | None, length: int) -> Tensor:
    """Angles of places, float32 `[B, T, A m]` reduced to [-pi, pi] in float64, the m of the first axis first.

    rates: float64 `[m]`, radians a place. index: int64 `[B, T]` or `[B, T, A]`; without one, of the places 0 up to
    `length` in one row.
    """
    from phasewise.kernels.angle_table import fill

    out = _angles_fake(rates, index, length)
    if out.numel() > 0:
        fill(out, rates.contiguous(), None if index is None else index.contiguous())
    return out


@torch.library.register_fake(angles)
def _angles_fake(rates: Tensor, index: Tensor | None, length: int) -> Tensor:
    if index is None:
        shape = (1, length, rates.shape[0])
    else:
        shape = (*index.shape[:2], rates.shape[0] * (index.shape[2] if index.ndim == 3 else 1))
    return rates.new_empty(shape, dtype=torch.float32)
