"""PoPE: content sets the magnitude, position sets the phase (Gopalakrishnan et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from phasewise.encodings.base import WIDEST, EncodingConfig, check_size, working_dtype
from phasewise.encodings.spectral import STANDARD, Spectral
from phasewise.frequencies import AnyFrequencies, Frequencies

Magnitude = Literal["softplus", "relu", "identity"]
PhaseInit = Literal["zero", "uniform"]
PhaseBound = Literal["wrap", "clamp"]

_FULL_TURN = 2 * math.pi
_HALVES = (torch.float16, torch.bfloat16)
_MAGNITUDES: dict[Magnitude, Callable[[Tensor], Tensor]] = {
    "softplus": lambda x: F.softplus(x, threshold=40),  # beyond it float64 cannot tell softplus(x) from x
    "relu": F.relu,
    "identity": lambda x: x,
}


class PoPEConfig(EncodingConfig):
    """Settings of PoPE; see `PoPE` for their meaning."""

    kind: Literal["pope"] = "pope"
    frequencies: AnyFrequencies = STANDARD
    phase_init: PhaseInit = "zero"
    phase_bound: PhaseBound = "wrap"
    magnitude: Magnitude = "softplus"
    axes: int = Field(default=1, ge=1, le=WIDEST)

    def build(self, *, num_heads: int, head_dim: int) -> PoPE:
        options = {name: value for name, value in self if name != "kind"}
        return PoPE(num_heads=num_heads, head_dim=head_dim, **options)


class PoPE(Spectral):
    """score(t, s) = d^-1/2 sum_c m(q_tc) m(k_sc) cos((s - t) theta_c + delta_c), theta_c = base^(-c/d).

    m is softplus (`relu` and `identity` are the paper's ablations). delta [num_heads, head_dim] is learned,
    starts at zero (best for lengths never trained on) or uniform on [-2 pi, 0], and is applied to the query,
    so keys stay free of heads and phases. `phase_bound="wrap"` leaves it free, as the cosine wraps anyway;
    `"clamp"` is the paper's bound [-2 pi, 0], outside of which an entry gets no gradient (`frozen_fraction`).

    With `axes` above 1 (images: 2, video: 3) the channels are split evenly over the axes, and positions are
    [..., axes] (`Positions.grid`). Unlike RoPE, all head_dim channels have a rate of their own.

    The phase is kept in float32 or wider whatever the module is cast to.

    Raises ValueError when head_dim does not split over the axes. Source: Gopalakrishnan et al.,
    arXiv 2509.10534; the exponent's sign and the query's side of delta are explained in docs/decisions.md.

    >>> PoPE(num_heads=8, head_dim=64).phase.shape
    torch.Size([8, 64])
    """

    kind: ClassVar[str] = "pope"
    phase: nn.Parameter

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        frequencies: Frequencies = STANDARD,
        phase_init: PhaseInit = "zero",
        phase_bound: PhaseBound = "wrap",
        magnitude: Magnitude = "softplus",
        axes: int = 1,
    ) -> None:
        config = PoPEConfig(
            frequencies=frequencies,  # type: ignore[arg-type]
            phase_init=phase_init,
            phase_bound=phase_bound,
            magnitude=magnitude,
            axes=axes,
        )
        check_size("num_heads", num_heads)
        check_size("head_dim", head_dim)
        if head_dim % config.axes:
            raise ValueError(
                f"PoPE splits its channels over the axes: head_dim {head_dim} is no multiple of {config.axes}; "
                "choose one, or other axes"
            )
        super().__init__(config.frequencies, channels=head_dim, axes=config.axes)
        self._config = config
        self.phase = nn.Parameter(torch.empty(num_heads, head_dim, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the phases to their initial values (`phase_init`)."""
        if self._config.phase_init == "zero":
            nn.init.zeros_(self.phase)
        else:
            nn.init.uniform_(self.phase, -_FULL_TURN, 0.0)

    @property
    def config(self) -> PoPEConfig:
        return self._config

    def check(self, num_heads: int, head_dim: int, axes: int) -> None:
        if (num_heads, head_dim) != tuple(self.phase.shape):
            raise ValueError(
                f"this PoPE has {self.phase.shape[0]} heads of width {self.phase.shape[1]}, "
                f"but q has {num_heads} of width {head_dim}; use num_heads={num_heads}, head_dim={head_dim}"
            )
        if axes != self.axes:
            raise ValueError(
                f"this PoPE has {self.axes} axes, but the positions are on {axes}; use axes={axes}"
            )

    def delta(self) -> Tensor:
        """The phases that enter the score, [num_heads, head_dim] in radians."""
        return self.phase.clamp(-_FULL_TURN, 0.0) if self._config.phase_bound == "clamp" else self.phase

    @torch.no_grad()
    def frozen_fraction(self) -> float:
        """The share of phases that get no gradient because a clamp holds them; 0 when they wrap."""
        if self._config.phase_bound == "wrap":
            return 0.0
        return ((self.phase < -_FULL_TURN) | (self.phase > 0)).float().mean().item()

    def magnitude(self, x: Tensor) -> Tensor:
        """m(x), elementwise, at least float32."""
        return _MAGNITUDES[self._config.magnitude](x.to(working_dtype(x.dtype)))

    def turn_queries(self, q: Tensor, angle: Tensor, gain: Tensor | float) -> Tensor:
        gain = gain[:, None, :, None] if isinstance(gain, Tensor) else gain
        return self._polar(q, angle[:, None] - self.delta().to(angle.dtype)[:, None], gain)

    def turn_keys(self, k: Tensor, angle: Tensor) -> Tensor:
        return self._polar(k, angle[:, None], 1.0)

    def _polar(self, x: Tensor, angle: Tensor, gain: Tensor | float) -> Tensor:
        turn = torch.stack([angle.cos(), angle.sin()], dim=-2)
        if isinstance(gain, Tensor) or gain != 1:
            turn = turn * gain
        return (self.magnitude(x).unsqueeze(-2) * turn).to(x.dtype).flatten(-2)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        """Load phases that were saved in half precision as float32, also when they are assigned."""
        saved = state_dict.get(prefix + "phase")
        if saved is not None and saved.dtype in _HALVES:
            state_dict[prefix + "phase"] = saved.float()
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the module, but never below float32: a phase in bfloat16 is off by up to 0.016 rad."""

        def keep(tensor: Tensor) -> Tensor:
            moved: Any = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in _HALVES else moved

        return super()._apply(keep, recurse)
