"""Which fused kernel may stand in for which encoding: the one table, and what each entry hands over.

Kernels know tensors only. An entry turns an encoding and its places into angles, phases or slopes, none of
them in half precision, and names what its kernel cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from phasewise.encodings import TAPA, ALiBi, NoPE, PoPE, RoPE
from phasewise.encodings.base import Encoding
from phasewise.encodings.spectral import Spectral
from phasewise.frequencies import Static
from phasewise.kernels import decode, separable, tapa
from phasewise.kernels.angles import angles
from phasewise.kernels.hardware import capability, name_of
from phasewise.kernels.operators import direct
from phasewise.kernels.table import ranked
from phasewise.positions import Positions

_angles_of = direct(angles)
Body = Literal["flash", "cudnn", "triton"]
BODIES: dict[str, Body] = {name: name for name in get_args(Body)}
SMALLEST, GREATEST = 1e-20, 1e20  # scales with which -1e30, a hidden key's score, is below all others


@dataclass(frozen=True)
class Hardware:
    """Where a call would run: a device type and, for CUDA, its compute capability and its name, as the driver has it.

    The launch table knows devices by name; one without takes what serves any.
    """

    device: str
    capability: tuple[int, int] | None = None
    name: str | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Hardware:
        """The hardware that `tensor` is on."""
        return cls(tensor.device.type, capability(tensor.device), name_of(tensor.device))


@dataclass(frozen=True)
class Call:
    """A validated call; `at` places queries and keys, and None are keys 0..S-1 with the queries the last of them."""

    q: Tensor
    k: Tensor
    v: Tensor
    encoding: Encoding
    at: tuple[Positions, Positions] | None
    causal: bool
    window: int | None
    scale: float | None

    @property
    def axes(self) -> int:
        """How many axes the positions are on."""
        return 1 if self.at is None else self.at[0].axes

    def places(self) -> tuple[Positions, Positions]:
        """Where queries and keys are, spelled out: one object when there are as many of both."""
        if self.at is not None:
            return self.at
        queries, keys = self.q.shape[2], self.k.shape[2]
        k_at = Positions.arange(keys, device=self.k.device)
        return (k_at if queries == keys else k_at.narrow(keys - queries, queries)), k_at


def obstacle(call: Call, body: Body, hardware: Hardware) -> str | None:
    """Why the fused kernel `body` cannot compute a call on `hardware`, and what could; None when it can."""
    encoding, q, v = call.encoding, call.q, call.v
    if type(encoding) not in _ROUTES:
        return f"there is no fused kernel for {type(encoding).__name__}"
    if call.axes > 1 and call.causal:
        return f"the fused kernels order one axis, and the positions are on {call.axes}"
    if not _scale_serves(call):
        return f"the fused kernels take a positive scale from {SMALLEST} to {GREATEST}, not {call.scale}"
    if isinstance(encoding, TAPA):
        if body == "cudnn":
            return "cudnn takes separable scores, and TAPA's are not; flash and triton take them"
        if body == "flash":
            return tapa.flash_unsupported(
                device=hardware.device,
                capability=hardware.capability,
                dtype=q.dtype,
                amplitude_dim=encoding.amplitude_dim,
                qk_width=q.shape[-1],
                v_width=v.shape[-1],
                queries=q.shape[2],
                keys=call.k.shape[2],
                phase=encoding.config.phase,
                causal=call.causal,
                window=call.window,
                placed=call.at is not None,
            )
        return tapa.unsupported(
            device=hardware.device,
            capability=hardware.capability,
            dtype=q.dtype,
            qk_width=q.shape[-1],
            v_width=v.shape[-1],
        )
    if not isinstance(encoding, ALiBi) and not encoding.separable:
        return f"the rates of {encoding.kind} change with every query's length"
    return separable.unsupported(
        body,
        device=hardware.device,
        capability=hardware.capability,
        dtype=q.dtype,
        qk_width=_width(call),
        v_width=v.shape[-1],
        queries=q.shape[2],
        keys=call.k.shape[2],
        causal=call.causal,
        window=call.window,
        placed=call.at is not None,
        sloped=isinstance(encoding, ALiBi),
        rows=q.shape[0],
        heads=q.shape[1],
    )


def _scale_serves(call: Call) -> bool:
    return call.scale is None or SMALLEST <= call.scale <= GREATEST


def bodies(call: Call, hardware: Hardware) -> list[Body]:
    """The fused kernels in the order in which auto tries them: rows of the launch table, as measured."""
    kernel = "tapa.forward.body" if isinstance(call.encoding, TAPA) else "separable.forward.body"
    sizes = {"qk": _width(call), "v": call.v.shape[-1], "length": call.k.shape[2]}
    return [BODIES[name] for name in ranked(kernel, hardware.name, call.q.dtype, **sizes)]


def fused(call: Call, body: Body) -> tuple[Tensor, Tensor]:
    """The output [B, Hq, T, Dv] and log-sum-exp [B, Hq, T] of a call that `body` has no obstacle to."""
    return _ROUTES[type(call.encoding)](call, body)


def decode_obstacle(call: Call, hardware: Hardware) -> str | None:
    """Why the kernel for few queries on many raw keys cannot compute a call on `hardware`; None when it can."""
    encoding = call.encoding
    refused = decode.unsupported(
        device=hardware.device,
        capability=hardware.capability,
        dtype=call.q.dtype,
        qk_width=call.q.shape[-1],
        v_width=call.v.shape[-1],
        queries=call.q.shape[2],
        keys=call.k.shape[2],
    )
    if refused is not None:
        return refused
    if type(encoding) not in _ROUTES:
        return f"there is no fused kernel for {type(encoding).__name__}"
    if call.axes > 1:
        return f"decoding takes positions on one axis, not on {call.axes}"
    if not _scale_serves(call):
        return f"decoding takes a positive scale from {SMALLEST} to {GREATEST}, not {call.scale}"
    learned = (call.q, call.k, call.v, *encoding.parameters())
    if torch.is_grad_enabled() and any(x.requires_grad for x in learned):
        return "decoding has no gradient, and one is asked for"
    if isinstance(encoding, Spectral) and _rule(call, encoding) is None:
        return f"the rates of {encoding.frequencies.kind} are not the same for all these queries"
    return None


def decoded(call: Call) -> tuple[Tensor, Tensor]:
    """The output [B, Hq, T, Dv] and log-sum-exp [B, Hq, T] of a call that has no `decode_obstacle`."""
    encoding, settings = call.encoding, _view(call)
    scale = _scale(call)
    if isinstance(encoding, TAPA):
        config = encoding.config
        scale = encoding.amplitude_dim**-0.5 if call.scale is None else call.scale
        settings["kind"] = "tapa" if config.phase == "quadratic" else "tapa-linear"
        settings |= {"amplitude_dim": encoding.amplitude_dim, "alpha": config.alpha, "two_pi": config.two_pi}
    elif isinstance(encoding, ALiBi):
        settings["slopes"] = encoding.slopes(device=call.q.device)
    elif isinstance(encoding, Spectral):
        rule = _rule(call, encoding)
        assert rule is not None
        settings["rates"] = rule.rates(encoding.channels, device=call.q.device)
        settings["factor"] = encoding.gain(rule)
        settings["kind"] = "rope"
        if isinstance(encoding, PoPE):
            settings |= {"kind": encoding.config.magnitude, "phase": encoding.delta().float()}
    return decode.attend(call.q, call.k, call.v, scale=scale, **settings)


def _rule(call: Call, encoding: Spectral) -> Static | None:
    """The rule whose rates serve every query of a call, when its sizes tell."""
    rule = encoding.frequencies
    if isinstance(rule, Static) or call.at is not None:
        return rule if isinstance(rule, Static) else None
    longest = call.k.shape[2]
    shortest = longest - call.q.shape[2] + 1
    if not encoding.regimes:
        return rule.at(longest, encoding.channels) if shortest == longest else None
    for first, last, fixed in encoding.regimes:
        if first <= shortest and (last is None or longest <= last):
            return fixed
    return None


def _width(call: Call) -> int:
    """How wide the product of queries and keys is."""
    width = call.q.shape[-1]
    if isinstance(call.encoding, RoPE | PoPE):
        regimes = call.encoding.frequencies.regimes or ()
        return width * len(regimes) * (2 if isinstance(call.encoding, PoPE) else 1)
    return width


def _view(call: Call) -> dict[str, Any]:
    view: dict[str, Any] = {"causal": call.causal, "window": call.window}
    if call.at is None:
        return view
    sides = dict(zip("qk", call.at, strict=True))
    view |= {f"{side}_segment": at.segment for side, at in sides.items()}
    if call.axes == 1:
        view |= {f"{side}_index": at.index for side, at in sides.items()}
    return view


def _scale(call: Call) -> float:
    return call.q.shape[-1] ** -0.5 if call.scale is None else call.scale


def _expanded(call: Call, body: Body) -> tuple[Tensor, Tensor]:
    factors = call.encoding.factors(call.q, call.k, *call.places())
    assert factors is not None
    return separable.attend(*factors, call.v, scale=_scale(call), body=body, **_view(call))


def _angles(call: Call, encoding: Spectral, rule: Static) -> tuple[Tensor, Tensor]:
    rates = rule.rates(encoding.channels // encoding.axes, device=call.q.device)
    if rates.requires_grad:
        raise ValueError("the fused kernels give rates no gradient; use impl='reference'")
    queries, keys = call.q.shape[2], call.k.shape[2]
    if call.at is None:
        k_angle = _angles_of(rates, None, keys)
        return k_angle if queries == keys else k_angle[:, keys - queries :], k_angle
    q_index, k_index = (at.index for at in call.at)
    k_angle = _angles_of(rates, k_index, keys)
    return k_angle if q_index is k_index else _angles_of(rates, q_index, queries), k_angle


def _rope(call: Call, body: Body) -> tuple[Tensor, Tensor]:
    encoding = call.encoding
    assert isinstance(encoding, RoPE)
    rule = encoding.frequencies
    if not isinstance(rule, Static):
        return _expanded(call, body)
    q_angle, k_angle = _angles(call, encoding, rule)
    factor = rule.attention_factor(encoding.channels)
    return separable.rope(
        call.q, call.k, call.v, q_angle, k_angle, factor, scale=_scale(call), body=body, **_view(call)
    )


def _pope(call: Call, body: Body) -> tuple[Tensor, Tensor]:
    encoding = call.encoding
    assert isinstance(encoding, PoPE)
    rule = encoding.frequencies
    if not isinstance(rule, Static):
        return _expanded(call, body)
    q_angle, k_angle = _angles(call, encoding, rule)
    return separable.pope(
        call.q,
        call.k,
        call.v,
        q_angle,
        k_angle,
        encoding.delta().float(),
        magnitude=encoding.config.magnitude,
        scale=_scale(call) * encoding.gain(rule),
        body=body,
        **_view(call),
    )


def _nope(call: Call, body: Body) -> tuple[Tensor, Tensor]:
    return separable.attend(call.q, call.k, call.v, scale=_scale(call), body=body, **_view(call))


def _alibi(call: Call, body: Body) -> tuple[Tensor, Tensor]:
    encoding = call.encoding
    assert isinstance(encoding, ALiBi)
    return separable.attend(
        call.q,
        call.k,
        call.v,
        scale=_scale(call),
        slopes=encoding.slopes(device=call.q.device),
        body=body,
        **_view(call),
    )


def _tapa(call: Call, body: Body) -> tuple[Tensor, Tensor]:
    encoding = call.encoding
    assert isinstance(encoding, TAPA)
    assert body != "cudnn"
    config = encoding.config
    return tapa.attend(
        call.q,
        call.k,
        call.v,
        alpha=config.alpha,
        amplitude_dim=encoding.amplitude_dim,
        phase=config.phase,
        two_pi=config.two_pi,
        scale=call.scale,
        body=body,
        **_view(call),
    )


_ROUTES: dict[type[Encoding], Callable[[Call, Body], tuple[Tensor, Tensor]]] = {
    NoPE: _nope,
    RoPE: _rope,
    PoPE: _pope,
    ALiBi: _alibi,
    TAPA: _tapa,
}
