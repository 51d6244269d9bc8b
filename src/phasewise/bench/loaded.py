"""What processes of a benchmark begin with, imported once, by the one that they are forked from.

flash-attn-4's compiler alone takes seconds to import. The device, which none may have touched before it is forked, is
not asked what it is there: `workers.keep_kernels` has said it.
"""

from phasewise.bench import tunable, visits
from phasewise.kernels.packages import flash_obstacle

USED = tunable, visits
OBSTACLES = [
    flash_obstacle(f"phasewise.kernels.{name}") for name in ("flash_ahead", "flash_backward", "tapa_flash")
]
