"""The training step of tasks with short rows: rows laid end to end, and only what the answers need.

Letters: N tokens in all, R rows, A answers, T places, W width. The model's function is unchanged; what is saved
is the padding, the last block's output where there is no answer, the passage of scores through memory
(`phasewise.kernels.short`), and the copies of weights and gradients that autocast makes.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import _foreach_add_ as foreach_add  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_mul_ as foreach_mul  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_norm as foreach_norm  # pyright: ignore[reportPrivateImportUsage]

from phasewise.data import NOT_SCORED, Batch, Corpus
from phasewise.encodings import PoPE, RoPE
from phasewise.frequencies import Static
from phasewise.model import Transformer
from phasewise.model.transformer import Attention, Block, RMSNorm
from phasewise.train.objective import autocast
from phasewise.train.recipe import TrainRecipe

LONGEST = 64
WIDTHS = (32, 64, 128)
TILE = 128
DEVIATIONS = 6
BETA1, EPSILON = 0.9, 1e-8


def obstacle(recipe: TrainRecipe, corpus: Corpus, device: torch.device) -> str | None:
    """Why this step cannot serve a recipe; None when it can."""
    model = recipe.model
    if device.type != "cuda":
        return "it runs on CUDA alone"
    task = corpus.task
    if task is None or task.row_length > LONGEST or task.answer_length is None:
        return f"it takes tasks with answers of one length, in rows of at most {LONGEST} tokens"
    if model.dropout or recipe.recompute or model.kv_heads != model.heads or model.head_dim not in WIDTHS:
        return f"it takes heads of width {WIDTHS}, each with its keys, without dropout or recomputation"
    encodings = [config.build(num_heads=1, head_dim=model.head_dim) for config in set(model.encodings)]
    if any(model.windows) or not all(map(_turns, encodings)):
        return "it takes RoPE and PoPE with fixed rates on all channels, without windows"
    return None


def _turns(encoding: nn.Module) -> bool:
    if not isinstance(encoding, RoPE | PoPE) or not isinstance(encoding.frequencies, Static):
        return False
    return encoding.axes == 1 and (isinstance(encoding, PoPE) or 2 * encoding.channels == encoding.head_dim)


class ShortRows:
    """Loss and AdamW step of a model on rows laid end to end.

    The blocks' matrices are used in the recipe's precision, in copies that the step renews. The model's own
    stay float32, and it can be evaluated between steps.
    """

    def __init__(
        self, model: Transformer, optimizer: torch.optim.AdamW, recipe: TrainRecipe, corpus: Corpus
    ) -> None:
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.narrow = recipe.precision == "bfloat16"
        self.twin, self.pairs = _twin(model, torch.bfloat16 if self.narrow else torch.float32)
        self.blocks = cast("list[Block]", list(self.twin.blocks))
        self.turns = [_turning(block.attention) for block in self.blocks]
        self.attend, self.finish, self.adamw = (_compiled(f, recipe) for f in (_attend, _finish, _adamw))
        lengths = corpus.split("train").lengths - 1
        mean, spread = recipe.batch_size * lengths.mean(), math.sqrt(recipe.batch_size) * lengths.std()
        most = min(mean + DEVIATIONS * spread, recipe.batch_size * lengths.max())
        self.room = math.ceil(most / TILE) * TILE
        self.spare = math.ceil((self.room - max(mean - DEVIATIONS * spread, 0)) / LONGEST)

    def stack(self, drawn: Sequence[Batch]) -> tuple[Tensor, ...]:
        """Batches as `loss` takes one: tokens [steps, N]; start and length of each row [steps, R]; place and token of
        each answer [steps, A].

        What is left over of N makes rows of its own, which no answer looks at. Raises ValueError for a batch
        further from the mean length than one in 10^9 is.
        """
        padded, targets = (torch.stack([getattr(b, name) for b in drawn]) for name in ("tokens", "targets"))
        steps, rows, width = padded.shape
        real = torch.stack([_real(b) for b in drawn])
        lengths = real.sum(-1)
        rest = self.room - lengths.sum(1, keepdim=True) - LONGEST * torch.arange(self.spare)
        if (rest[:, :1] < 0).any() or (rest[:, -1:] > LONGEST).any():
            raise ValueError(f"a batch has {lengths.sum(1).tolist()} tokens: use padded rows for this corpus")
        lengths = torch.cat([lengths, rest.clamp(0, LONGEST)], dim=1)
        starts = lengths.cumsum(1) - lengths
        places = starts[:, :rows, None] + torch.arange(width)
        tokens = torch.zeros(steps, self.room, dtype=torch.int64)
        step = torch.arange(steps)[:, None, None].expand(steps, rows, width)
        tokens[step[real], places[real]] = padded[real]
        answered = targets != NOT_SCORED
        return tokens, starts, lengths, places[answered].view(steps, -1), targets[answered].view(steps, -1)

    def loss(self, tokens: Tensor, start: Tensor, length: Tensor, at: Tensor, answers: Tensor) -> Tensor:
        """The mean loss of the answers of one batch."""
        twin = self.twin
        # As a product, since the gradient of a look-up of few tokens is slow: many rows are added to each.
        chosen = tokens[:, None] == torch.arange(twin.config.vocab_size, device=tokens.device)
        x = chosen.float() @ twin.embedding.weight
        with autocast(tokens.device, self.narrow):
            for block, turns in zip(self.blocks, self.turns, strict=True):
                out = self.attend(block, x, start, length, *turns)
                if block is self.blocks[-1]:
                    x, out = x.index_select(0, at), out.index_select(0, at)
                x = self.finish(block, x, out)
            x = twin.norm(x)
            logits = F.linear(x, twin.embedding.weight) if twin.head is None else twin.head(x)
        return F.cross_entropy(logits.float(), answers)

    def update(self, rate: Tensor) -> Tensor:
        """Take AdamW's step; give the gradient's norm before clipping."""
        # The optimizer's own parameters are those that no copy stands in for.
        own = [gradient for parameter in self.model.parameters() if (gradient := parameter.grad) is not None]
        copied = [gradient for _, copy in self.pairs if (gradient := copy.grad) is not None]
        norms = [*foreach_norm(own, 2), *foreach_norm(copied, 2, dtype=torch.float32)]
        norm = torch.stack(norms).norm()
        shrink = (self.recipe.clip / (norm + 1e-6)).clamp(max=1.0)
        foreach_mul(own, shrink)
        self.optimizer.step()
        foreach_add([self.optimizer.state[weight]["step"] for weight, _ in self.pairs], 1)
        for (weight, copy), gradient in zip(self.pairs, copied, strict=True):
            state = self.optimizer.state[weight]
            moments = state["exp_avg"], state["exp_avg_sq"], state["step"]
            self.adamw(
                weight, copy, gradient, *moments, rate, shrink, self.recipe.weight_decay, self.recipe.beta2
            )
        for parameter in (*self.model.parameters(), *(copy for _, copy in self.pairs)):
            parameter.grad = None
        return norm


def _compiled(function: Callable, recipe: TrainRecipe) -> Callable:
    return torch.compile(function, dynamic=False) if recipe.compile else function


def _real(batch: Batch) -> Tensor:
    """Which places of a padded batch hold tokens, [rows, T]."""
    if batch.positions is None:
        return torch.ones_like(batch.tokens, dtype=torch.bool)
    return batch.positions.segment >= 0


def _twin(
    model: Transformer, dtype: torch.dtype
) -> tuple[Transformer, list[tuple[nn.Parameter, nn.Parameter]]]:
    """The same model with copies of the blocks' matrices in `dtype`, and each of these with its original."""
    with torch.device("meta"):
        twin = Transformer(model.config)
    pairs = []
    for mine, module in zip(twin.modules(), model.modules(), strict=True):
        for name, parameter in module.named_parameters(recurse=False):
            copied = isinstance(module, nn.Linear) and module is not model.head
            used = nn.Parameter(parameter.detach().to(dtype, copy=True)) if copied else parameter
            mine.register_parameter(name, used)
            if copied:
                pairs.append((parameter, used))
    return twin, pairs


def _turning(attention: Attention) -> tuple[Tensor, Tensor, str, float]:
    """What `short_rows` needs to know of an encoding: cos and sin of its angles, its kind and its scale."""
    encoding = attention.encoding
    assert isinstance(encoding, RoPE | PoPE)
    assert isinstance(encoding.frequencies, Static)
    places = torch.arange(LONGEST, device=attention.query.weight.device)[None]
    angle = encoding.phases(places, encoding.frequencies)[0]
    kind = encoding.config.magnitude if isinstance(encoding, PoPE) else "rope"
    return angle.cos(), angle.sin(), kind, encoding.gain(encoding.frequencies) * attention.head_dim**-0.5


def _attend(
    block: Block,
    x: Tensor,
    start: Tensor,
    length: Tensor,
    cos: Tensor,
    sin: Tensor,
    kind: str,
    scale: float,
) -> Tensor:
    """The heads' outputs [N, W] of a block's attention."""
    from phasewise.kernels.short import short_rows

    attention = block.attention
    weight = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])
    qkv = F.linear(block.attention_norm(x), weight).unflatten(-1, (3, -1, attention.head_dim))
    norms = [norm for norm in (attention.query_norm, attention.key_norm) if isinstance(norm, RMSNorm)]
    norm = torch.stack([one.weight for one in norms]) if norms else cos.new_empty(0)
    encoding = attention.encoding
    phase = encoding.delta().float() if isinstance(encoding, PoPE) else cos.new_empty(0)
    turn = torch.stack([phase.cos(), phase.sin()]).detach()
    epsilon = norms[0].eps if norms else 0.0
    return short_rows(qkv, start, length, cos, sin, phase, norm, turn, kind, scale, epsilon).flatten(1)


def _finish(block: Block, x: Tensor, out: Tensor) -> Tensor:
    """What a block gives for tokens x whose heads gave `out`."""
    x = x + block.attention.output(out)
    return x + block.feed_forward(block.feed_forward_norm(x))


def _adamw(
    weight: Tensor, copy: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, rate: Tensor,
    shrink: Tensor, decay: float, beta2: float,
) -> None:  # fmt: skip
    """AdamW as torch's, of a weight and its copy, from the gradient of the copy times `shrink`."""
    with torch.no_grad():
        gradient = gradient.float() * shrink
        first.lerp_(gradient, 1 - BETA1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = second.sqrt() / (1 - beta2**step).sqrt() + EPSILON
        weight.mul_(1 - rate * decay).sub_(rate / (1 - BETA1**step) * first / size)
        copy.copy_(weight)
