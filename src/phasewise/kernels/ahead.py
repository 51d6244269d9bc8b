"""Which calls have their queries and keys prepared while attention, begun beside, takes head after head.

Attention multiplies and leaves memory idle; preparation is the other way round, and a few multiprocessors move much of
what all of them can. So a few programs prepare, each with a multiprocessor to itself, and attention's programs, on the
others, wait for their own heads only.
"""

from typing import NamedTuple

from torch import Tensor

from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.tiles import ceil_div, launch, power_of_two

VECTOR = 8  # channels that a thread prepares at once: 16 bytes
TURNED = 1.3  # what preparing PoPE's queries takes, each head having its phases, of what its keys do
MOST_PHASES = 8192  # of all heads
TILE = 128  # queries of one of attention's tiles, about
FEWEST = 8  # tiles of a multiprocessor's for which it pays


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
    values of other than multiples of 16 channels, groups that divide no tile, or too few tiles to go round.
    """
    rows, heads, queries, width = q.shape
    key_heads, keys = k.shape[1:3]
    made = width if preparation == "rope" else 2 * width
    whole = (
        angles % VECTOR == 0
        and 2 * angles == made
        and v.shape[3] % 16 == 0
        and 64 % (heads // key_heads) == 0
    )
    if not causal or window is not None or queries > keys or not whole:
        return None
    if preparation != "rope" and heads * angles > MOST_PHASES:
        return None
    programs = launch("separable.flash.ahead", q, qk=made, v=v.shape[3], length=keys)["programs"]
    if programs == 0:
        return None
    tiles, processors = ceil_div(queries * (heads // key_heads), TILE), multiprocessors(q.device)
    if rows * key_heads * tiles < FEWEST * processors:
        return None
    of_queries, of_keys = heads * queries * (1.0 if preparation == "rope" else TURNED), key_heads * keys
    q_programs = min(programs - 1, max(1, round(programs * of_queries / (of_queries + of_keys))))
    return Plan(q_programs, programs - q_programs, power_of_two(ceil_div(processors, tiles)))
