"""Which calls have their queries and keys prepared while attention, begun beside, takes head after head.

Attention multiplies and leaves memory idle; preparation is the other way round, and a few multiprocessors move much of
what all of them can. So a few programs prepare, each with a multiprocessor to itself, and attention's programs, on the
others, wait for their own heads only. PoPE's queries, which nobody else reads, flash-attn-4's expands itself.
"""

from typing import NamedTuple

from torch import Tensor

from phasewise.kernels.hardware import multiprocessors
from phasewise.kernels.tiles import ceil_div, launch, power_of_two

VECTOR = 8  # channels that a thread prepares at once: 16 bytes
TILE = 128  # queries of one of attention's tiles, about
PHASED = 1.25  # what it takes to expand PoPE's queries, which have phases, of what keys take


class Plan(NamedTuple):
    """Programs that prepare queries and keys, and how many heads attention takes at a time, longest tiles first.

    Heads of keys with flash-attn-4, of queries with ours.
    """

    q_programs: int
    k_programs: int
    together: int


class Awaited(NamedTuple):
    """What our attention waits for: counts, of tiles drawn and then of what is prepared, `units` for so many heads.

    Without units, for nothing. together: heads of queries that it takes at a time.
    """

    counts: Tensor
    heads: int | None
    units: int | None
    together: int


def plan(
    body: str, q: Tensor, k: Tensor, v: Tensor, angles: int, preparation: str, *, causal: bool, window: int | None
) -> Plan | None:  # fmt: skip
    """For a call of "flash" or "hopper" that gains, by the launch table; None where both are prepared before it.

    Those are the calls that are not causal, or have a window, more queries than keys, pairs that do not fill the width,
    or too few tiles; with "flash" also values or PoPE's queries of other than multiples of 16 channels, and groups that
    divide no tile. There attention takes a group's queries together, and expands PoPE's itself.
    """
    rows, heads, queries, width = q.shape
    key_heads, keys = k.shape[1:3]
    flash, rotates = body == "flash", preparation == "rope"
    made, group = width if rotates else 2 * width, heads // key_heads
    if not causal or window is not None or queries > keys or 2 * angles != made:
        return None
    if flash and (angles % (VECTOR if rotates else 2 * VECTOR) or v.shape[3] % 16 or 64 % group):
        return None
    row = launch(f"separable.{body}.ahead", q, qk=made, v=v.shape[3], length=keys)
    programs, processors = row["programs"], multiprocessors(q.device)
    taken = key_heads if flash else heads
    tiles = ceil_div(queries * heads // taken, TILE)
    if programs == 0 or rows * taken * tiles < row["tiles"] * processors:
        return None
    q_programs = 0
    if rotates or not flash:
        work = heads * queries * (1.0 if rotates else PHASED)
        q_programs = min(programs - 1, max(1, round(programs * work / (work + key_heads * keys))))
    return Plan(q_programs, programs - q_programs, power_of_two(ceil_div(processors, tiles)))
