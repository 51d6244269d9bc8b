"""attention(q, k, v, encoding): validate, choose an implementation, call it.

Letters: B batch, Hq and Hkv query and key heads, T queries, S keys, D width of q and k, Dv width of v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from phasewise.blocked import causal_blocked
from phasewise.encodings import ALiBi
from phasewise.encodings.base import Encoding, exact
from phasewise.fused import Call, Hardware, bodies, decode_obstacle, decoded, fused, obstacle
from phasewise.positions import Positions, check_view, check_window, visible
from phasewise.reference import reference

Implementation = Literal["auto", "reference", "sdpa", "triton", "flash", "cudnn"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "reference", "sdpa", "triton", "flash", "cudnn")

MASK_LIMIT = 2**28  # largest mask or bias [rows, heads, T, S], in elements, that sdpa is given
BLOCKED_LENGTH = 1024  # queries from which narrower values on a CPU go through blocked.py
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DECODED = "few queries on many keys, which are read raw and once"
AUTO_LIMIT = 2**28  # largest T * S that auto hands to the reference: 16 384 queries on as many keys


@dataclass(frozen=True)
class Choice:
    """Which implementation computes an attention, and why."""

    impl: Implementation
    reason: str


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding,
    *,
    q_at: Positions | None = None,
    k_at: Positions | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    impl: Implementation = "auto",
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding,
    *,
    q_at: Positions | None = None,
    k_at: Positions | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    impl: Implementation = "auto",
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding,
    *,
    q_at: Positions | None = None,
    k_at: Positions | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    impl: Implementation = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(encoding's scores) V over the keys that each query sees.

    q: [B, Hq, T, D]; k: [B, Hkv, S, D]; v: [B, Hkv, S, Dv]; any strides, one float dtype. Query head h uses
        kv head h // (Hq // Hkv).
    q_at, k_at: places (int64 positions and segments). Without them keys are at 0..S-1 and the queries are the
        last T of these; with k_at alone they are the last T of its places.
    causal, window: a key is seen when it is in the query's segment, not after the query, and nearer than
        `window` places. A query that sees nothing gives 0.
    scale: replaces the encoding's softmax scale (D^-1/2; for TAPA Da^-1/2).
    impl: "reference" (plain PyTorch by query blocks), "sdpa" (torch's scaled_dot_product_attention), the
        fused GPU kernels "triton" (ours), "flash" (flash-attn-4's) and "cudnn", or "auto" (see `choose`).
        Anything but auto runs or raises.
    return_lse: also return the log-sum-exp of each query's scores, [B, Hq, T]; -1e30 where nothing is seen.

    What a query does not see does not matter to its output, NaN in keys included (but by "sdpa" with a mask); NaN in
    values may, as 0 times NaN is none (docs/attention.md).

    Returns [B, Hq, T, Dv] in v's dtype. Raises ValueError for shapes, dtypes, positions or an implementation
    that do not fit, saying what would.

    >>> q = k = v = torch.randn(1, 2, 5, 16)
    >>> from phasewise.encodings import RoPE
    >>> attention(q, k, v, RoPE(head_dim=16)).shape
    torch.Size([1, 2, 5, 16])
    """
    call = _validate(q, k, v, encoding, q_at, k_at, causal=causal, window=window, scale=scale)
    for name, learned in encoding.named_parameters():
        if learned.device != q.device:
            raise ValueError(
                f"the encoding's {name} is on {learned.device}, but q is on {q.device}; "
                f"use encoding.to({str(q.device)!r})"
            )
    hardware = Hardware.of(q)
    chosen = _choose(call, impl, return_lse, hardware).impl
    if chosen == "sdpa":
        return _sdpa(call)
    if chosen != "reference" and any(_has_tangent(x) for x in (q, k, v, *encoding.parameters())):
        raise RuntimeError(
            "forward-mode derivatives do not pass through fused kernels; use impl='reference' for them"
        )
    if chosen == "triton" and decode_obstacle(call, hardware) is None:
        out, lse = decoded(call)
    elif chosen == "triton" or chosen == "flash" or chosen == "cudnn":
        out, lse = fused(call, chosen)
    else:
        assert chosen == "reference"
        out, lse = reference(q, k, v, encoding, *call.places(), causal=causal, window=window, scale=scale)
    return (out, lse) if return_lse else out


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding,
    *,
    q_at: Positions | None = None,
    k_at: Positions | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    impl: Implementation = "auto",
    return_lse: bool = False,
    hardware: Hardware | None = None,
) -> Choice:
    """What `attention` with these arguments runs, and why; a pure function of sizes, dtypes and hardware.

    On a CUDA device auto takes triton for up to 16 queries on 16 keys each or more, unless a gradient is
    asked for, then the first that runs of flash, cudnn and triton, in the order that the launch table has for the
    device, dtype, widths and length; otherwise sdpa where the scores separate or add a bias; otherwise the
    reference, which it refuses above 2^28 pairs of a query and a key.
    `hardware` asks about another machine than the one q is on. Works on meta tensors.

    Raises ValueError where `attention` would.

    >>> from phasewise.encodings import TAPA
    >>> q = torch.empty(1, 2, 5, 16, device="meta")
    >>> choose(q, q, q, TAPA(head_dim=16)).impl
    'reference'
    """
    if not isinstance(hardware, Hardware | None):
        raise ValueError(f"hardware must be Hardware, but is {hardware!r}; use Hardware('cuda', (9, 0))")
    call = _validate(q, k, v, encoding, q_at, k_at, causal=causal, window=window, scale=scale)
    return _choose(call, impl, return_lse, Hardware.of(q) if hardware is None else hardware)


def _choose(call: Call, impl: Implementation, return_lse: bool, hardware: Hardware) -> Choice:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"unknown impl {impl!r}; choose from {', '.join(IMPLEMENTATIONS)}")
    if impl == "reference":
        return Choice("reference", "asked for")
    if impl != "auto":
        if impl == "triton" and decode_obstacle(call, hardware) is None:
            return Choice(impl, DECODED)
        reason = _sdpa_obstacle(call, return_lse) if impl == "sdpa" else obstacle(call, impl, hardware)
        if reason is not None:
            raise ValueError(f"impl={impl!r} cannot run this: {reason}; impl='reference' runs everything")
        return Choice(impl, "asked for")
    passed_over = []
    if hardware.device == "cuda":
        if decode_obstacle(call, hardware) is None:
            return Choice("triton", DECODED)
        order = bodies(call, hardware)
        for body in order:
            reason = obstacle(call, body, hardware)
            if reason is None:
                first = f"the first that runs this of {', '.join(order)}, fastest first by the launch table"
                return Choice(body, "; ".join([first, *passed_over]))
            passed_over.append(reason)
    reason = _sdpa_obstacle(call, return_lse)
    if reason is None:
        return Choice(
            "sdpa",
            "; ".join(["the scores separate into a query's and a key's part, or add a bias", *passed_over]),
        )
    passed_over.append(f"sdpa: {reason}")
    length, keys = call.q.shape[2], call.k.shape[2]
    if length * keys > AUTO_LIMIT:
        raise ValueError(
            f"{length} queries on {keys} keys are left to the slow reference ({'; '.join(passed_over)}); "
            "ask for it with impl='reference', or use fewer queries at a time"
        )
    return Choice("reference", "; ".join(passed_over))


def _has_tangent(x: Tensor) -> bool:
    inside = forward_ad._current_level >= 0  # of a dual level, outside of which no tensor has one
    return inside and forward_ad.unpack_dual(x).tangent is not None


def _needs_mask(call: Call) -> bool:
    length, keys = call.q.shape[2], call.k.shape[2]
    if call.at is not None:
        return True
    if call.window is not None and (torch.compiler.is_exporting() or call.window < keys):
        return True  # one graph for every length
    return call.causal and length not in (1, keys)


def _sdpa_obstacle(call: Call, return_lse: bool) -> str | None:
    """Why torch's scaled_dot_product_attention cannot compute this call; None when it can."""
    encoding, length, keys = call.encoding, call.q.shape[2], call.k.shape[2]
    if return_lse:
        return "it does not return the log-sum-exp"
    if call.scale is not None and call.scale <= 0:
        return f"torch's causal kernel takes a positive scale, not {call.scale}"
    rows = 1 if call.at is None else max(at.batch for at in call.at)
    if isinstance(encoding, ALiBi):
        if call.q.dtype in (torch.float16, torch.bfloat16):
            return f"a bias in {call.q.dtype} would round ALiBi's distances"
        elements = rows * encoding.num_heads * length * keys
    elif not encoding.separable:
        return f"{encoding.kind}'s scores with these settings do not separate into a query's and a key's part"
    else:
        elements = rows * length * keys if _needs_mask(call) else 0
    if elements > MASK_LIMIT:
        return f"its mask would have {elements} elements, above {MASK_LIMIT}"
    return None


def _sdpa(call: Call) -> Tensor:
    q, k, v, encoding = call.q, call.k, call.v, call.encoding
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    mask = empty = None
    if _needs_mask(call):
        mask = visible(*call.places(), causal=call.causal, window=call.window)[:, None]
        empty = ~mask.any(-1, keepdim=True)
        mask = mask | empty
    if isinstance(encoding, ALiBi):
        places = call.places()
        if mask is None and call.causal:
            mask = visible(*places)[:, None]
        bias = -encoding.penalty(*places, q.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    else:
        separated = encoding.factors(q, k, *call.places())
        assert separated is not None
        q, k = separated
    width = v.shape[-1]
    plain_causal = call.causal and mask is None and q.shape[2] == k.shape[2]
    if plain_causal and q.shape[-1] > width and _blocked_is_faster(q):
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = causal_blocked(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scale)
        return out.unflatten(0, q.shape[:2])
    if q.device.type == "cpu" and q.shape[-1] != width:
        common = max(q.shape[-1], width)  # torch's CPU kernel takes one width only: see docs/decisions.md
        q, k, v = (F.pad(x, (0, common - x.shape[-1])) for x in (q, k, v))
    flags = {}  # set by branches, so that torch.compile guards on them: sdpa takes no symbolic booleans
    if plain_causal:
        flags["is_causal"] = True
    if q.shape[1] != k.shape[1]:
        flags["enable_gqa"] = True
    with exact(q.device):  # autocast would round a bias and change v's dtype
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, **flags)[..., :width]
    return out if empty is None else torch.where(empty, 0.0, out)


def _blocked_is_faster(q: Tensor) -> bool:
    """Whether blocks of queries beat torch's CPU kernel on values padded to the width of q, as measured.

    What is exported has torch's own operators alone, and one graph for every length.
    """
    if q.device.type != "cpu" or q.element_size() < 4 or torch.compiler.is_exporting():
        return False
    return q.shape[2] >= BLOCKED_LENGTH


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Encoding,
    q_at: Positions | None,
    k_at: Positions | None,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Call:
    if not isinstance(encoding, Encoding):
        raise ValueError(
            f"encoding must be an encoding as RoPE(head_dim=64), but is {encoding!r}; "
            "a config becomes one by config.build(num_heads=..., head_dim=...)"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, but is {type(x).__name__}; use torch.as_tensor")
        if x.is_nested or x.layout != torch.strided:
            kind = "nested" if x.is_nested else x.layout
            raise ValueError(
                f"{name} is {kind}, and attention takes dense tensors; pad it, or lay documents end to end "
                "and give their places (Positions.packed)"
            )
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, length, width], but has shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} is {x.dtype}; attention takes float16, bfloat16, float32 and float64")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share one dtype and device, but q is {q.dtype} on {q.device} "
                f"and {name} is {x.dtype} on {x.device}"
            )
    batch, heads, length, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if k.shape[0] != batch or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"k and v must be [{batch}, kv heads, keys, width], but are {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[3] != width:
        raise ValueError(f"q and k must have one width, but q is {width} wide and k {k.shape[3]}")
    if width == 0:
        raise ValueError("q and k are 0 wide, and give no scores; use 1 channel or more")
    if groups == 0 or heads % groups:
        raise ValueError(f"{heads} query heads do not divide over {groups} kv heads; use a divisor")
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, but is {causal!r}")
    if scale is not None and not isinstance(scale, Real | torch.SymFloat):
        raise ValueError(
            f"scale must be a number, but is {type(scale).__name__}; give a float, which gets no gradient"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, but is {scale}; None takes the encoding's own")
    for name, at in (("q_at", q_at), ("k_at", k_at)):
        if at is not None and not isinstance(at, Positions):
            raise ValueError(
                f"{name} must be Positions, but is {type(at).__name__}; use Positions(index, segment)"
            )
    if k_at is None and q_at is not None:
        raise ValueError("q_at is given without k_at; give the keys' places too")
    if q_at is None and length > keys:
        raise ValueError(
            f"without q_at the {length} queries are the last of the keys, but there are {keys}; give q_at"
        )
    if k_at is None:
        check_window(window, axes=1)
        encoding.check(heads, width, axes=1)
        return Call(q, k, v, encoding, None, causal, window, scale)
    for name, at, count in (("k_at", k_at, keys), ("q_at", q_at, length)):
        if at is None:
            continue
        if at.length != count or at.batch not in (1, batch):
            raise ValueError(
                f"{name} places {at.batch} x {at.length} tokens, but the tensors hold {batch} x {count}; "
                f"give [1 or {batch}, {count}]"
            )
        if at.device != q.device:
            raise ValueError(f"{name} is on {at.device}, but q is on {q.device}; use {name}.to(q.device)")
    if q_at is None:
        q_at = k_at if length == keys else k_at.narrow(keys - length, length)
    check_view(q_at, k_at, window)
    encoding.check(heads, width, q_at.axes)
    return Call(q, k, v, encoding, (q_at, k_at), causal, window, scale)
