"""Causal attention to be measured on this GPU: ours, torch's, and other packages' where they are installed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from phasewise.encodings import TAPA, Encoding, NoPE, PoPE, RoPE
from phasewise.encodings.base import angles
from phasewise.frequencies import Geometric
from phasewise.kernels import separable, tapa
from phasewise.kernels.library import BODIES, Body
from phasewise.positions import Positions

HEADS = 16


@dataclass(frozen=True)
class Subject:
    """An implementation under test: `run(q, k, v)` computes causal attention under `encoding`."""

    name: str
    encoding: Encoding
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    qk_width: int
    leaves: tuple[Tensor, ...] = ()


def subjects(width: int, length: int) -> Iterator[Subject]:
    """What is installed, for heads of `width` and sequences of `length`: each a causal attention on this GPU."""
    scale = width**-0.5
    flash = installed("flash-attn-4")
    bodies: list[Body] = [body for body in BODIES if body != "flash" or flash]
    index = torch.arange(length, device="cuda")[None]

    def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def flash_attn_4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def sdpa_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    yield Subject("plain flash-attention-2", NoPE(), flash_attention_2, width)
    yield Subject("plain sdpa-cudnn", NoPE(), sdpa_cudnn, width)
    if flash:
        # As its users call it: the backward adds atomically. "plain flash" below is its deterministic mode.
        yield Subject("plain flash-attn-4", NoPE(), flash_attn_4, width)
    for body in bodies:
        run = partial(separable.attend, scale=scale, causal=True, window=None, body=body)
        yield Subject(f"plain {body}", NoPE(), lambda q, k, v, run=run: run(q, k, v)[0], width)
    flex = compiled_flex(length)
    yield Subject("plain flex", NoPE(), partial(flex, scale=scale), width)
    rope = RoPE(head_dim=width).cuda()
    angle = angles(index, Geometric(base=10_000.0).rates(width // 2, device="cuda"))
    for body in bodies:
        turn = partial(separable.rope, scale=scale, causal=True, window=None, body=body)
        yield Subject(
            f"rope {body}", rope, lambda q, k, v, run=turn: run(q, k, v, angle, angle, 1.0)[0], width
        )
    pope = PoPE(num_heads=HEADS, head_dim=width, phase_init="uniform").cuda()
    wide = angles(index, Geometric(base=10_000.0).rates(width, device="cuda"))
    for body in bodies:
        expand = partial(
            separable.pope, magnitude="softplus", scale=scale, causal=True, window=None, body=body
        )
        yield Subject(
            f"pope {body}",
            pope,
            lambda q, k, v, run=expand: run(q, k, v, wide, wide, pope.phase)[0],
            2 * width,
            (pope.phase,),
        )
    yield Subject("pope flex", pope, partial(_through_factors, pope, flex), 2 * width, (pope.phase,))
    if installed("PoPE-pytorch"):
        yield Subject("pope PoPE-pytorch", pope, _peer(pope, length), 2 * width, (pope.phase,))
    joint = TAPA(head_dim=width, alpha=0.1)
    view = {"amplitude_dim": joint.amplitude_dim, "causal": True, "window": None}
    refused = tapa.flash_unsupported(
        device="cuda", capability=torch.cuda.get_device_capability(), dtype=torch.bfloat16, qk_width=width,
        v_width=width, queries=length, keys=length, phase="quadratic", placed=False, **view,
    )  # fmt: skip
    joint_bodies: tuple[tapa.Body, ...] = ("triton",) if refused else ("triton", "flash")
    for body in joint_bodies:
        mix = partial(tapa.attend, alpha=0.1, body=body, **view)
        yield Subject(f"tapa {body}", joint, lambda q, k, v, run=mix: run(q, k, v)[0], width)


def installed(package: str) -> bool:
    """Whether a distribution of that name can be imported here."""
    return any(found.metadata["Name"] == package for found in metadata.distributions())


def compiled_flex(length: int) -> Callable[..., Tensor]:
    """torch's FlexAttention, compiled, causal at `length`: `(q, k, v, scale=...)`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    mask = create_block_mask(causal, None, None, length, length, device="cuda")
    return partial(torch.compile(flex_attention, dynamic=False), block_mask=mask)


def _through_factors(
    encoding: Encoding, run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """An encoding as a user without our kernels has it: its factors in plain torch, then an attention kernel."""
    at = Positions.arange(q.shape[2], device=q.device)
    factors = encoding.factors(q, k, at, at)
    assert factors is not None, "only separable encodings are measured so"
    return run(*(x.to(v.dtype) for x in factors), v, scale=q.shape[3] ** -0.5)


def _peer(pope: PoPE, length: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """PoPE-pytorch's fused attention with our phases; its angles are float32 products."""
    from PoPE_pytorch import flash_attn_with_pope  # pyright: ignore[reportMissingImports]

    rates = Geometric(base=10_000.0).rates(pope.phase.shape[1], device="cuda").float()
    turns = torch.arange(length, device="cuda").float()[:, None] * rates
    return lambda q, k, v: flash_attn_with_pope(q, k, v, pos_emb=(turns, pope.phase), causal=True)
