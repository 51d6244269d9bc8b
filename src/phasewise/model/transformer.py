"""A plain decoder: pre-norm blocks of attention and feed-forward; position enters through attention alone.

Letters: B batch rows, T tokens, S keys, W width, V vocabulary, Hq and Hkv query and key heads, D head dim.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasewise.attention import Implementation, attention
from phasewise.frequencies import AnyFrequencies
from phasewise.model.cache import Cache
from phasewise.model.config import ModelConfig
from phasewise.positions import Positions, check_places, is_whole, plain

if TYPE_CHECKING:  # it loads torch.distributed, and that Triton
    from phasewise.model.parallel import Sharding

INIT_STD = 0.02
RESIDUAL_OUTPUTS = ("attention.output.weight", "feed_forward.down.weight")

Linear = partial(nn.Linear, bias=False)


class Transformer(nn.Module):
    """A decoder-only language model.

    Weights start as GPT-2's do: normal with deviation 0.02, the two projections that each layer adds to the
    residual stream divided by sqrt(2 layers). Nothing positional is in the state dict but learned phases.

    >>> from phasewise.encodings import RoPEConfig
    >>> model = Transformer(ModelConfig(vocab_size=11, width=16, layers=2, heads=2, encoding=RoPEConfig()))
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).shape
    torch.Size([1, 5, 11])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        # A tied head has no parameter of its own: a shared one would come apart in to_empty().
        self.head = None if config.tied else Linear(config.width, config.vocab_size)
        self.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        *,
        at: Positions | None = None,
        cache: Cache | None = None,
        keep: int | None = None,
        impl: Implementation = "auto",
        sharding: "Sharding | None" = None,
    ) -> Tensor:
        """The logits [B, T, V] of the token after each of `tokens` [B, T].

        at: the places of the tokens; without them, 0, 1, 2, .. in every row, or on from the cache's last.
        cache: past keys and values, to which these tokens' are appended (not under autograd).
        keep: give logits for the last `keep` tokens alone. impl: see `phasewise.attention.attention`.
        sharding: `tokens` and `at` are what this process holds of rows that several processes share.

        Raises ValueError when shapes do not fit, or when `impl` cannot serve one of the layers.
        """
        if keep is not None and not (is_whole(keep) and keep >= 1):
            raise ValueError(
                f"keep is the number of last tokens to give logits for, at least 1, but is {keep}"
            )
        x = self.hidden(tokens, at=at, cache=cache, impl=impl, sharding=sharding)
        return self.logits(x if keep is None else x[:, -plain(keep) :])

    def hidden(
        self,
        tokens: Tensor,
        *,
        at: Positions | None = None,
        cache: Cache | None = None,
        impl: Implementation = "auto",
        sharding: "Sharding | None" = None,
    ) -> Tensor:
        """What the head reads, [B, T, W]: `logits(hidden(tokens))` is `self(tokens)`, and may go in slices."""
        check_tokens(tokens)
        if at is not None:
            check_places("at", at)
        if not isinstance(cache, Cache | None):
            raise ValueError(f"cache must be a Cache, but is {type(cache).__name__}; use phasewise.Cache()")
        if at is not None and at.length != tokens.shape[1]:
            raise ValueError(f"{tokens.shape[1]} tokens have {at.length} places; give one place per token")
        if sharding is not None and cache is not None:
            raise ValueError("rows that several processes share are not cached; leave out cache or sharding")
        q_at, k_at = (at, at) if cache is None else cache.places(at, tokens)
        if sharding is not None and at is not None:
            k_at = sharding.places(at)
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, q_at, k_at, cache, impl, sharding)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's logits [B, T, V] of `hidden` [B, T, W]."""
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    @property
    def parameter_count(self) -> int:
        """All parameters, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter to its initial value, as after `to_empty`; on the meta device there are none."""
        if self.embedding.weight.is_meta:
            return
        residual_std = INIT_STD / (2 * self.config.layers) ** 0.5
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, Attention):
                module.reset_encoding()
        for name, parameter in self.named_parameters():
            if name.endswith(RESIDUAL_OUTPUTS):
                nn.init.normal_(parameter, std=residual_std)


def check_tokens(tokens: Tensor) -> None:
    """Raise ValueError unless `tokens` are numbers of tokens, [B, T]."""
    if not isinstance(tokens, Tensor):
        raise ValueError(f"tokens must be a tensor, but are {type(tokens).__name__}; use torch.as_tensor")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"tokens must be int64, but are {tokens.dtype}; use .to(torch.int64)")
    if tokens.ndim != 2:
        raise ValueError(f"tokens must be [B, T], but have shape {tuple(tokens.shape)}; use tokens[None]")


def looked_up(tokens: Tensor, weight: Tensor) -> Tensor:
    """The rows of `weight` [V, W] that `tokens` [B, T] name, [B, T, W], with a gradient that repeats bit for bit.

    Each is a sum of one row. The gradient of a plain look-up adds in no fixed order on CUDA where few rows are
    named often, as of bytes (torch 2.11 and later, `compute_grad_weight_atomic_accumulate`); that of sums does not.

    >>> looked_up(torch.tensor([[2, 0]]), torch.eye(3))
    tensor([[[0., 0., 1.],
             [1., 0., 0.]]])
    """
    return F.embedding_bag(tokens.reshape(-1, 1), weight, mode="sum").unflatten(0, tokens.shape)


class Embedding(nn.Embedding):
    """torch's embedding, with the gradient of `looked_up`."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # where torch takes seconds to load its compiler, and draws nothing
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return looked_up(input, self.weight)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = FEED_FORWARDS[config.activation](config.width, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        q_at: Positions | None,
        k_at: Positions | None,
        cache: Cache | None,
        impl: Implementation,
        sharding: "Sharding | None",
    ) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), q_at, k_at, cache, impl, sharding))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Attention(nn.Module):
    """One layer's projections around `phasewise.attention.attention`, with its encoding and window."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
        self.layer = layer
        self.head_dim = head_dim
        self.window = config.windows[layer]
        self.query = Linear(config.width, heads * head_dim)
        self.key = Linear(config.width, kv_heads * head_dim)
        self.value = Linear(config.width, kv_heads * head_dim)
        self.output = Linear(heads * head_dim, config.width)
        norm = partial(RMSNorm, eps=config.norm_eps) if config.qk_norm else nn.Identity
        self.query_norm = norm(head_dim)
        self.key_norm = norm(head_dim)
        self.encoding = config.encodings[layer].build(num_heads=heads, head_dim=head_dim)

    def reset_encoding(self) -> None:
        """Give the encoding the parameters that a new one of its config starts with."""
        heads = self.query.out_features // self.head_dim
        fresh = self.encoding.config.build(num_heads=heads, head_dim=self.head_dim)
        self.encoding.load_state_dict(fresh.state_dict())

    def forward(
        self,
        x: Tensor,
        q_at: Positions | None,
        k_at: Positions | None,
        cache: Cache | None,
        impl: Implementation,
        sharding: "Sharding | None",
    ) -> Tensor:
        q = self.query_norm(self._heads(self.query(x)))
        k = self.key_norm(self._heads(self.key(x)))
        v = self._heads(self.value(x))
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        attend = attention if sharding is None else sharding.attend
        out = attend(q, k, v, self.encoding, q_at=q_at, k_at=k_at, window=self.window, impl=impl)
        return self.output(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); Shazeer, arXiv 2002.05202."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(width, hidden)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


FEED_FORWARDS = {"swiglu": SwiGLU, "gelu": GELU}


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last dimension, in float32 or wider whatever the dtype of x."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps).to(x.dtype)


def rescaled(model: Transformer, frequencies: AnyFrequencies) -> Transformer:
    """The same model, sharing its weights, with `frequencies` in every layer whose encoding has frequencies.

    What a checkpoint is given to serve lengths beyond those it was trained on. Layers without frequencies
    stay as they are; raises ValueError when no layer has any.

    >>> from phasewise.encodings import RoPEConfig
    >>> from phasewise.frequencies import Linear as Interpolation
    >>> model = Transformer(ModelConfig(vocab_size=11, width=16, layers=2, heads=2, encoding=RoPEConfig()))
    >>> rescaled(model, Interpolation(base=1e4, factor=2.0)).config.encodings[1].frequencies.factor
    2.0
    """
    if not isinstance(model, Transformer):
        raise ValueError(
            f"model must be a Transformer, but is {type(model).__name__}; give the one that is compiled or wrapped"
        )
    encodings = model.config.encodings
    changed = tuple(
        type(encoding)(**{**dict(encoding), "frequencies": frequencies})
        if "frequencies" in type(encoding).model_fields
        else encoding
        for encoding in encodings
    )
    if not any("frequencies" in type(encoding).model_fields for encoding in encodings):
        kinds = ", ".join(sorted({encoding.kind for encoding in encodings}))
        raise ValueError(f"the encodings ({kinds}) have no frequencies to change; rope and pope do")
    same = len(set(changed)) == 1
    config = model.config.model_copy(update={"encoding": changed[0] if same else changed})
    with torch.device("meta"):
        twin = Transformer(config)
    for new, old in zip(twin.modules(), model.modules(), strict=True):
        for name, parameter in old.named_parameters(recurse=False):
            new.register_parameter(name, parameter)
    return twin.train(model.training)
