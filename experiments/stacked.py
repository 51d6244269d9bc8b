"""Many small models of one shape as one: every weight has a leading axis of models, every product is batched.

A transformer of a few thousand weights keeps a GPU idle; a hundred of them, each on its own data, fill it.
Letters: M models, R rows of each, T tokens, W width, V letters.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasewise.attention import attention
from phasewise.frequencies import AnyFrequencies
from phasewise.model import ModelConfig, Transformer
from phasewise.model.reading import Layer, Sink

NOT_SCORED = -100


class Stack(nn.Module):
    """Models of one configuration, initialised from seeds 0, 1, .. as each would be alone."""

    def __init__(self, config: ModelConfig, seeds: list[int]) -> None:
        super().__init__()
        self.config = config
        states = []
        for seed in seeds:
            torch.manual_seed(seed)
            states.append(Transformer(config).state_dict())
        self.names = tuple(states[0])
        stacked = [nn.Parameter(torch.stack([state[name] for state in states])) for name in self.names]
        self.weights = nn.ParameterList(stacked)

    def forward(
        self, tokens: Tensor, *, frequencies: AnyFrequencies | None = None, sink: Sink | None = None
    ) -> Tensor:
        """The logits [M, R, T, V] of tokens [M, R, T], with other frequencies than the models' own if given."""
        config, weights = self.config, dict(zip(self.names, self.weights, strict=True))
        models, rows, length = tokens.shape
        places = torch.arange(models, device=tokens.device)[:, None]
        x = weights["embedding.weight"][places, tokens.flatten(1)]
        for layer in range(config.layers):
            prefix = f"blocks.{layer}."
            encoding = config.encodings[layer]
            if frequencies is not None:
                encoding = encoding.model_copy(update={"frequencies": frequencies})
            encoding = encoding.build(num_heads=config.heads, head_dim=config.head_dim)
            inner = self._norm(x, weights[f"{prefix}attention_norm.weight"])
            q, k, v = (
                _linear(inner, weights[f"{prefix}attention.{name}.weight"])
                .view(models * rows, length, config.heads, config.head_dim)
                .transpose(1, 2)
                for name in ("query", "key", "value")
            )
            if sink is not None:
                sink(Layer(layer, encoding), q, k)
            out = attention(q, k, v, encoding, impl="sdpa")
            out = out.transpose(1, 2).reshape(models, rows * length, -1)
            x = x + _linear(out, weights[f"{prefix}attention.output.weight"])
            inner = self._norm(x, weights[f"{prefix}feed_forward_norm.weight"])
            gate, up = (
                _linear(inner, weights[f"{prefix}feed_forward.{name}.weight"]) for name in ("gate", "up")
            )
            x = x + _linear(F.silu(gate) * up, weights[f"{prefix}feed_forward.down.weight"])
        x = _linear(self._norm(x, weights["norm.weight"]), weights["head.weight"])
        return x.view(models, rows, length, -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.config.norm_eps) * weight[:, None]

    def model(self, index: int) -> Transformer:
        """One of the models by itself."""
        alone = Transformer(self.config)
        alone.load_state_dict({n: w[index] for n, w in zip(self.names, self.weights, strict=True)})
        return alone


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of each model on what is scored, [M], float32."""
    models = logits.shape[0]
    each = F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=NOT_SCORED, reduction="none"
    ).view(models, -1)
    return each.sum(1) / (targets.flatten(1) != NOT_SCORED).sum(1)


def train(
    stack: Stack,
    draw: Callable[[int], tuple[Tensor, Tensor]],
    *,
    steps: int,
    learning_rate: float,
    weight_decay: float,
    warmup: int,
    block: int,
    say: Callable[[int, Tensor], None],
) -> None:
    """AdamW with warm-up and half a cosine; on a GPU every step is the same CUDA graph, in bfloat16.

    draw: tokens and targets [steps, M, R, T] of the next `block` steps. Each model's gradient is clipped by
    itself. say: told the steps done and the losses [M] after each block.
    """
    device = stack.weights[0].device
    cuda = device.type == "cuda"
    rate = torch.zeros((), device=device)
    groups = [
        {"params": [w for w in stack.weights if w.ndim == 3], "weight_decay": weight_decay},
        {"params": [w for w in stack.weights if w.ndim == 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), capturable=cuda, fused=True)
    tokens, targets = (part[0].clone() for part in draw(1))
    last = torch.zeros(tokens.shape[0], device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda, cache_enabled=False):
            loss = losses(stack(tokens), targets)
        loss.sum().backward()
        _clip(stack)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        last.copy_(loss.detach())

    run = step
    if cuda:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for first in range(0, steps, block):
        drawn = draw(block)
        for offset in range(min(block, steps - first)):
            rate.fill_(_rate(first + offset, steps, warmup, learning_rate))
            tokens.copy_(drawn[0][offset])
            targets.copy_(drawn[1][offset])
            run()
        say(min(first + block, steps), last)


def _rate(step: int, steps: int, warmup: int, peak: float) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def _clip(stack: Stack) -> None:
    gradients = [weight.grad for weight in stack.weights if weight.grad is not None]
    size = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    for gradient in gradients:
        gradient.mul_((1 / size.clamp(min=1)).view(-1, *[1] * (gradient.ndim - 1)))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, N, W] times each model's weight [M, out, W]."""
    return torch.bmm(x, weight.transpose(1, 2).to(x.dtype))
