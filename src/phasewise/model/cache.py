"""The keys and values of tokens already seen, with their places.

Letters: B batch rows, H key heads, S places held, T new places, D head dim.
"""

from torch import Tensor

from phasewise.positions import Positions


class Cache:
    """What a decoder keeps of the past: keys before the encoding, values, and the place of each.

    Keys are stored as projected (after the q/k norm), so a later query may be scored at any rates: nothing
    goes stale when a length-dependent rule changes its rates. `model(tokens, cache=cache)` appends. A pass
    that fails leaves the cache as it was. Capacity doubles when full, so copying is linear in what is held.

    >>> Cache().length
    0
    """

    def __init__(self) -> None:
        self.length = 0
        self._keys: dict[int, _Store] = {}
        self._values: dict[int, _Store] = {}
        # None while every token came without places: they are then 0, 1, 2, .. in every row.
        self._places: tuple[_Store, _Store] | None = None

    @property
    def positions(self) -> Positions | None:
        """The places held, one row per batch row; None when they are 0 to length - 1 in every row."""
        if self._places is None:
            return None
        index, segment = self._places
        return Positions(index.first(self.length), segment.first(self.length))

    def places(self, at: Positions | None, tokens: Tensor) -> tuple[Positions | None, Positions | None]:
        """The places of new `tokens` [B, T], and of all keys once these are appended.

        Without `at` each row goes on from its last real token. (None, None) stands for keys 0 .. S - 1
        with the queries last. The tokens count as held only after `advance`.
        """
        rows, length = tokens.shape
        if self.length == 0:
            self._places = None
        if at is None and self._places is None:
            return None, None
        if self._places is None:
            self._places = _Store(dim=1), _Store(dim=1)
            past = Positions.arange(self.length, device=tokens.device).expand(rows)
            self._append(past, start=0)
        at = self._continued(length) if at is None else at.expand(rows)
        return at, self._append(at, start=self.length)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values [B, H, T, D]; return all held and new [B, H, S + T, D].

        Raises ValueError where gradients would be needed (they do not flow through a cache), and when batch,
        heads or dtype differ from what is held.
        """
        if keys.requires_grad or values.requires_grad:
            raise ValueError("gradients do not flow through a cache; run the model under torch.no_grad()")
        held_keys = self._keys.setdefault(layer, _Store(dim=2))
        held_values = self._values.setdefault(layer, _Store(dim=2))
        return held_keys.put(keys, start=self.length), held_values.put(values, start=self.length)

    def advance(self, length: int) -> None:
        """Count `length` places, which every layer has appended, as held."""
        self.length += length

    def _continued(self, length: int) -> Positions:
        past = self.positions
        assert past is not None
        return Positions.after(past, length)

    def _append(self, at: Positions, *, start: int) -> Positions:
        assert self._places is not None
        index, segment = self._places
        return Positions(index.put(at.index, start=start), segment.put(at.segment, start=start))


class _Store:
    """Tensors put end to end along one dimension, in memory that doubles when it is full."""

    def __init__(self, *, dim: int) -> None:
        self.dim = dim
        self.held = 0
        self.memory: Tensor | None = None

    def first(self, length: int) -> Tensor:
        assert self.memory is not None
        return self.memory.narrow(self.dim, 0, length)

    def put(self, new: Tensor, *, start: int) -> Tensor:
        """Write `new` from `start` on, and return everything up to its end (a view)."""
        end = start + new.shape[self.dim]
        if start == 0:
            self.memory = new.new_empty(self._shape(new, end))
        if self.memory is None or self.held < start:
            raise ValueError(
                f"a layer has not seen all of the {start} tokens that the cache holds, which are another model's; "
                "use a new Cache()"
            )
        held = self.memory
        if new.dtype != held.dtype or self._shape(new, 0) != self._shape(held, 0):
            raise ValueError(
                f"the cache holds {held.dtype} of shape {self._shape(held, start)} and cannot append "
                f"{new.dtype} of shape {tuple(new.shape)}; use a new Cache()"
            )
        if end > held.shape[self.dim]:
            self.memory = held.new_empty(self._shape(held, max(end, 2 * held.shape[self.dim])))
            self.memory.narrow(self.dim, 0, start).copy_(held.narrow(self.dim, 0, start))
        self.memory.narrow(self.dim, start, end - start).copy_(new)
        self.held = end
        return self.first(end)

    def _shape(self, tensor: Tensor, length: int) -> tuple[int, ...]:
        return (*tensor.shape[: self.dim], length, *tensor.shape[self.dim + 1 :])
