"""Causal softmax(scale q k^T) v on a CPU for values narrower than the queries, by blocks of queries.

torch's blocked CPU kernel takes one width, so that PoPE's values would be padded to twice theirs. Here each
block of queries meets the keys up to its own end alone, in plain matrix products, and the backward pass makes
the weights again, as FlashAttention does (Dao et al., arXiv 2205.14135), so memory is linear in length.

Letters: N heads of the whole batch, T places, E width of q and k, D width of v.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch._C._functorch import is_gradtrackingtensor
from torch.autograd import forward_ad

BLOCK = 256
REFUSED = (
    "attention by blocks of queries has first derivatives in reverse alone, outside of torch.func; "
    "for others use impl='reference'"
)


def causal_blocked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of every place to itself and those before it.

    q, k: [N, T, E]; v: [N, T, D]; float32 or float64. Returns the output [N, T, D]. Raises RuntimeError for
    derivatives other than the first in reverse, outside of torch.func.

    >>> causal_blocked(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), torch.tensor([[[1.0], [3.0]]]), 1.0)
    tensor([[[1.],
             [2.]]])
    """
    if not torch.compiler.is_compiling() and any(_has_other_derivative(x) for x in (q, k, v)):
        raise RuntimeError(REFUSED)
    return _attend(q, k, v, scale)


def _has_other_derivative(x: Tensor) -> bool:
    if is_gradtrackingtensor(x):
        return True
    inside = forward_ad._current_level >= 0  # of a dual level, outside of which no tensor has one
    return inside and forward_ad.unpack_dual(x).tangent is not None


@torch.library.custom_op("phasewise::causal_blocked", mutates_args=(), device_types="cpu")
def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for block in _blocks(q):
        block.attend(q, k, scale)
        torch.bmm(block.weights, v[block.heads, block.keys], out=out[block.heads, block.rows])
    return out


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("phasewise::causal_blocked_backward", mutates_args=(), device_types="cpu")
def causal_blocked_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, given that of the output, [N, T, D]."""
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    shared = (grad * out).sum(-1, keepdim=True)
    for block in _blocks(q):
        heads, rows, keys, flow = block.heads, block.rows, block.keys, block.scores
        block.attend(q, k, scale)
        incoming = grad[heads, rows]
        dv[heads, keys].baddbmm_(block.weights.transpose(1, 2), incoming)
        torch.bmm(incoming, v[heads, keys].transpose(1, 2), out=flow)
        flow.sub_(shared[heads, rows]).mul_(block.weights)
        torch.baddbmm(dq[heads, rows], flow, k[heads, keys], beta=0, alpha=scale, out=dq[heads, rows])
        dk[heads, keys].baddbmm_(flow.transpose(1, 2), q[heads, rows], alpha=scale)
    return dq, dk, dv


@causal_blocked_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _refuse(ctx, *gradients: Tensor) -> None:
    raise RuntimeError(REFUSED)


causal_blocked_backward.register_autograd(_refuse)


def _remember(ctx, inputs, output) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, output)


def _gradients(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *causal_blocked_backward(grad, *ctx.saved_tensors, ctx.scale), None


_attend.register_autograd(_gradients, setup_context=_remember)


@dataclass(frozen=True)
class _Block:
    """Some heads' query rows, the keys that these see, and memory for two sets of their scores."""

    heads: slice
    rows: slice
    keys: slice
    scores: Tensor
    weights: Tensor

    def attend(self, q: Tensor, k: Tensor, scale: float) -> None:
        """Fill `weights` [n, rows, keys] with the softmax of the scores, the keys after each place left out."""
        queries = q[self.heads, self.rows] * scale
        size = queries.shape[1]
        torch.bmm(queries, k[self.heads, self.keys].transpose(1, 2), out=self.scores)
        diagonal = self.scores[..., -size:].tril_()  # a score that is no number would stay so below infinity
        diagonal.add_(torch.full((size, size), float("-inf"), dtype=q.dtype).triu_(1))
        torch.softmax(self.scores, -1, out=self.weights)


def _blocks(q: Tensor) -> Iterator[_Block]:
    """All heads and rows: as many heads at once as there are threads, in memory that is used again."""
    count, length, _ = q.shape
    together = min(torch.get_num_threads(), count)
    memory = q.new_empty(2, together * BLOCK * length)
    for head in range(0, count, together):
        heads = min(together, count - head)
        for row in range(0, length, BLOCK):
            end = min(row + BLOCK, length)
            shape = heads, end - row, end
            scores, weights = (part[: prod(shape)].view(shape) for part in memory)
            yield _Block(slice(head, head + heads), slice(row, end), slice(0, end), scores, weights)
