"""Continuing token sequences, one token at a time.

Letters: B batch rows, T prompt tokens, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor

from phasewise.attention import Implementation
from phasewise.model.cache import Cache
from phasewise.model.config import ModelConfig
from phasewise.model.transformer import Transformer, check_tokens
from phasewise.positions import Positions, check_mask, is_whole

COLDEST = 1e-30  # logits over a smaller temperature leave the range of float32


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    *,
    length: int,
    mask: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop: int | Sequence[int] | Tensor | None = None,
    impl: Implementation = "auto",
) -> Tensor:
    """`tokens` [B, T] followed by `length` tokens of the model's own: int64 [B, T + length].

    mask: bool [B, T], True at real tokens; shorter prompts are padded on the left.
    temperature: 0 takes the likeliest token; above it, tokens are drawn from softmax(logits / temperature),
    of the `top_k` likeliest, and of the fewest whose probabilities reach `top_p`. generator: seeds the draws.
    stop: a row that produces this token, or one of these, holds nothing else after it, and fewer than `length`
    tokens are added when every row has stopped.

    Raises ValueError for a model that would drop out, padding on the right, and options that do not apply.

    >>> from phasewise.encodings import NoPEConfig
    >>> from phasewise.model.config import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=5, width=8, layers=1, heads=1, encoding=NoPEConfig()))
    >>> generate(model, torch.tensor([[1, 2]]), length=3).shape
    torch.Size([1, 5])
    """
    _check(model, tokens, length, mask, temperature, top_k, top_p, generator)
    pieces, new = [tokens], tokens
    at = None if mask is None else Positions.padded(mask)
    cache = Cache()
    stops = torch.tensor(_stops(stop), device=tokens.device)
    stopped = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in range(length):
        logits = model(new, at=at, cache=cache, keep=1, impl=impl)[:, -1]
        chosen = choose(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if len(stops):
            chosen = torch.where(stopped, new[:, -1], chosen)
            stopped = torch.isin(chosen, stops)
        new, at = chosen[:, None], None
        pieces.append(new)
        if len(stops) and bool(stopped.all()):
            break
    return torch.cat(pieces, dim=1)


def choose(
    logits: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row of `logits` [B, V]; the options are those of `generate`. int64 [B].

    >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), temperature=0.0).tolist()
    [1]
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    ordered, token = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered, token = ordered[:, :top_k], token[:, :top_k]
    probabilities = ordered.softmax(dim=-1)
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return token.gather(1, drawn)[:, 0]


def _stops(stop: int | Sequence[int] | Tensor | None) -> list[int]:
    told = stop.tolist() if isinstance(stop, Tensor) else stop
    given = [*told] if isinstance(told, Iterable) else [] if told is None else [told]
    if not all(map(is_whole, given)):
        raise ValueError(f"stop must be a token's number, or several, but is {stop!r}")
    return given


def _check(
    model: Transformer,
    tokens: Tensor,
    length: int,
    mask: Tensor | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> None:
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise ValueError(
            f"model must be a Transformer, but is {type(model).__name__}; of one that is wrapped give the one within"
        )
    check_tokens(tokens)
    if tokens.shape[1] == 0:
        raise ValueError(f"tokens must be [B, T] with T at least 1, but have shape {tuple(tokens.shape)}")
    known = model.config.vocab_size
    for token in tokens.aminmax() if tokens.numel() else ():
        if not 0 <= int(token) < known:
            raise ValueError(
                f"tokens hold {int(token)}, but the model knows 0 to {known - 1}; use the tokenizer it was trained with"
            )
    if not is_whole(length) or length < 0:
        raise ValueError(f"length is a number of tokens to add and must not be negative, but is {length!r}")
    if model.training and model.config.dropout > 0:
        raise ValueError(f"the model trains, with dropout {model.config.dropout}; call model.eval() first")
    if mask is not None:
        check_mask(mask)
        if mask.shape != tokens.shape:
            raise ValueError(f"mask {tuple(mask.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        real = mask.bool()
        if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise ValueError("mask must be False, then True to the end of each row: pad prompts on the left")
    if not isinstance(temperature, Real) or not (temperature == 0 or COLDEST <= temperature < float("inf")):
        raise ValueError(
            f"temperature must be 0 (greedy) or a finite number from {COLDEST}, but is {temperature!r}"
        )
    if not isinstance(generator, torch.Generator | None):
        raise ValueError(
            f"generator must be a torch.Generator, but is {generator!r}; "
            "use torch.Generator(device).manual_seed(3)"
        )
    if temperature == 0 and not (top_k is None and top_p is None and generator is None):
        raise ValueError("top_k, top_p and generator only apply to sampling; give a temperature above 0")
    if top_k is not None and not (is_whole(top_k) and top_k >= 1):
        raise ValueError(f"top_k must be at least 1, but is {top_k!r}; give a number of tokens")
    if top_p is not None and not (isinstance(top_p, Real) and 0 < top_p <= 1):
        raise ValueError(f"top_p must be above 0 and at most 1, but is {top_p!r}")
