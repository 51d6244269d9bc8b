"""Cases of separable attention, their inputs, and the equation restated in float64."""

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from phasewise.kernels import separable

GPU = torch.cuda.is_available()
needs_hopper = pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
DEVICE = "cuda" if GPU else "cpu"


@dataclass(frozen=True)
class Case:
    """One attention call: sizes, mask and preparation."""

    queries: int
    keys: int
    width: int = 16
    v_width: int = 16
    heads: int = 2
    group: int = 1
    rows: int = 1
    causal: bool = True
    window: int | None = None
    preparation: str = "none"
    dtype: torch.dtype = torch.float32
    slopes: bool = False
    places: str | None = None
    body: str = "triton"

    def __str__(self) -> str:
        parts = [
            f"{self.queries}x{self.keys}",
            f"d{self.width}.{self.v_width}",
            f"h{self.heads}.{self.group}",
        ]
        parts += [] if self.causal else ["full"]
        parts += [f"w{self.window}"] if self.window else []
        parts += [self.preparation] if self.preparation != "none" else []
        parts += [self.places] if self.places else []
        parts += ["slopes"] if self.slopes else []
        return "-".join([*parts, str(self.dtype).removeprefix("torch."), self.body])


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case; positions always spelled out, `given` says whether the kernel gets them."""

    tensors: dict[str, Tensor]
    angles: tuple[Tensor, Tensor] | None
    slopes: Tensor | None
    index: tuple[Tensor, Tensor]
    segment: tuple[Tensor, Tensor]
    given: bool
    dout: Tensor
    dlse: Tensor


def places_of(case: Case) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    queries, keys = torch.arange(case.keys - case.queries, case.keys), torch.arange(case.keys)
    index, segment = (
        [queries[None], keys[None]],
        [torch.zeros_like(queries)[None], torch.zeros_like(keys)[None]],
    )
    if case.places == "far":
        index = [i + 1_000_003 for i in index]
    if case.places == "packed":
        # Documents of uneven length: places restart, the tail is padding.
        bounds = [0, case.keys // 3, case.keys // 3 + 1, case.keys - 3, case.keys]
        for number, (first, last) in enumerate(pairwise(bounds)):
            index[1][0, first:last] = torch.arange(last - first)
            segment[1][0, first:last] = number if number < 3 else -1
        index[0], segment[0] = index[1][:, -case.queries :].clone(), segment[1][:, -case.queries :].clone()
    if case.places == "left-padded":
        index, segment = [i.repeat(case.rows, 1) for i in index], [s.repeat(case.rows, 1) for s in segment]
        for row in range(case.rows):
            for at, marks in zip(index, segment, strict=True):
                marks[row, : 2 * row + 1] = -1
                at[row] -= 2 * row + 1
    if case.places == "shuffled":
        order = torch.randperm(case.keys, generator=torch.Generator().manual_seed(1))
        index = [i[:, order[order < i.shape[1]]] for i in index]
    return (index[0].to(DEVICE), index[1].to(DEVICE)), (segment[0].to(DEVICE), segment[1].to(DEVICE))


def inputs_of(case: Case, *, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed + case.queries + 7 * case.keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    def heads(count: int, length: int, width: int) -> Tensor:
        return normal(case.rows, length, count, width).to(case.dtype).transpose(1, 2)

    key_heads = case.heads // case.group
    tensors = {
        "q": heads(case.heads, case.queries, case.width),
        "k": heads(key_heads, case.keys, case.width),
        "v": heads(key_heads, case.keys, case.v_width),
    }
    index, segment = places_of(case)
    angles = None
    if case.preparation != "none":
        n = case.width // 2 if case.preparation == "rope" else case.width
        rates = 0.5 ** torch.arange(n, dtype=torch.float64, device=DEVICE)
        turns = [(i[..., None] * rates + math.pi).remainder(2 * math.pi) - math.pi for i in index]
        angles = (turns[0].float(), turns[1].float())
        if case.preparation != "rope":
            tensors["phase"] = normal(case.heads, case.width)
    slopes = 2.0 ** -torch.arange(1.0, case.heads + 1).to(DEVICE) if case.slopes else None
    shape = (case.rows, case.queries, case.heads, case.v_width)
    return Inputs(
        tensors, angles, slopes, index, segment, case.places is not None,
        normal(*shape).transpose(1, 2).to(case.dtype), normal(case.rows, case.heads, case.queries),
    )  # fmt: skip


def seen_by(case: Case, inputs: Inputs) -> Tensor:
    """[rows | 1, 1, T, S]: the mask, stated anew."""
    i, j = inputs.index[0][:, None, :, None], inputs.index[1][:, None, None, :]
    own, other = inputs.segment[0][:, None, :, None], inputs.segment[1][:, None, None, :]
    seen = (own == other) & (own >= 0)
    if case.causal:
        seen = seen & (j <= i)
    if case.window is not None:
        seen = seen & ((i - j).abs() < case.window)
    return seen


def exact(case: Case, inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients by the equation in `dtype`."""
    leaves = {
        name: x.to(torch.float64 if dtype == torch.float64 else x.dtype) for name, x in inputs.tensors.items()
    }
    leaves = {name: x.detach().clone().requires_grad_() for name, x in leaves.items()}
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    if inputs.angles is not None:
        angle = [a.to(leaves.get("phase", q).dtype)[:, None] for a in inputs.angles]
        if case.preparation == "rope":
            q, k = (turned(x, a) for x, a in zip((q, k), angle, strict=True))
        else:
            q, k = polar(q, angle[0] - leaves["phase"][None, :, None], case), polar(k, angle[1], case)
    k, v = k.repeat_interleave(case.group, 1), v.repeat_interleave(case.group, 1)
    scores = q.to(v.dtype) @ k.to(v.dtype).transpose(-1, -2) * scale_of(case)
    if inputs.slopes is not None:
        distance = (inputs.index[0][:, None, :, None] - inputs.index[1][:, None, None, :]).abs()
        scores = scores - inputs.slopes[None, :, None, None].to(v.dtype) * distance.to(v.dtype)
    seen = seen_by(case, inputs)
    scores = scores.masked_fill(~seen, -math.inf)
    some = seen.any(-1, keepdim=True)
    p = torch.where(some, scores.masked_fill(~some, 0.0).softmax(-1), 0.0)
    out = p @ v
    lse = scores.masked_fill(~some, 0.0).logsumexp(-1)
    some = some.squeeze(-1).expand_as(lse)
    loss = (out * inputs.dout.to(out.dtype)).sum() + (torch.where(some, lse, 0.0) * inputs.dlse).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {
        "out": out,
        "lse": torch.where(some, lse.float(), -1e30).double(),
        **dict(zip(leaves, grads, strict=True)),
    }


def scale_of(case: Case) -> float:
    return case.width**-0.5


def polar(x: Tensor, angle: Tensor, case: Case) -> Tensor:
    mu = {"softplus": torch.nn.functional.softplus, "relu": torch.relu, "identity": lambda y: y}[
        case.preparation
    ](x)
    return torch.cat([mu * angle.cos(), mu * angle.sin()], -1)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )


def call(case: Case, inputs: Inputs, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    options = {"scale": scale_of(case), "causal": case.causal, "window": case.window, "body": case.body}
    options |= {"slopes": inputs.slopes}
    if inputs.given:
        options |= {"q_index": inputs.index[0], "k_index": inputs.index[1]}
        options |= {"q_segment": inputs.segment[0], "k_segment": inputs.segment[1]}
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    if inputs.angles is None:
        return separable.attend(q, k, v, **options)
    if case.preparation == "rope":
        return separable.rope(q, k, v, *inputs.angles, 1.0, **options)
    return separable.pope(q, k, v, *inputs.angles, tensors["phase"], magnitude=case.preparation, **options)


def fused(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.tensors.items()}
    out, lse = call(case, inputs, leaves)
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [inputs.dout, inputs.dlse])
    return {"out": out, "lse": lse, **dict(zip(leaves, grads, strict=True))}


def errors(case: Case, seed: int) -> dict[str, Tensor]:
    """[2]: each result's largest error, and the one allowed: twice that of the equation in the inputs' precision."""
    inputs = inputs_of(case, seed=seed)
    truth, eager, actual = (
        exact(case, inputs, torch.float64),
        exact(case, inputs, case.dtype),
        fused(case, inputs),
    )
    found = {}
    for name, expected in truth.items():
        assert actual[name].isfinite().all(), name
        error = (actual[name].double() - expected).abs().max()
        budget = 2 * (eager[name].double() - expected).abs().max()
        scale = expected[expected > -1e29].abs().max() if name == "lse" else expected.abs().max()
        rounding = torch.finfo(torch.float32 if name in ("lse", "phase") else case.dtype).eps
        found[name] = torch.stack([error, budget + 4 * rounding * scale]).detach()
    return found


def holds(case: Case) -> None:
    """Every result is finite and within twice the error of the same equation in the inputs' precision.

    Of few numbers in float32 the largest errors of one draw, the equation's too, are luck by a factor of two, and
    another one on each processor. Where they are too large, their means over 16 draws decide.
    """
    found = errors(case, 0)
    if any(error > allowed for error, allowed in found.values()):
        draws = [found, *(errors(case, seed) for seed in range(1, 16))]
        found = {name: torch.stack([draw[name] for draw in draws]).mean(0) for name in found}
    for name, (error, allowed) in found.items():
        assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e}, means of 16 draws"
