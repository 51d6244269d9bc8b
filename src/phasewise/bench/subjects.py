"""Causal attention to be measured on this GPU: ours, torch's, and other packages' where they are installed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from phasewise.encodings import TAPA, ALiBi, Encoding, NoPE, PoPE, RoPE
from phasewise.encodings.base import angles
from phasewise.frequencies import Geometric
from phasewise.kernels import separable, tapa
from phasewise.kernels.library import BODIES, Body

HEADS = 16
LONGEST_TUNED = 2048
WIDEST = 256
VIEW: dict[str, Any] = {"causal": True, "window": None}
Run = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """An implementation under test: `run(q, k, v)` computes causal attention under `encoding`."""

    name: str
    encoding: Encoding
    run: Run
    qk_width: int
    leaves: tuple[Tensor, ...] = ()


def check_widths(widths: Sequence[int]) -> None:
    """Raise ValueError for a width that not every encoding has, or no kernel takes."""
    for width in widths:
        if width % 2 or not 2 <= width <= WIDEST:
            raise ValueError(f"widths must be even numbers from 2 to {WIDEST}, not {width}")


def subjects(width: int, length: int) -> Iterator[Subject]:
    """What is installed, for heads of `width` and sequences of `length`: each a causal attention on this GPU.

    Plain attention is NoPE's. What others have for an encoding comes last.
    """
    rope, pope = (
        RoPE(head_dim=width).cuda(),
        PoPE(num_heads=HEADS, head_dim=width, phase_init="uniform").cuda(),
    )
    yield from others_plain(width)
    yield from plain(width)
    yield from prepared(rope, width, length)
    yield from prepared(pope, width, length)
    yield sloped(width)
    yield from joint(width)
    yield from by_flex(width, length, rope, pope)
    if installed("PoPE-pytorch"):
        yield Subject(
            "pope PoPE-pytorch", pope, later(partial(_peer, pope, length)), 2 * width, (pope.phase,)
        )


def others_plain(width: int) -> Iterator[Subject]:
    """Plain attention as others have it."""

    def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def flash_attn_4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    yield Subject("plain flash-attention-2", NoPE(), partial(sdpa, SDPBackend.FLASH_ATTENTION), width)
    yield Subject("plain sdpa-cudnn", NoPE(), partial(sdpa, SDPBackend.CUDNN_ATTENTION), width)
    if installed("flash-attn-4"):
        # As its users call it: the backward adds atomically. "plain flash" is its deterministic mode.
        yield Subject("plain flash-attn-4", NoPE(), flash_attn_4, width)


def bodies() -> list[Body]:
    """Bodies of ours that can run here."""
    return [body for body in BODIES if body != "flash" or installed("flash-attn-4")]


def output(attend: Callable[..., tuple[Tensor, Tensor]], *between: Any, **settings: Any) -> Run:
    """The output alone of `attend(q, k, v, *between, **settings)`."""
    return lambda q, k, v: attend(q, k, v, *between, **settings)[0]


def plain(width: int) -> Iterator[Subject]:
    """NoPE by each body of ours."""
    for body in bodies():
        yield Subject(
            f"plain {body}", NoPE(), output(separable.attend, scale=width**-0.5, body=body, **VIEW), width
        )


def prepared(encoding: RoPE | PoPE, width: int, length: int) -> Iterator[Subject]:
    """An encoding of queries and keys by each body of ours."""
    turns = turns_of(encoding, length)
    settings: dict[str, Any] = {"scale": width**-0.5, **VIEW}
    if isinstance(encoding, PoPE):
        attend, leaves, qk_width = separable.pope, (encoding.phase,), 2 * width
        settings["magnitude"] = "softplus"
        between = (turns, turns, encoding.phase)
    else:
        attend, leaves, qk_width = separable.rope, (), width
        between = (turns, turns, 1.0)
    for body in bodies():
        run = output(attend, *between, body=body, **settings)
        yield Subject(f"{encoding.kind} {body}", encoding, run, qk_width, leaves)


def turns_of(encoding: RoPE | PoPE, length: int) -> Tensor:
    """Angles of its channels at every place, `[1, length, n]`; of no implementation's time."""
    rates = Geometric(base=10_000.0).rates(encoding.channels, device="cuda")
    return angles(torch.arange(length, device="cuda")[None], rates)


def sloped(width: int) -> Subject:
    """ALiBi by our kernel."""
    encoding = ALiBi(num_heads=HEADS)
    slopes = encoding.slopes(device=torch.device("cuda"))
    run = output(separable.attend, scale=width**-0.5, slopes=slopes, body="triton", **VIEW)
    return Subject("alibi triton", encoding, run, width)


def by_flex(width: int, length: int, rope: RoPE, pope: PoPE) -> Iterator[Subject]:
    """FlexAttention, compiled with what turns queries and keys before it.

    It has no TAPA: it hands out finished scores, and TAPA's are two products.
    """
    scale, alibi = width**-0.5, ALiBi(num_heads=HEADS)
    slopes = alibi.slopes(device=torch.device("cuda"))

    def nearer(score: Tensor, _row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key).abs()

    def plain(**settings: Any) -> Run:
        return later(lambda: compiled(partial(flex_attention_of(length), scale=scale, **settings)))

    def turned(encoding: RoPE | PoPE) -> Run:
        turns = turns_of(encoding, length)
        return later(lambda: compiled(partial(_turned, encoding, flex_attention_of(length), turns)))

    yield Subject("plain flex", NoPE(), plain(), width)
    yield Subject("rope flex", rope, turned(rope), width)
    yield Subject("pope flex", pope, turned(pope), 2 * width, (pope.phase,))
    yield Subject("alibi flex", alibi, plain(score_mod=nearer), width)


def joint(width: int) -> Iterator[Subject]:
    """TAPA by each body of ours."""
    encoding = TAPA(head_dim=width, alpha=0.1)
    view = {"amplitude_dim": encoding.amplitude_dim, **VIEW}
    tapa_bodies: tuple[tapa.Body, ...] = ("triton", "flash") if installed("flash-attn-4") else ("triton",)
    for body in tapa_bodies:
        yield Subject(f"tapa {body}", encoding, output(tapa.attend, alpha=0.1, body=body, **view), width)


def later(make: Callable[[], Run]) -> Run:
    """What `make` gives, made at the first call, so that what fails is that call alone.

    >>> later(lambda: lambda q, k, v: q + k + v)(*torch.ones(3, 2))
    tensor([3., 3.])
    """
    made = cache(make)
    return lambda q, k, v: made()(q, k, v)


def installed(package: str) -> bool:
    """Whether a distribution of that name can be imported here."""
    return any(found.metadata["Name"] == package for found in metadata.distributions())


def flex_attention_of(length: int) -> Callable[..., Tensor]:
    """torch's FlexAttention, causal at `length`, to be compiled: `(q, k, v, score_mod=..., scale=...)`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device="cuda")
    return partial(flex_attention, block_mask=mask)


def forget_sizes() -> None:
    """Compile anew from now on: a compiled function serves a few sizes only.

    What was never compiled needs no compiler, whose import takes seconds.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def compiled(run: Run) -> Run:
    """`run` as torch.compile makes it for the sizes it meets: what a user without our kernels has."""
    return torch.compile(run, dynamic=False, fullgraph=True)


def _turned(
    encoding: RoPE | PoPE, run: Callable[..., Tensor], turns: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """An encoding as a user without our kernels has it: turned in plain torch by given angles, then attention."""
    turned = encoding.turn_queries(q, turns, 1.0), encoding.turn_keys(k, turns)
    return run(*(x.to(v.dtype) for x in turned), v, scale=q.shape[3] ** -0.5)


def _peer(pope: PoPE, length: int) -> Run:
    """PoPE-pytorch's fused attention with our phases; its angles are float32 products.

    It tunes its tiles at every new length, each of ten several times, which takes minutes at long ones; beyond
    LONGEST_TUNED it is given those of the length before.
    """
    from PoPE_pytorch import flash_attn_with_pope  # pyright: ignore[reportMissingImports]
    from PoPE_pytorch import triton_pope_flash_attn as its  # pyright: ignore[reportMissingImports]

    width = pope.phase.shape[1]
    rates = Geometric(base=10_000.0).rates(width, device="cuda").float()
    turns = torch.arange(length, device="cuda").float()[:, None] * rates
    if length > LONGEST_TUNED:
        for kernel, configs in ((its._fwd_kernel, its._fwd_configs), (its._bwd_kernel, its._bwd_configs)):
            sizes = ("seqlen_q", "seqlen_k", "headdim")
            tuner = its.get_autotuned_kernel(kernel, configs, sizes, width, 2, torch.cuda.current_device())
            tuner.configs = [getattr(tuner, "best_config", tuner.configs[0])]
    return lambda q, k, v: flash_attn_with_pope(q, k, v, pos_emb=(turns, pope.phase), causal=True)
