"""Attention for encodings whose score is a product, <f(q), g(k)>: NoPE, RoPE, PoPE, and ALiBi's slopes on top.

Tensors only: q `[B, H, T, D]`, k `[B, H / group, S, D]`, v `[B, H / group, S, Dv]`, any strides, gradients to all
three; widths that are no multiples of 8 are widened inside. Positions are optional int64 `[B | 1, T]` and
`[B | 1, S]`; without any, query t sits at S - T + t, key s at s, all in one segment, and tiles nobody sees are never
visited. Each function returns the output `[B, H, T, Dv]` and the natural log-sum-exp `[B, H, T]`; a row that sees
nothing gets output 0, log-sum-exp -1e30 and no gradient.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from phasewise.kernels.hardware import capability
from phasewise.kernels.library import Body, Preparation, separable
from phasewise.kernels.operators import direct
from phasewise.kernels.packages import flash_obstacle, triton_obstacle

__all__ = ["attend", "pope", "rope", "unsupported"]

_separable = direct(separable)
_HALVES = (torch.float16, torch.bfloat16)
WHOLE = 8  # what widths are widened to multiples of: 16 bytes in half precision
ABSENT = -6e4  # what queries and keys are widened with: its softplus is 0 exactly, and float16 holds it
_GRID = 65_535  # programs on the axes of a CUDA grid where flash-attn-4 and cuDNN have rows and heads


def unsupported(
    body: Body, *, device: str, capability: tuple[int, int] | None, dtype: torch.dtype, qk_width: int, v_width: int,
    queries: int, keys: int, causal: bool, window: int | None = None, placed: bool = False, sloped: bool = False,
    rows: int = 1, heads: int = 1,
) -> str | None:  # fmt: skip
    """Why `body` cannot serve such a call, or None when it can.

    device is a type ("cuda", "cpu"), capability its CUDA compute capability; qk_width is the width that is
    multiplied: 2 D for PoPE. placed: positions are given; sloped: slopes are.

    >>> unsupported("cudnn", device="cuda", capability=(9, 0), dtype=torch.float32, qk_width=64, v_width=64,
    ...             queries=128, keys=128, causal=True)
    'cudnn takes float16 and bfloat16, not float32'
    """
    kind = str(dtype).removeprefix("torch.")
    if min(qk_width, v_width) < 1:
        return f"{body} takes widths from 1, not {qk_width} and {v_width}"
    qk_width, v_width = qk_width + -qk_width % WHOLE, v_width + -v_width % WHOLE
    if body == "triton":
        if dtype not in (torch.float32, *_HALVES):
            return f"triton takes float32, float16 and bfloat16, not {kind}"
        if qk_width > 512 or v_width > 256:
            return f"triton takes widths up to 512 (q, k) and 256 (v), not {qk_width} and {v_width}"
        return triton_obstacle("triton", device, capability, dtype)
    if device != "cuda":
        return f"{body} needs a CUDA device, not {device}"
    if dtype not in _HALVES:
        return f"{body} takes float16 and bfloat16, not {kind}"
    if placed:
        return f"{body} takes no positions here; triton does"
    if sloped:
        return f"{body} takes no slopes; triton does"
    if rows > _GRID or heads > _GRID:
        return f"{body} takes up to {_GRID} rows and heads, not {rows} and {heads}; triton takes more"
    if body == "flash":
        if capability is None or capability[0] != 9:
            return f"flash serves compute capability 9.0 here, not {capability}"
        if qk_width > 256 or v_width > 256:
            return f"flash takes widths up to 256, not {qk_width} and {v_width}"
        if qk_width <= 96 and v_width > 192:
            return f"flash does not compile for values of {v_width} channels with {qk_width} of keys; triton does"
        if window is not None and not causal and queries > keys:
            return (
                "flash does not end for queries before the keys with a window that is not causal; triton does"
            )
        return flash_obstacle("phasewise.kernels.flash")
    if capability is None or capability[0] < 9:
        return f"cudnn needs compute capability 9.0, not {capability}"
    if window is not None:
        return "cudnn takes no window; triton and flash do"
    if causal and queries != keys:
        # Without the lengths, as in `decode.unsupported`: those in a string are constants to torch.compile.
        return "cudnn counts causal places from the start, so it needs as many queries as keys"
    if qk_width > 256 or v_width > 128:
        return f"cudnn takes widths up to 256 (q, k) and 128 (v), not {qk_width} and {v_width}"
    if qk_width > 128 and capability != (9, 0):
        return f"cudnn takes widths above 128 on compute capability 9.0 alone, not {qk_width} on {capability}"
    if keys < 2:
        return f"cudnn takes 2 keys or more, not {keys}"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, window: int | None,
    q_index: Tensor | None = None, q_segment: Tensor | None = None,
    k_index: Tensor | None = None, k_segment: Tensor | None = None,
    slopes: Tensor | None = None, body: Body = "triton",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale q k^T - slope |i - j|) v for q and k that need no preparation.

    window w shows keys with |i - j| < w; slopes float32 `[H]` are ALiBi's. Raises ValueError for what `body` cannot
    do.
    """
    places = (q_index, q_segment, k_index, k_segment)
    return _call(q, k, v, (None, None, None), places, slopes, "none", 1.0, scale, causal, window, body)


def rope(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor, k_angle: Tensor, factor: float,
    *, scale: float, causal: bool, window: int | None,
    q_index: Tensor | None = None, q_segment: Tensor | None = None,
    k_index: Tensor | None = None, k_segment: Tensor | None = None,
    slopes: Tensor | None = None, body: Body = "triton",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attend` after RoPE's rotation of the pairs (c, c + n) by float32 angles `[B | 1, T, n]`, 2 n <= D.

    factor multiplies the rotated channels on both sides (YaRN's attention factor); channels from 2 n on pass.
    """
    places = (q_index, q_segment, k_index, k_segment)
    angles = (q_angle, k_angle, None)
    return _call(q, k, v, angles, places, slopes, "rope", factor, scale, causal, window, body)


def pope(
    q: Tensor, k: Tensor, v: Tensor, q_angle: Tensor, k_angle: Tensor, phase: Tensor | None,
    *, magnitude: Preparation, scale: float, causal: bool, window: int | None,
    q_index: Tensor | None = None, q_segment: Tensor | None = None,
    k_index: Tensor | None = None, k_segment: Tensor | None = None,
    slopes: Tensor | None = None, body: Body = "triton",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attend` on PoPE's Cartesian form: scores scale sum_c m(q_c) m(k_c) cos(q_angle_c - phase_c - k_angle_c).

    Angles are float32 `[B | 1, T, D]` reduced to [-pi, pi], phase float32 `[H, D]` or None, magnitude softplus,
    relu or identity. Saved for the gradient: q, k, v, angles, phase, output and log-sum-exp, nothing 2 D wide.
    """
    places = (q_index, q_segment, k_index, k_segment)
    angles = (q_angle, k_angle, phase)
    if phase is not None and phase.dtype != torch.float32:
        raise ValueError(f"phase must be float32, not {phase.dtype}")
    return _call(q, k, v, angles, places, slopes, magnitude, 1.0, scale, causal, window, body)


def _call(
    q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor | None, Tensor | None, Tensor | None],
    places: tuple[Tensor | None, ...], slopes: Tensor | None,
    preparation: Preparation, factor: float, scale: float, causal: bool, window: int | None, body: Body,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    width = q.shape[3] * (1 if preparation in ("none", "rope") else 2)
    reason = unsupported(
        body, device=q.device.type, capability=capability(q.device), dtype=q.dtype, qk_width=width,
        v_width=v.shape[3], queries=q.shape[2], keys=k.shape[2], causal=causal,
        window=window, placed=any(x is not None for x in places), sloped=slopes is not None,
        rows=q.shape[0], heads=q.shape[1],
    )  # fmt: skip
    if reason is not None:
        raise ValueError(reason)
    if scale <= 0:
        raise ValueError(f"scale {scale} must be positive")
    for name, x in (("q_angle", angles[0]), ("k_angle", angles[1]), ("slopes", slopes)):
        if x is not None and (x.dtype != torch.float32 or x.requires_grad):
            raise ValueError(f"{name} must be float32 and gets no gradient, got {x.dtype}")
    settings = (preparation, factor, scale, causal, window, body)
    v_width = v.shape[3]
    if width % WHOLE or v_width % WHOLE:
        q, k, v, angles = _widened(q, k, v, angles, preparation)
    out, lse, *_ = _separable(q, k, v, *angles, *places, slopes, *settings)
    return (out if v.shape[3] == v_width else out[..., :v_width]), lse


def _widened(
    q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor | None, Tensor | None, Tensor | None],
    preparation: Preparation,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:  # fmt: skip
    """The same attention in widths that are multiples of 8: what is added to queries and keys has no magnitude."""
    polar = preparation not in ("none", "rope")
    extra = -q.shape[3] % (WHOLE // 2 if polar else WHOLE)
    if extra:
        value = ABSENT if preparation == "softplus" else 0.0
        q, k = (pad(x, (0, extra), value=value) for x in (q, k))
    if extra and polar:
        q_angle, k_angle, phase = (x if x is None else pad(x, (0, extra)) for x in angles)
        angles = (q_angle, k_angle, phase)
    return q, k, pad(v, (0, -v.shape[3] % WHOLE)), angles
