"""Weights held against the model that they are for, and what is wrong with them, in words."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

FEW = 3


def misfit(wanted: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> str | None:
    """What keeps the tensors that are held from being those that a model wants; None when they fit.

    >>> import torch
    >>> misfit({"a": torch.ones(2), "b": torch.ones(2)}, {"b": torch.ones(3), "c": torch.ones(2)})
    '1 of 2 tensors missing (a), 1 unknown (c), 1 of another shape (b [3], not [2])'
    """
    missing, unknown = wanted.keys() - held.keys(), held.keys() - wanted.keys()
    reshaped = [
        reshaping(name, held[name].shape, tensor.shape)
        for name, tensor in wanted.items()
        if name in held and held[name].shape != tensor.shape
    ]
    kinds = (
        (f"of {len(wanted)} tensors missing", missing),
        ("unknown", unknown),
        ("of another shape", reshaped),
    )
    return ", ".join(f"{len(names)} {what} ({few(names)})" for what, names in kinds if names) or None


def require_finite(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ValueError for weights of `folder` that are no numbers, or infinite."""
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(f"{name} in {folder} is not finite; the checkpoint is broken, fetch it again")


def reshaping(name: str, held: Sequence[int], wanted: Sequence[int]) -> str:
    """A tensor of another shape than is wanted."""
    return f"{name} {list(held)}, not {list(wanted)}"


def few(names: Iterable[str]) -> str:
    """The first names in their order.

    >>> few(["d", "b", "c", "a"])
    'a, b, c, ...'
    """
    ordered = sorted(names)
    return ", ".join([*ordered[:FEW], *["..."] * (len(ordered) > FEW)])
