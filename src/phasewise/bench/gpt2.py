"""A GPT-2-size trainer in one file, as one writes it with SDPA and torch.compile: what our loop is held against.

`python -m phasewise.bench.gpt2 --tokens tokens.npy --steps 1000` trains on an array of token ids. The model has
RoPE, RMSNorm, no biases, a tied head and a padded vocabulary; weights are float32, products bfloat16.

Letters: B rows, T places, W width, H heads, V vocabulary.
"""

import argparse
import math
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 50_304  # GPT-2's 50 257 up to a multiple of 128
LAYERS, HEADS, WIDTH = 12, 12, 768
EPS = 1e-6


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width, EPS), nn.RMSNorm(width, EPS)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        )
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.output(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class GPT2(nn.Module):
    def __init__(self, vocabulary: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, EPS)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Training:
    """A model, compiled whole, and its optimizer; `step(tokens, targets)` takes a step and gives the loss."""

    def __init__(
        self,
        *,
        context: int,
        vocabulary: int = VOCABULARY,
        layers: int = LAYERS,
        heads: int = HEADS,
        width: int = WIDTH,
        device: str = "cuda",
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.device = torch.device(device)
        self.context = context
        self.model = GPT2(vocabulary, layers, heads, width).to(device)
        self.compiled = torch.compile(self.model, dynamic=False)
        matrices = [weight for weight in self.model.parameters() if weight.ndim == 2]
        gains = [weight for weight in self.model.parameters() if weight.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
        channels = width // heads // 2
        rates = 10_000.0 ** (-torch.arange(channels, dtype=torch.float64) / channels)
        angles = torch.arange(context, dtype=torch.float64)[:, None] * rates
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)

    def step(self, tokens: Tensor, targets: Tensor, rate: float = 6e-4) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.compiled(tokens, targets, self.cos, self.sin)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def prefer_cudnn() -> None:
    """Let SDPA take cuDNN's kernels, the fastest that it has on Hopper, where they run."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m phasewise.bench.gpt2", description=__doc__)
    parser.add_argument("--tokens", required=True, help="a .npy array of token ids")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--warmup", type=int, default=100)
    options = parser.parse_args()
    prefer_cudnn()
    training = Training(context=options.context)
    tokens = np.load(options.tokens, mmap_mode="r")
    random = np.random.default_rng(0)
    started = perf_counter()
    for step in range(options.steps):
        starts = random.integers(len(tokens) - options.context, size=options.rows)
        drawn = np.stack([tokens[start : start + options.context + 1] for start in starts]).astype(np.int64)
        rows = torch.from_numpy(drawn).pin_memory().to("cuda", non_blocking=True)
        done = max(0, step - options.warmup) / max(1, options.steps - options.warmup)
        rate = 6e-4 * min((step + 1) / options.warmup, 0.55 + 0.45 * math.cos(math.pi * done))
        loss = training.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), rate)
        if step % 10 == 0:
            speed = (step + 1) * options.rows * options.context / (perf_counter() - started)
            print(f"step {step} loss {loss.item():.4f} {speed:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
