"""The loss of a model on windows of one length: in all, and by position within the window."""

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from phasewise.evaluate.slices import sliced_logits
from phasewise.positions import Positions

NOT_SCORED = -100
POSITION_BANDS = 16
LARGEST_EXPONENT = 700


class Scored(Protocol):
    """Rows of tokens and what to predict at each place, as `phasewise.data.windows` gives them.

    tokens, targets: int64 [B, T]; targets of -100 are not scored. positions: None when every row is T tokens
    from the start of a window.
    """

    @property
    def tokens(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def positions(self) -> Positions | None: ...


class PositionLoss(BaseModel):
    """The loss of the scored tokens at places first..last of their windows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int
    last: int
    tokens: int
    loss: float


class Measurement(BaseModel):
    """A model's loss at one length, with what it takes to read the number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int
    """Tokens in a window, the most a prediction can see."""
    stride: int
    """Tokens between the starts of two windows."""
    windows: int
    tokens: int
    """Scored tokens, each counted once."""
    loss: float
    """Mean negative log-likelihood, nats per scored token."""
    perplexity: float | None
    """exp(loss); None where that overflows."""
    bits: float
    """loss / ln 2: bits per byte when a token is a byte."""
    accuracy: float
    """Share of scored tokens that are the model's first choice."""
    by_position: tuple[PositionLoss, ...]
    """Bands of places; those where nothing is scored are left out."""
    exact: float | None = None
    """Of rows that are answers to be scored whole: share whose every scored token is the model's first choice."""


@torch.no_grad()
def measure(
    model: nn.Module,
    batches: Iterable[Scored],
    *,
    length: int,
    stride: int,
    device: torch.device,
    answers: bool = False,
) -> Measurement:
    """Measure a model's loss on rows of at most `length` tokens, windows that start `stride` tokens apart.

    Losses are summed in float64 token by token, so how the rows are batched makes no difference beyond the
    rounding of the model itself. Logits are float32, whatever the model's dtype, and never more at a time
    than `phasewise.evaluate.slices` allows. The model is put into evaluation mode.

    answers: a row's scored tokens are one answer, of which also the exact match is given. The model reads the
    answer's own tokens before each next one, which finds the same exact answers as greedy decoding.

    Raises ValueError when nothing is scored, and for a loss that is no finite number.
    """
    model.eval()
    total = torch.zeros(length, dtype=torch.float64)
    scored = torch.zeros(length, dtype=torch.int64)
    rows = wrong = whole = 0
    for batch in batches:
        at = None if batch.positions is None else batch.positions.to(device)
        targets = batch.targets.to(device)
        wanted = targets != NOT_SCORED
        scored[: wanted.shape[1]] += wanted.sum(0).cpu()
        rows += len(wanted)
        losses, right = graded(model, batch.tokens.to(device), targets, at=at)
        total[: wanted.shape[1]] += losses.double().sum(0).cpu()
        wrong += int((~right).sum())
        whole += int(right.all(1).sum())
    count = int(scored.sum())
    if not count:
        raise ValueError(f"no token is scored at length {length}: choose a shorter length or more tokens")
    loss = total.sum().item() / count
    if not math.isfinite(loss):
        raise ValueError(
            f"the model's loss at length {length} is {loss}: its weights or its dtype do not serve that length; "
            "try float32, and `phasewise doctor` on the checkpoint"
        )
    return Measurement(
        length=length,
        stride=stride,
        windows=rows,
        tokens=count,
        loss=loss,
        perplexity=math.exp(loss) if loss < LARGEST_EXPONENT else None,
        bits=loss / math.log(2),
        accuracy=(count - wrong) / count,
        by_position=_bands(total, scored),
        exact=whole / rows if answers else None,
    )


def graded(
    model: nn.Module, tokens: Tensor, targets: Tensor, *, at: Positions | None
) -> tuple[Tensor, Tensor]:
    """Losses [B, T] of targets [B, T] after `tokens` [B, T], float32, and whether each is the model's first choice.

    0 and True where none is scored. Logits are held in slices, of the places from the first scored one.
    """
    scored = targets != NOT_SCORED
    losses, right = torch.zeros(targets.shape, device=targets.device), ~scored
    for rows, places, logits in sliced_logits(model, tokens, at=at, first=_first(scored)):
        wanted = targets[rows, places]
        losses[rows, places] = token_losses(logits, wanted)
        right[rows, places] |= logits.argmax(-1) == wanted
    return losses, right


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The negative log-likelihood [B, n] of targets [B, n] under logits [B, n, V], 0 where none is scored.

    The vocabulary stays the last dimension: transposed, as `cross_entropy` would have rows of several places,
    it takes a copy of the logits, several times as long, and sums that are ten times less exact.
    """
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED, reduction="none"
    )
    return losses.view(targets.shape)


def _first(wanted: Tensor) -> int:
    """The first place scored in any row, the last place where none is."""
    places = wanted.any(0).nonzero()
    return int(places[0]) if len(places) else wanted.shape[1] - 1


def _bands(total: Tensor, scored: Tensor) -> tuple[PositionLoss, ...]:
    length = len(total)
    edges = sorted({length * band // POSITION_BANDS for band in range(POSITION_BANDS + 1)})
    bands = []
    for first, end in pairwise(edges):
        if count := int(scored[first:end].sum()):
            loss = total[first:end].sum().item() / count
            bands.append(PositionLoss(first=first, last=end - 1, tokens=count, loss=loss))
    return tuple(bands)
