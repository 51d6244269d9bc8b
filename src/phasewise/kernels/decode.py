"""Attention of a few queries over many raw keys, as decoding has it: what it accepts, its schema and shapes.

Letters: B batch, H query heads, G key heads, T queries, S keys, D the width of q and k, V that of v, n angles. It has
no gradient. No triton until it runs.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from phasewise.kernels.hardware import capability, on_its_device
from phasewise.kernels.operators import direct, operator
from phasewise.kernels.packages import triton_obstacle

Kind = Literal["none", "rope", "softplus", "relu", "identity", "tapa", "tapa-linear"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256
MOST_QUERIES = 16
FEWEST_KEYS = 16  # for each query: from there on faster than preparing them, wherever it was measured


def unsupported(
    *, device: str, capability: tuple[int, int] | None, dtype: torch.dtype, qk_width: int, v_width: int, queries: int,
    keys: int,
) -> str | None:  # fmt: skip
    """Why these queries are not decoded, or None when they are.

    device is a type ("cuda", "cpu"), capability its CUDA compute capability.

    >>> unsupported(device="cuda", capability=(9, 0), dtype=torch.float16, qk_width=64, v_width=64, queries=17,
    ...             keys=4096)
    'decoding takes up to 16 queries, on 16 keys each'
    """
    if queries > MOST_QUERIES or keys < FEWEST_KEYS * queries:
        # Without the lengths: torch.compile would take those in a string for constants, and compile for each anew.
        return f"decoding takes up to {MOST_QUERIES} queries, on {FEWEST_KEYS} keys each"
    if dtype not in DTYPES:
        return f"decoding takes float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if max(qk_width, v_width) > WIDEST or min(qk_width, v_width) == 0:
        return f"decoding takes heads from 1 to {WIDEST} wide, not {qk_width} and {v_width}"
    return triton_obstacle("decoding", device, capability, dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: Kind = "none",
    rates: Tensor | None = None,
    phase: Tensor | None = None,
    slopes: Tensor | None = None,
    amplitude_dim: int = 0,
    alpha: float = 0.0,
    two_pi: bool = True,
    factor: float = 1.0,
    scale: float,
    causal: bool,
    window: int | None,
    q_index: Tensor | None = None,
    q_segment: Tensor | None = None,
    k_index: Tensor | None = None,
    k_segment: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scores) v over the keys that each query sees, where keys are raw and read once.

    q: [B, H, T, D]; k: [B, G, S, D]; v: [B, G, S, V]; any strides; float32, float16 or bfloat16.
    kind: what makes the scores: products of q and k ("none"), RoPE's pairs (c, c + n) turned ("rope"), PoPE's
        magnitudes ("softplus", "relu", "identity"), or TAPA's quadratic or linear phase.
    rates: float64 [n], radians a place, n = D for PoPE. phase: float32 [H, D], PoPE's. slopes: float32 [H], ALiBi's.
    amplitude_dim, alpha, two_pi: TAPA's. factor: multiplies the turned part of the scores.
    q_index, k_index, q_segment, k_segment: all or none, int64 [B | 1, T] and [B | 1, S]. Without them query t sits at
        S - T + t and key s at s, in one segment.

    Angles are reduced in float64, so they are exact to 1e-6 at any place.

    Returns the output [B, H, T, V] and the natural log-sum-exp [B, H, T] in float32: 0 and -1e30 where nothing is
    seen; the same bits at every repeat. Raises ValueError for what `unsupported` names, and where a gradient is asked
    for.
    """
    width = q.shape[3]
    reason = unsupported(
        device=q.device.type, capability=capability(q.device), dtype=q.dtype, qk_width=width, v_width=v.shape[3],
        queries=q.shape[2], keys=k.shape[2],
    )  # fmt: skip
    if reason is None and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        reason = "decoding has no gradient; use torch.no_grad(), or impl='triton' of phasewise.attention"
    if reason is not None:
        raise ValueError(reason)
    if scale <= 0:
        raise ValueError(f"scale {scale} must be positive")
    if kind == "none":
        parts = (width, 0, 0)
    elif kind in ("tapa", "tapa-linear"):
        parts = (amplitude_dim, width - amplitude_dim, 0)
    else:
        assert rates is not None, "what turns has rates"
        n = rates.shape[0]
        parts = (n, n, width - 2 * n) if kind == "rope" else (width, 0, 0)
    unit = (2 * math.pi if two_pi else 1.0) * max(parts[1], 1) ** -0.5
    return _decode(
        q, k, v, rates, phase, slopes, q_index, q_segment, k_index,
        k_segment, kind, *parts, factor, scale, alpha, unit, causal, window,
    )  # fmt: skip


@operator
@on_its_device
def decode(
    q: Tensor, k: Tensor, v: Tensor, rates: Tensor | None, phase: Tensor | None, slopes: Tensor | None,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    kind: str, first: int, second: int, rest: int, factor: float, scale: float, alpha: float, unit: float,
    causal: bool, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `attend`; first, second and rest are the widths of what is multiplied apart."""
    from phasewise.kernels.decode_forward import forward
    from phasewise.kernels.tiles import EMPTY_LSE, bounded

    if q.numel() == 0:
        out, lse = _decode_fake(q, k, v)
        return out.zero_(), lse.fill_(EMPTY_LSE)
    positions = (q_index, q_segment, k_index, k_segment)
    places = None if q_index is None else (*_in_rows(q_index, q_segment), *_in_rows(k_index, k_segment))
    phase, slopes = (x if x is None else x.contiguous() for x in (phase, slopes))
    return forward(
        q, k, v, rates, phase, slopes, places, kind=kind, parts=(first, second, rest), factor=factor, scale=scale,
        alpha=alpha, unit=unit, causal=causal, window=bounded(window, q, k, positions),
    )  # fmt: skip


def _in_rows(index: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """Places with one stride between rows and none inside them: as they are, when a cache holds them."""
    if index.stride() == segment.stride() and index.stride(1) == 1:
        return index, segment
    return index.contiguous(), segment.contiguous()


@torch.library.register_fake(decode)
def _decode_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _width = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


_decode = direct(decode)
