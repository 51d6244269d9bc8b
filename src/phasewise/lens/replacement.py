"""How far back a model looks: the rise of its loss when the token at a distance is replaced.

Letters: W windows, V replacements a window, T tokens a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from phasewise.evaluate.loss import token_losses
from phasewise.lens.dependency import Curve, log_spaced


@torch.no_grad()
def replacement(
    model: Callable[[Tensor], Tensor],
    documents: Sequence[np.ndarray],
    *,
    context: int,
    windows: int = 64,
    replaced: int = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
    on_window: Callable[[int], None] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
) -> Curve:
    """The rise in a model's loss, in nats, at a token when the one r places before it is replaced.

    One replaced place gives the rise at every later token of its window, so at all distances at once:
    `replaced` places of each of `windows` windows are drawn uniformly, one a forward pass, and each gets a
    token drawn from the corpus (which sometimes is the token it had). A curve's value at a distance is the
    mean over the distances nearest to it in ln r; its blocks are the windows. Unlike mutual information it
    is causal, and says what this model uses, not what the data hold.

    model: tokens [V, T] -> logits [V, T, vocabulary], without dropout. documents: of the model's tokens;
    windows are drawn from those longer than `context`, each with one more token to predict.
    stop is asked before each window from the third on: when it says so, those that were done are the result.

    Raises ValueError for a context that no document fills.
    """
    long_enough = longer(documents, context)
    random = np.random.default_rng(seed)
    starts = np.array([len(document) - context for document in long_enough], dtype=float)
    distances = log_spaced(context)
    nearest = _nearest(distances, context)
    rises, counts = [], []
    for done in range(1, windows + 1):
        if len(rises) >= 2 and stop():
            break
        document = long_enough[random.choice(len(long_enough), p=starts / starts.sum())]
        start = random.integers(len(document) - context)
        window = document[start : start + context + 1].astype(np.int64)
        others = [long_enough[index] for index in random.integers(len(long_enough), size=replaced)]
        drawn = [int(other[random.integers(len(other))]) for other in others]
        rise, count = _rises(model, window, random.integers(context, size=replaced), drawn, device)
        rises.append(np.bincount(nearest, rise, minlength=len(distances)))
        counts.append(np.bincount(nearest, count, minlength=len(distances)))
        on_window(done)
    pairs = np.sum(counts, axis=0)
    kept = pairs > 0
    pairs = pairs[kept]
    return Curve(
        distances=distances[kept],
        pairs=pairs.astype(np.int64),
        parts=np.stack(rises)[:, kept] / pairs,
        shares=np.stack(counts)[:, kept] / pairs,
        baseline=np.zeros(len(pairs)),
        blocks="windows",
    )


def longer(documents: Sequence[np.ndarray], context: int) -> list[np.ndarray]:
    """The documents that fill a context, with one more token; ValueError where none does."""
    long_enough = [document for document in documents if len(document) > context]
    if not long_enough or context < 2:
        longest = max((len(document) for document in documents), default=0)
        raise ValueError(
            f"a context of {context} needs documents of more than {max(context, 2)} tokens, but the longest "
            f"has {longest}; choose a context from 2 to {longest - 1}"
        )
    return long_enough


def _rises(
    model: Callable[[Tensor], Tensor],
    window: np.ndarray,
    places: np.ndarray,
    drawn: Sequence[int],
    device: torch.device | str,
) -> tuple[np.ndarray, np.ndarray]:
    """Sum of the rises, and how many, at the distances 1 to T of one window, V places replaced in turn."""
    context = len(window) - 1
    rows = np.tile(window[:-1], (len(places) + 1, 1))
    rows[np.arange(1, len(rows)), places] = drawn
    logits = model(torch.from_numpy(rows).to(device)).float()
    targets = torch.from_numpy(window[1:]).to(device).expand(len(rows), -1)
    losses = token_losses(logits, targets).double().cpu().numpy()
    rise, count = np.zeros(context), np.zeros(context)
    for place, row in zip(places.tolist(), losses[1:], strict=True):
        rise[: context - place] += (row - losses[0])[place:]
        count[: context - place] += 1
    return rise, count


def _nearest(distances: np.ndarray, context: int) -> np.ndarray:
    """Which measured distance each of 1 to T counts for, int64 [T]."""
    middles = np.sqrt(distances[1:] * distances[:-1])
    return np.searchsorted(middles, np.arange(1, context + 1))
