"""softmax(scores) V in plain PyTorch: the oracle, float64-capable, in memory linear in length."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from phasewise.encodings.base import Encoding, exact, recomputed, working_dtype
from phasewise.positions import Positions, visible

EMPTY_LSE = -1e30  # log-sum-exp of a row that sees nothing: finite, so that no arithmetic on it makes a NaN
SCORES_AT_ONCE = 2**23  # elements of one block of scores: 32 MiB in float32
CACHED = 8  # blocks in the place of one on a CPU, whose cache holds 4 MiB; not in graphs, where each is code


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding,
    q_at: Positions,
    k_at: Positions,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by its definition, in blocks of queries whose scores are made, used and dropped.

    q [B, Hq, T, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv]; the arithmetic is float32, or float64 for float64
    inputs, also under autocast. Returns the output [B, Hq, T, Dv] in v's dtype and the log-sum-exp
    [B, Hq, T]. A query that sees no key gets an output of 0, no gradient, and EMPTY_LSE. The backward pass
    recomputes each block, so its memory is linear in length too.
    """
    batch, heads, length, _ = q.shape
    dtype = working_dtype(q.dtype)
    if 0 in (batch, length, k.shape[2]):
        empty = torch.full((batch, heads, length), EMPTY_LSE, dtype=dtype, device=q.device)
        nothing = q[:0].sum() + k[:0].sum() + v[:0].sum()  # 0, with gradients of 0
        return v.new_zeros(batch, heads, length, v.shape[-1]) + nothing, empty

    def block(q: Tensor, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        at = q_at.narrow(start, q.shape[2])
        scores = encoding.scores(q, k, at, k_at, scale=scale)
        mask = visible(at, k_at, causal=causal, window=window)[:, None]
        return _softmax_values(scores, mask, v.to(dtype))

    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        # torch's tracer makes a number an input of the graph where it first meets it. That may not be within a block
        # which is recomputed, as the others could not read it there (torch 2.13); so a first block is for naught.
        with torch.no_grad():
            block(q[:, :, :1], k, v, 0)
    compiling = torch.compiler.is_compiling()
    at_once = SCORES_AT_ONCE // CACHED if q.device.type == "cpu" and not compiling else SCORES_AT_ONCE
    total = batch * heads * length * k.shape[2]  # a product, of which torch.export tells the bound
    if total <= at_once:
        out, lse = block(q, k, v, 0)
        return out.to(v.dtype), lse
    edges = _powers_of_two(length, total, at_once) if compiling else _full(length, total, at_once)
    blocks = [recomputed(block, q[:, :, at:end], k, v, at) for at, end in pairwise(edges)]
    outs, lses = zip(*blocks, strict=True)
    return torch.cat([out.to(v.dtype) for out in outs], dim=2), torch.cat(lses, dim=2)


def _full(length: int, total: int, at_once: int) -> list[int]:
    """Where blocks of at most `at_once` of all `total` scores begin and end, the last of them with the rest."""
    size = max(1, at_once // (total // length))
    return [*range(0, length, size), length]


def _powers_of_two(length: int, total: int, at_once: int) -> list[int]:
    """The same in a power of two of blocks of nearly one size: a graph has no loop, and serves a range of lengths."""
    count = 2
    while count * at_once < total and 2 * count <= length:
        count *= 2
    return [length * block // count for block in range(count + 1)]


def _softmax_values(scores: Tensor, mask: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = scores.masked_fill(~mask, float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True).clamp(min=EMPTY_LSE)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total + empty
    batch, heads, length, keys = weights.shape
    grouped = (weights / total).reshape(batch, v.shape[1], -1, keys)
    with exact(v.device):
        out = (grouped @ v).reshape(batch, heads, length, v.shape[-1])
    lse = torch.where(empty, EMPTY_LSE, highest + total.log())
    return out, lse.squeeze(-1)
