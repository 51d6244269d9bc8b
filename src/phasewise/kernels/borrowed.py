"""Attention of other packages behind the signature of our own: cuDNN's, through torch."""

import torch
from torch import Tensor


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output `[B, H, T, D]`, stored place by place, and natural log-sum-exp `[B, H, T]`.

    q is `[B, H, T, E]`, k `[B, H / group, S, E]`, v `[B, H / group, S, D]`; any strides.
    """
    q, k, v = (_suited(x) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.reshape(out.shape[:3])


def _suited(x: Tensor) -> Tensor:
    """x, copied unless its rows are whole and begin at multiples of 16 bytes: called by itself, cuDNN's operator takes
    what torch's dispatch would have refused it.
    """
    wide = 16 // x.element_size()
    outer = zip(x.shape[:3], x.stride()[:3], strict=True)
    rows = all(size == 1 or (stride > 0 and stride % wide == 0) for size, stride in outer)
    suits = x.stride(3) == 1 and rows and x.data_ptr() % 16 == 0
    return x if suits else x.clone(memory_format=torch.contiguous_format)
