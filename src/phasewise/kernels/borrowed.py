"""Attention of other packages behind the signature of our own: cuDNN's, through torch."""

import torch
from torch import Tensor


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, D]`, stored place by place, and natural log-sum-exp `[B, H, T]`.

    q is `[B, H, T, E]`, k `[B, H / group, S, E]`, v `[B, H / group, S, D]`.
    """
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.reshape(out.shape[:3])
