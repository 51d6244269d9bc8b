"""What an encoding is: the score of every query with every key, and its separable form where it has one.

Letters: B batch, Hq and Hkv query and key heads, T queries, S keys, D head width, n rotating channels.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phasewise.positions import Positions, is_whole

WIDEST = 2**20
"""Channels of a head, and heads, that are taken for a size; more are taken for a slip."""


class EncodingConfig(BaseModel, ABC):
    """The settings of an encoding that do not depend on the sizes of a model; `kind` names the type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @abstractmethod
    def build(self, *, num_heads: int, head_dim: int) -> Encoding:
        """The encoding of one attention layer with `num_heads` query heads of width `head_dim`."""


class Encoding(nn.Module, ABC):
    """How much a query at one place wants a key at another: plain PyTorch, any float dtype.

    The scores are the specification and the oracle of every faster implementation. They carry the
    softmax scale and no mask: which keys are visible is `phasewise.positions.visible`.
    """

    kind: ClassVar[str]

    @property
    @abstractmethod
    def config(self) -> EncodingConfig:
        """The settings that `config.build(num_heads=..., head_dim=...)` makes this encoding from."""

    @abstractmethod
    def check(self, num_heads: int, head_dim: int, axes: int) -> None:
        """Raise ValueError unless this encoding serves queries of these sizes on that many position axes."""

    @abstractmethod
    def scores(
        self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions, *, scale: float | None = None
    ) -> Tensor:
        """The scaled scores [B, Hq, T, S], at least float32, of q [B, Hq, T, D] and k [B, Hkv, S, D].

        `scale` replaces the encoding's own softmax scale.
        """

    @property
    @abstractmethod
    def separable(self) -> bool:
        """Whether the scores separate into a query's part and a key's part."""

    @abstractmethod
    def factors(self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions) -> tuple[Tensor, Tensor] | None:
        """The separable form: f [B, Hq, T, E] and g [B, Hkv, S, E] with scores = scale * f g^T.

        None when the encoding is not `separable`.
        """


class Joint(Encoding):
    """An encoding whose scores do not separate: they are made where query and key meet."""

    @property
    def separable(self) -> bool:
        return False

    def factors(self, q: Tensor, k: Tensor, q_at: Positions, k_at: Positions) -> None:
        return None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which positional arithmetic on inputs of `dtype` is done: never below float32."""
    return torch.promote_types(dtype, torch.float32)


def angles(index: Tensor, rates: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Phases index * rate in radians, reduced to [-pi, pi] in float64 and only then cast to `dtype`.

    index: int64 [...]; rates: float64 [n], or [..., n] for rates of each place. Returns [..., n].

    >>> angles(torch.tensor([1_000_000]), torch.ones(1, dtype=torch.float64)).item()  # 1e6 mod 2 pi
    -0.357564...
    """
    turns = index[..., None] * (rates / (2 * math.pi))
    return ((turns - turns.round()) * (2 * math.pi)).to(dtype)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Dot products [B, Hq, T, S] of q [B, Hq, T, E] with k [B, Hkv, S, E].

    At least float32, also under autocast. Query head h meets key head h // (Hq // Hkv).
    """
    dtype = working_dtype(q.dtype)
    batch, heads, length, width = q.shape
    groups = k.shape[1]
    with exact(q.device):
        grouped = q.to(dtype).reshape(batch, groups, (heads // groups) * length, width)
        return (grouped @ k.to(dtype).transpose(-1, -2)).reshape(batch, heads, length, k.shape[2])


def exact(device: torch.device) -> AbstractContextManager[object]:
    """Where autocast, which would narrow what follows, is off; the meta device has none."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs), whose inner values the backward pass makes again; torch.func's derivatives keep them."""
    if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return function(*inputs)


def distances(q_at: Positions, k_at: Positions) -> Tensor:
    """Absolute distances |i - j| as int64 [B or 1, 1, T, S], differenced before any rounding."""
    return (q_at.index[:, None, :, None] - k_at.index[:, None, None, :]).abs()


def check_size(name: str, size: int, *, least: int = 1) -> None:
    """Raise ValueError unless `size` is a whole number from `least` to `WIDEST`."""
    if not is_whole(size) or not least <= size <= WIDEST:
        raise ValueError(f"{name} must be a whole number from {least} to {WIDEST}, but is {size!r}")


def one_axis(kind: str, axes: int) -> None:
    """Raise ValueError unless positions are on one axis."""
    if axes != 1:
        raise ValueError(f"{kind} needs positions on one axis, but they are on {axes}; use PoPE(axes={axes})")
