"""Our models behind lm-eval's interface.

A request is a context and a continuation in text. They are encoded together, so that the tokens are those of
the text, and the continuation's are the ones from the first that the context alone does not determine. Nothing
is cut to fit a length.

Letters: B rows, T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn

from phasewise.evaluate.loss import NOT_SCORED, graded
from phasewise.evaluate.slices import Continues, sliced_logits
from phasewise.positions import Positions

MOST_GENERATED = 256


@dataclass(frozen=True)
class Text:
    """How a model's text becomes tokens and back.

    before: tokens that stand before every text. start: the token that stands before one without context where
    nothing else does. stop: the tokens that end a text.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[np.ndarray], str]
    start: int
    stop: Sequence[int] = ()
    before: Sequence[int] = ()


@dataclass(frozen=True)
class _Row:
    """Tokens to read, of which those from `first` on are to be predicted."""

    tokens: list[int]
    first: int


class Harness(LM):
    """A module `forward(tokens, at=None) -> logits` as lm-eval sees a model.

    rolling_length: tokens that a window of a rolling log-likelihood holds. batch_tokens: tokens of a batch.
    on_rows: told how many rows a batch had; raise from it to stop.
    """

    def __init__(
        self,
        model: nn.Module,
        text: Text,
        *,
        device: torch.device,
        rolling_length: int = 2048,
        batch_tokens: int = 4096,
        on_rows: Callable[[int], None] = lambda _rows: None,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.text = text
        self.rolling_length = rolling_length
        self.batch_tokens = batch_tokens
        self.on_rows = on_rows
        self._device = device

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return self._score([self._row(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        windows: list[list[_Row]] = []
        for request in requests:
            (string,) = request.args
            rolling = get_rolling_token_windows(
                token_list=list(self.text.encode(string)),
                prefix_token=self.text.start,
                max_seq_len=self.rolling_length,
                context_len=1,
            )
            pairs = enumerate(map(make_disjoint_window, rolling))
            windows.append([self._read(context if at else (), said) for at, (context, said) in pairs])
        scores = iter(self._score([row for rows in windows for row in rows]))
        return [math.fsum(next(scores)[0] for _ in rows) for rows in windows]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _row(self, context: str, continuation: str) -> _Row:
        # A space between the two belongs to the word after it, as tokenizers have it.
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        whole = list(self.text.encode(bare + continuation))
        first = 0
        for alone, together in zip(self.text.encode(bare), whole, strict=False):
            if alone != together:
                break
            first += 1
        return self._read(whole[:first], whole[first:])

    def _read(self, context: Sequence[int], following: Sequence[int]) -> _Row:
        """Tokens to predict after others, with what stands before every text."""
        context = [*self.text.before, *context] or [self.text.start]
        return _Row([*context, *following], len(context))

    @torch.no_grad()
    def _score(self, rows: Sequence[_Row]) -> list[tuple[float, bool]]:
        """Log-likelihood of each row's predicted tokens, and whether each is the model's first choice."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        longest_first = sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens))
        while longest_first:
            size = max(1, self.batch_tokens // len(rows[longest_first[0]].tokens))
            batch, longest_first = longest_first[:size], longest_first[size:]
            for index, outcome in zip(batch, self._batch([rows[index] for index in batch]), strict=True):
                found[index] = outcome
            self.on_rows(len(batch))
        return found

    def _batch(self, rows: Sequence[_Row]) -> Iterator[tuple[float, bool]]:
        width = max(len(row.tokens) for row in rows) - 1
        tokens = torch.zeros(len(rows), max(1, width), dtype=torch.int64)
        targets = torch.full_like(tokens, NOT_SCORED)
        for number, row in enumerate(rows):
            whole = torch.tensor(row.tokens)
            tokens[number, : len(whole) - 1] = whole[:-1]
            targets[number, row.first - 1 : len(whole) - 1] = whole[row.first :]
        lengths = torch.tensor([[len(row.tokens) - 1] for row in rows])
        real = torch.arange(tokens.shape[1]) < lengths
        # Some checkpoints turn by the length of a row, which is then not that of the longest beside it.
        at = None if bool(real.all()) else Positions.padded(real).to(self._device)
        losses, right = graded(self.model, tokens.to(self._device), targets.to(self._device), at=at)
        return zip((-losses.double().sum(1)).tolist(), right.all(1).tolist(), strict=True)

    @torch.no_grad()
    def _generate(self, context: str, options: dict) -> str:
        """The likeliest continuation, up to a stop string, the model's own end, or the most tokens asked for."""
        if options.get("do_sample") or options.get("temperature"):
            raise ValueError(f"generation is greedy, but a task asks for {options}: choose another task")
        until = [options["until"]] if isinstance(options.get("until"), str) else options.get("until") or []
        tokens = self._read(self.text.encode(context), ()).tokens
        made = self._continued(
            torch.tensor([tokens], device=self._device), options.get("max_gen_toks", MOST_GENERATED)
        )
        said = self.text.decode(np.array(made[:-1] if made and made[-1] in self.text.stop else made))
        self.on_rows(1)
        return said[: min((said.index(stop) for stop in until if stop in said), default=len(said))]

    def _continued(self, tokens: Tensor, length: int) -> list[int]:
        if isinstance(self.model, Continues):
            return self.model.continued(tokens, length=length, stop=self.text.stop).tolist()
        made: list[int] = []
        while len(made) < length and not (made and made[-1] in self.text.stop):
            ((*_, logits),) = sliced_logits(self.model, tokens, at=None, first=tokens.shape[1] - 1)
            made.append(int(logits[0, -1].argmax()))
            tokens = torch.cat([tokens, tokens.new_tensor([made[-1:]])], 1)
        return made
