"""Which calls have their queries and keys prepared while attention, begun beside, takes head after head.

Attention multiplies and leaves memory idle; preparation is the other way round, and a few multiprocessors move much of
what all of them can. So a few programs prepare, each with a multiprocessor to itself, and attention's programs, on the
others, wait for their own heads only. PoPE's queries, which nobody else reads, attention expands itself.
"""

from typing import NamedTuple

from torch import Tensor

from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.tiles import ceil_div, launch, power_of_two

VECTOR = 8  # channels that a thread prepares at once: 16 bytes
TILE = 128  # queries of one of attention's tiles, about


class Plan(NamedTuple):
    """Programs that prepare queries and keys, and how many key heads attention takes at a time, longest tiles first."""

    q_programs: int
    k_programs: int
    together: int


def plan(
    q: Tensor, k: Tensor, v: Tensor, angles: int, preparation: str, *, causal: bool, window: int | None
) -> Plan | None:
    """For a call that gains, by the launch table; None for one whose queries and keys are prepared before it.

    Those are the calls that are not causal, or have a window, more queries than keys, pairs that do not fill the width,
    values or PoPE's queries of other than multiples of 16 channels, groups that divide no tile, or too few tiles.
    """
    rows, heads, queries, width = q.shape
    key_heads, keys = k.shape[1:3]
    rotates, group = preparation == "rope", heads // key_heads
    made = width if rotates else 2 * width
    whole = angles % (VECTOR if rotates else 2 * VECTOR) == 0 and 2 * angles == made
    if not causal or window is not None or queries > keys or not whole or v.shape[3] % 16 or 64 % group:
        return None
    row = launch("separable.flash.ahead", q, qk=made, v=v.shape[3], length=keys)
    programs, processors = row["programs"], multiprocessors(q.device)
    tiles = ceil_div(queries * group, TILE)
    if programs == 0 or rows * key_heads * tiles < row["tiles"] * processors:
        return None
    q_programs = 0
    if rotates:
        q_programs = min(
            programs - 1, max(1, round(programs * heads * queries / (heads * queries + key_heads * keys)))
        )
    return Plan(q_programs, programs - q_programs, power_of_two(ceil_div(processors, tiles)))
