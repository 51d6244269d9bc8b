"""A model that reads a beginning-of-text token before every row, as some were trained to.

Letters: B rows, T tokens, P tokens before them, W width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phasewise.evaluate.slices import Split, Vocabulary
from phasewise.positions import Positions


class Prefixed(nn.Module):
    """A model `Split` into body and head, whose rows all start with the same P tokens; these give no logits."""

    def __init__(self, model: nn.Module, prefix: Sequence[int]) -> None:
        super().__init__()
        assert isinstance(model, Split)
        self.split: Split = model  # a module, and registered as one
        self.prefix = tuple(prefix)

    @property
    def config(self) -> Vocabulary:
        return self.split.config

    def forward(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor:
        """Logits [B, T, V] of the token after each of `tokens` [B, T], places counted from the row's start."""
        return self.logits(self.hidden(tokens, at=at))

    def hidden(self, tokens: Tensor, *, at: Positions | None = None) -> Tensor:
        """What the body gives for `tokens`, [B, T, W]."""
        count = len(self.prefix)
        before = torch.tensor(self.prefix, device=tokens.device).expand(len(tokens), count)
        if at is not None:
            moved = Positions(torch.where(at.segment >= 0, at.index + count, 0), at.segment)
            at = Positions.cat(Positions.arange(count, device=tokens.device), moved)
        return self.split.hidden(torch.cat([before, tokens], 1), at=at)[:, count:]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, n, V] of `hidden` [B, n, W]."""
        return self.split.logits(hidden)
