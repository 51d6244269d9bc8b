"""One sequence over several processes: each holds some of its tokens, and gathers the keys and values of all.

Letters: B rows, Hq and Hkv query and key heads, T places of this process, S places of all, D head dim.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from phasewise.attention import Implementation, attention
from phasewise.encodings.base import Encoding
from phasewise.model.layout import Layout, Order
from phasewise.positions import Positions

_ALL_GATHER = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name before torch 2.13


@dataclass(frozen=True)
class Sharding:
    """Context parallelism: which places of a row this process holds, and attention over the places of all.

    Keys and values are gathered as they are cached, before the encoding, so every encoding and rule is served
    alike. Given places travel with the tokens; without any, each chunk of queries is the end of a run of keys,
    which the fastest kernels take.

    group: the processes that share each row. order: of their places, as `Layout` has it.
    regather: keep this process's keys and values for the backward pass and gather the rest again, so that only
    one layer's are ever whole; False where blocks are checkpointed, which gathers them again anyway.

    Raises ValueError for an unknown order, and in a process that is not of the group.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> sharding = Sharding.over(dist.init_device_mesh("cpu", (1,), mesh_dim_names=("context",)))
    >>> sharding.layout.split(torch.arange(4)[None]), sharding.layout.chunks
    (tensor([[0, 1, 2, 3]]), (0, 1))
    >>> dist.destroy_process_group()
    """

    group: dist.ProcessGroup
    order: Order = "zigzag"
    regather: bool = True

    def __post_init__(self) -> None:
        if self.layout.rank < 0:
            raise ValueError("this process is not of the group; give a group that it belongs to")

    @classmethod
    def over(cls, mesh: DeviceMesh, axis: str = "context", **settings: Any) -> Sharding:
        """Sharding along an axis of a device mesh; ValueError when the mesh has no axis of that name."""
        names = mesh.mesh_dim_names or ()
        if axis not in names:
            raise ValueError(f"the mesh has no axis {axis!r}; it has {', '.join(names) or 'no named axes'}")
        return cls(mesh.get_group(axis), **settings)

    @property
    def layout(self) -> Layout:
        """What this process holds of every row."""
        return Layout(dist.get_rank(self.group), dist.get_world_size(self.group), self.order)

    def places(self, at: Positions) -> Positions:
        """The places of whole rows, of which this process holds `at`."""
        return Positions(self.gather(at.index, dim=1), self.gather(at.segment, dim=1))

    @torch.compiler.disable()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        encoding: Encoding,
        *,
        q_at: Positions | None,
        k_at: Positions | None,
        window: int | None,
        impl: Implementation,
    ) -> Tensor:
        """Causal attention of this process's queries to the keys of all: [B, Hq, T, D].

        q [B, Hq, T, D], k and v [B, Hkv, T, D]: this process's. q_at: their places, and k_at those of whole
        rows; both None when a row is S places from 0. Every process of the group must call this in turn, also
        for the backward pass. Raises ValueError where `attention` would.
        """
        held = _Held(self, k.detach(), v.detach())
        keys, values = _Gather.apply(k, v, held)
        with saved_tensors_hooks(held.pack, held.unpack) if self.regather else nullcontext():
            if q_at is not None:
                out = attention(q, keys, values, encoding, q_at=q_at, k_at=k_at, window=window, impl=impl)
            else:
                parts, chunks = [], self.layout.chunks
                for part, chunk in zip(q.chunk(len(chunks), 2), chunks, strict=True):
                    end = (chunk + 1) * part.shape[2]
                    parts.append(
                        attention(
                            part, keys[:, :, :end], values[:, :, :end], encoding, window=window, impl=impl
                        )
                    )
                out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        held.drop()
        return out

    def gather(self, part: Tensor, *, dim: int) -> Tensor:
        """What all processes hold along `dim`, in the order of the row."""
        first = part.movedim(dim, 0).contiguous()
        whole = first.new_empty(self.layout.size * len(first), *first.shape[1:])
        _ALL_GATHER(whole, first, group=self.group)
        held = self.layout.held
        return self._reordered(whole, sorted(range(len(held)), key=held.__getitem__)).movedim(0, dim)

    def reduce(self, whole: Tensor, *, dim: int) -> Tensor:
        """This process's part of the sum of all processes' `whole`, added in float32 or wider, in fixed order."""
        sent = self._reordered(whole.movedim(dim, 0), self.layout.held).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        wide = torch.promote_types(whole.dtype, torch.float32)
        return (
            received.unflatten(0, (self.layout.size, -1)).sum(0, dtype=wide).to(whole.dtype).movedim(0, dim)
        )

    def _reordered(self, places: Tensor, order: list[int]) -> Tensor:
        """The chunks along the first dimension in another order; the tensor itself where that is the same."""
        if order == sorted(order):
            return places
        chunks = places.chunk(len(order))
        return torch.cat([chunks[number] for number in order])


class _Held:
    """A layer's keys and values: this process's, and those of all for as long as they are needed."""

    def __init__(self, sharding: Sharding, k: Tensor, v: Tensor) -> None:
        self.sharding = sharding
        self.local = k, v
        self.whole: tuple[Tensor, Tensor] | None = None

    def get(self) -> tuple[Tensor, Tensor]:
        if self.whole is None:
            k, v = (self.sharding.gather(x, dim=2) for x in self.local)
            self.whole = k, v
        return self.whole

    def drop(self) -> None:
        self.whole = None

    def pack(self, saved: Tensor) -> Any:
        """What to keep of a tensor saved for the backward pass: of gathered ones only which part they are."""
        storage = saved.untyped_storage().data_ptr()
        for number, whole in enumerate(self.get()):
            if whole.untyped_storage().data_ptr() == storage:
                return number, saved.shape, saved.stride(), saved.storage_offset()
        return saved.detach()

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        number, shape, stride, offset = kept
        return self.get()[number].as_strided(shape, stride, offset)


class _Gather(torch.autograd.Function):
    """The keys and values of all processes; backward, the sum of what all want of this process's."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, held: _Held) -> tuple[Tensor, Tensor]:
        ctx.held = held
        keys, values = held.get()
        return keys.view_as(keys), values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.held.drop()
        dk, dv = (ctx.held.sharding.reduce(gradient, dim=2) for gradient in gradients)
        return dk, dv, None
