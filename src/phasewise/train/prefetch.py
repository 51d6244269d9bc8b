"""Batches made and sent to the device ahead of the step that needs them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from phasewise.data import NOT_SCORED, Batch, Corpus, batch
from phasewise.model.layout import Layout
from phasewise.positions import Positions
from phasewise.train.processes import Processes
from phasewise.train.recipe import TrainRecipe

AHEAD = 2

Part = tuple[Tensor, Tensor, Positions | None, Tensor]
"""Tokens and targets [rows, T], places, and what to divide the summed loss by."""


@contextmanager
def ahead(
    recipe: TrainRecipe, corpus: Corpus, processes: Processes, *, start: int
) -> Iterator[Iterator[tuple[Part, ...]]]:
    """Give what this process gets of each step's batch, from step `start` on, in parts to accumulate.

    The batch is the same whatever the number of processes and parts: each takes its rows, and of rows
    that several share its places. The divisor makes the mean over processes of the parts' sum the mean loss of
    the batch's scored tokens.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
        coming = deque(
            pool.submit(_parts, recipe, corpus, processes, step)
            for step in range(start, min(start + AHEAD, recipe.steps))
        )

        def steps() -> Iterator[tuple[Part, ...]]:
            for step in range(start, recipe.steps):
                parts = coming.popleft().result()
                if step + AHEAD < recipe.steps:
                    coming.append(pool.submit(_parts, recipe, corpus, processes, step + AHEAD))
                yield parts

        try:
            yield steps()
        finally:
            for future in coming:
                future.cancel()


def _parts(recipe: TrainRecipe, corpus: Corpus, processes: Processes, step: int) -> tuple[Part, ...]:
    drawn = batch(
        corpus,
        "train",
        step=step,
        context=recipe.context,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        packed=recipe.packed,
    )
    scored = int((drawn.targets != NOT_SCORED).sum())
    divisor = torch.tensor(scored / processes.size, dtype=torch.float32)
    rows, sharing = recipe.divide(processes.size), recipe.context_processes
    groups, group = processes.size // sharing, processes.rank // sharing
    starts = [(part * groups + group) * rows for part in range(recipe.accumulate)]
    layout = Layout(processes.rank % sharing, sharing) if sharing > 1 else None
    return tuple(
        _sent(drawn, slice(start, start + rows), layout, divisor, processes.device) for start in starts
    )


def _sent(drawn: Batch, rows: slice, layout: Layout | None, divisor: Tensor, device: torch.device) -> Part:
    places = drawn.positions if drawn.positions is None else drawn.positions.rows(rows)
    tokens, targets = drawn.tokens[rows], drawn.targets[rows]
    if layout is not None:
        tokens, targets = layout.split(tokens), layout.split(targets)
        places = None if places is None else layout.split(places)
    places = None if places is None else places.to(device)
    if device.type != "cuda":
        return tokens.to(device), targets.to(device), places, divisor.to(device)
    tokens, targets, divisor = (
        x.pin_memory().to(device, non_blocking=True) for x in (tokens, targets, divisor)
    )
    return tokens, targets, places, divisor
