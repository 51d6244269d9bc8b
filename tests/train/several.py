"""One of several processes, as a launcher starts them: `python -m tests.train.several JOBS`, one after another."""

import json
import sys
from pathlib import Path

from phasewise.interrupt import Interrupted
from phasewise.model.folder import save
from phasewise.train import sharded
from phasewise.train.loop import train
from phasewise.train.processes import Processes, join, leave

from .small import corpus, recipe


def job(processes: Processes, folder: str, stop_after: int, changes: dict, together: int = 10**9) -> str:
    """Train into a folder, stopping after some steps of this sitting; what there is to say of it.

    together: the weights that a sharded model gathers at once.
    """
    sharded.TOGETHER = together
    asked = iter(range(1, 1000))
    # One process alone hears of the signal; all must stop at the same step.
    hears = processes.rank == processes.size - 1
    try:
        trained = train(
            recipe("pope", **changes),
            corpus(),
            Path(folder),
            device=processes,
            stop=lambda: hears and next(asked) == stop_after,
        )
    except Interrupted as error:
        return f"interrupted at {error}"
    if processes.first:
        save(trained.model, Path(folder) / "model")
    return f"loss {trained.loss}"


if __name__ == "__main__":
    here = join("cpu")
    try:
        print(json.dumps([job(here, *given) for given in json.loads(sys.argv[1])]))
    finally:
        leave()
