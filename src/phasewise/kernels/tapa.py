"""TAPA attention as an operator: what it accepts, its schema, shapes and gradient. No triton until it runs.

Letters: B batch, H query heads, G key heads, T queries, S keys, D the width of q and k, V that of v.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from phasewise.kernels.hardware import capability, on_its_device
from phasewise.kernels.operators import differentiable, direct, last_derivative, operator, placewise
from phasewise.kernels.packages import flash_obstacle, triton_obstacle

Body = Literal["triton", "flash"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256
FLASH_WIDEST = 128


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha: float | Tensor,
    amplitude_dim: int,
    phase: Literal["quadratic", "linear"] = "quadratic",
    two_pi: bool = True,
    scale: float | None = None,
    causal: bool,
    window: int | None,
    q_index: Tensor | None = None,
    q_segment: Tensor | None = None,
    k_index: Tensor | None = None,
    k_segment: Tensor | None = None,
    body: Body = "triton",
) -> tuple[Tensor, Tensor]:
    """softmax(scale (q_A . k_A) cos(2 pi |i - j|^alpha phi)) v over the keys each query sees, never storing scores.

    q: [B, H, T, D]; k: [B, G, S, D]; v: [B, G, S, V]; float32, float16 or bfloat16. A is the first `amplitude_dim`
        channels, P the rest; phi is (q_P . k_P) / sqrt(P), or (sum q_P + sum k_P) / sqrt(P) for the linear phase.
    alpha: a number, or a float32 tensor of no dimensions, which may ask for its gradient.
    two_pi: False drops the 2 pi. scale: positive; A^-1/2 by default.
    q_index, k_index, q_segment, k_segment: int64 [B | 1, T] and [B | 1, S]. Without any of them query t sits at
        S - T + t and key s at s, in one segment.
    body: what makes the output: "triton", or "flash" for what `flash_unsupported` has nothing against. The gradient is
        Triton's.

    In half precision the distance power is good to 2^-17 of itself and the cosine of its argument to one rounding of
    that: an absolute error below 1e-3 up to 100 radians. In float32 both are float32's. Gradients by phases grow as
    |i - j|^alpha: at alpha 1 and 100 000 keys they pass what float16 holds, for which bfloat16 has the range.

    Returns the output [B, H, T, V] and the natural log-sum-exp [B, H, T] in float32: 0 and -1e30 where nothing is
    seen. Both have gradients, the same bits at every repeat; second derivatives raise. Raises ValueError for what
    `unsupported` and `flash_unsupported` name. Source: Wang et al., arXiv 2509.12635.
    """
    width, v_width = q.shape[3], v.shape[3]
    reason = unsupported(
        device=q.device.type, capability=capability(q.device), dtype=q.dtype, qk_width=width, v_width=v_width
    )
    if reason is None and body == "flash":
        reason = flash_unsupported(
            device=q.device.type, capability=capability(q.device), dtype=q.dtype, amplitude_dim=amplitude_dim,
            qk_width=width, v_width=v_width, queries=q.shape[2], keys=k.shape[2], phase=phase, causal=causal,
            window=window, placed=any(x is not None for x in (q_index, q_segment, k_index, k_segment)),
        )  # fmt: skip
    if reason is not None:
        raise ValueError(reason)
    if not 0 < amplitude_dim < width:
        raise ValueError(
            f"amplitude_dim must leave both parts a channel: from 1 to {width - 1}, not {amplitude_dim}"
        )
    if scale is not None and scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    if not isinstance(alpha, Tensor):
        alpha = torch.full((), alpha, dtype=torch.float32, device=q.device)
    elif alpha.dim() != 0 or alpha.dtype != torch.float32 or alpha.device != q.device:
        raise ValueError(
            f"a tensor alpha must be float32, of no dimensions and on {q.device}, "
            f"not {alpha.dtype} {list(alpha.shape)} on {alpha.device}"
        )
    unit = (2 * math.pi if two_pi else 1.0) * (q.shape[3] - amplitude_dim) ** -0.5
    return _tapa(
        q, k, v, alpha, q_index, q_segment, k_index, k_segment, amplitude_dim,
        amplitude_dim**-0.5 if scale is None else scale, unit,
        phase == "linear", causal, window, body,
    )  # fmt: skip


def unsupported(
    *, device: str, capability: tuple[int, int] | None, dtype: torch.dtype, qk_width: int, v_width: int
) -> str | None:
    """Why the kernel cannot serve such a call and what it would take, or None when it can.

    device is a type ("cuda", "cpu"), capability its CUDA compute capability.

    >>> unsupported(device="cuda", capability=(7, 0), dtype=torch.float16, qk_width=64, v_width=64)
    "TAPA's kernel needs compute capability 8.0, not (7, 0)"
    """
    if dtype not in DTYPES:
        return f"TAPA's kernel is written for float32, float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if max(qk_width, v_width) > WIDEST or v_width == 0:
        return f"TAPA's kernel takes heads from 1 to {WIDEST} wide, not {qk_width} and {v_width}"
    return triton_obstacle("TAPA's kernel", device, capability, dtype)


def flash_unsupported(
    *, device: str, capability: tuple[int, int] | None, dtype: torch.dtype, amplitude_dim: int, qk_width: int,
    v_width: int, queries: int, keys: int, phase: str, causal: bool, window: int | None, placed: bool,
) -> str | None:  # fmt: skip
    """Why the forward inside flash-attn-4's pipeline cannot serve such a call, or None when it can.

    placed: whether positions are given.

    >>> call = {"device": "cuda", "dtype": torch.bfloat16, "amplitude_dim": 32, "qk_width": 64, "v_width": 64}
    >>> flash_unsupported(**call, capability=(8, 0), queries=9, keys=9, phase="quadratic", causal=True, window=None,
    ...                   placed=False)
    'flash serves compute capability 9.0 here, not (8, 0)'
    """
    if device != "cuda":
        return f"flash needs a CUDA device, not {device}"
    if capability is None or capability[0] != 9:
        return f"flash serves compute capability 9.0 here, not {capability}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    widths = (amplitude_dim, qk_width, v_width)
    if any(width % 16 or not 0 < width <= FLASH_WIDEST for width in widths):
        return (
            f"flash takes TAPA's parts and values in multiples of 16 channels, up to {FLASH_WIDEST}, not "
            f"{amplitude_dim} of {qk_width} and {v_width}; triton takes all"
        )
    if phase != "quadratic":
        return f"flash takes TAPA's quadratic phase, not the {phase} one; triton does"
    if placed or not causal or window is not None or queries > keys:
        return "flash takes TAPA causal, with the queries the last of the keys; positions and windows go to triton"
    return flash_obstacle("phasewise.kernels.tapa_flash")


@operator
@on_its_device
def tapa(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    amplitude_dim: int, scale: float, unit: float, linear: bool, causal: bool, window: int | None, body: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from phasewise.kernels.tapa_forward import forward
    from phasewise.kernels.tapa_score import Score
    from phasewise.kernels.tiles import EMPTY_LSE, Places, bounded

    if q.numel() == 0 or k.numel() == 0:
        out, lse = _tapa_fake(q, k, v)
        return out.zero_(), lse.fill_(EMPTY_LSE)
    positions = (q_index, q_segment, k_index, k_segment)
    score = Score(amplitude_dim, scale, unit, linear, causal, bounded(window, q, k, positions))
    if body == "flash":
        from phasewise.kernels import tapa_flash

        return tapa_flash.forward(q, k, v, alpha, score)
    places = Places.of(q, k, *positions)
    return forward(q, k, v, alpha, places, score)


@operator
@on_its_device
def tapa_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, out: Tensor, lse: Tensor,
    q_index: Tensor | None, q_segment: Tensor | None, k_index: Tensor | None, k_segment: Tensor | None,
    amplitude_dim: int, scale: float, unit: float, linear: bool, causal: bool, window: int | None, alpha_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from phasewise.kernels.tapa_backward import backward
    from phasewise.kernels.tapa_score import Score
    from phasewise.kernels.tiles import Places, bounded

    if q.numel() == 0 or k.numel() == 0:
        return *(placewise(x).zero_() for x in (q, k, v)), torch.zeros_like(alpha)
    positions = (q_index, q_segment, k_index, k_segment)
    places = Places.of(q, k, *positions)
    score = Score(amplitude_dim, scale, unit, linear, causal, bounded(window, q, k, positions))
    return backward(grad_out, grad_lse, q, k, v, alpha, out, lse, places, score, alpha_grad=alpha_grad)


@torch.library.register_fake(tapa)
def _tapa_fake(q, k, v, *_):
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.register_fake(tapa_backward)
def _tapa_backward_fake(grad_out, grad_lse, q, k, v, alpha, *_):
    return *(placewise(x) for x in (q, k, v)), torch.empty_like(alpha)


def _setup(ctx, inputs, output):
    q, k, v, alpha, *rest = inputs
    places, ctx.score = rest[:4], rest[4:-1]
    ctx.save_for_backward(q, k, v, alpha, *output, *places)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, alpha, out, lse, *places = ctx.saved_tensors
    grads = _tapa_backward(
        grad_out, grad_lse, q, k, v, alpha, out, lse, *places, *ctx.score, ctx.needs_input_grad[3]
    )
    return *grads, *[None] * (len(places) + len(ctx.score) + 1)


differentiable(tapa, _backward, _setup)
last_derivative(tapa_backward)
_tapa, _tapa_backward = direct(tapa), direct(tapa_backward)
