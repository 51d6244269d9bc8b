"""Attention bodies of other packages behind the signature of our own: flash-attn-4 (optional) and cuDNN.

Tensors are `[B, H, T, E]`, `[B, H / group, S, E]`, `[B, H / group, S, D]`; both return the output `[B, H, T, D]`
stored place by place and the natural log-sum-exp `[B, H, T]`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from phasewise.kernels.tiles import EMPTY_LSE, launch_table

_one_at_a_time = threading.Lock()


def _flash_window(causal: bool, window: int | None) -> dict[str, int | None]:
    if window is None:
        return {"window_size_left": None, "window_size_right": None}
    return {"window_size_left": window - 1, "window_size_right": 0 if causal else window - 1}


def _tiles(kernel: str, qk: int, v: int) -> list[Any] | None:
    """Tile choice of the launch table for exactly these widths; None leaves it to flash-attn-4."""
    rows = launch_table()["flash_tiles"]
    return next((row[kernel] for row in rows if (row["qk"], row["v"]) == (qk, v)), None)


@contextmanager
def _our_tiles(interface: ModuleType) -> Iterator[None]:
    """For as long as this lasts, flash-attn-4 looks the backward tiles up in our table before its own.

    Its backward takes no tile arguments on Hopper, and its own choice for widths (128, 64) is that of (128, 128).
    """
    with _one_at_a_time:
        theirs = interface._tile_size_bwd_sm90

        def ours(head_dim: int, head_dim_v: int, *rest: Any, **options: Any) -> Any:
            tiles = _tiles("backward", head_dim, head_dim_v)
            return (
                theirs(head_dim, head_dim_v, *rest, **options)
                if tiles is None
                else interface.BwdConfig(*tiles)
            )

        interface._tile_size_bwd_sm90 = ours
        try:
            yield
        finally:
            interface._tile_size_bwd_sm90 = theirs


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """flash-attn-4's forward; its places are ours, bottom right."""
    from flash_attn.cute.interface import _flash_attn_fwd

    tiles = _tiles("forward", q.shape[3], v.shape[3])
    out, lse = _flash_attn_fwd(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        softmax_scale=scale, causal=causal, return_lse=True, tile_mn=tiles and tuple(tiles),
        **_flash_window(causal, window),
    )[:2]  # fmt: skip
    return out.transpose(1, 2), lse.clamp_min(EMPTY_LSE) if causal and q.shape[2] > k.shape[2] else lse


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    into: tuple[Tensor, Tensor, Tensor], *, scale: float, causal: bool, window: int | None,
) -> None:  # fmt: skip
    """flash-attn-4's backward in its deterministic mode, which adds up dq in a fixed order."""
    from flash_attn.cute import interface

    dq, dk, dv = into
    with _our_tiles(interface):
        interface._flash_attn_bwd(
            *(x.transpose(1, 2) for x in (q, k, v, out, dout)), lse,
            softmax_scale=scale, causal=causal, deterministic=True,
            dq=dq.transpose(1, 2), dk=dk.transpose(1, 2), dv=dv.transpose(1, 2),
            dlse=None if dlse is None else dlse.contiguous(), **_flash_window(causal, window),
        )  # fmt: skip


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's forward through torch."""
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return _placewise(out), lse.reshape(out.shape[:3])


def _placewise(x: Tensor) -> Tensor:
    """x, copied only when it is not stored place by place."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
