"""One of several processes of an extension: `python -m tests.train.extended CHECKPOINT OUT CONTEXT_PROCESSES`."""

import sys
from pathlib import Path

from phasewise.train import extend as module
from phasewise.train.continuation import ExtendRecipe
from phasewise.train.processes import join, leave

from .small import corpus


def request(checkpoint: str, context_processes: int) -> ExtendRecipe:
    way = {"kind": "longrope", "population": 4, "generations": 1, "children": 2, "tokens": 60}
    return ExtendRecipe(
        checkpoint=checkpoint,
        rule=way,
        length=(24, 48),
        steps=(2, 3),
        warmup=1,
        batch_size=2,
        evaluate_tokens=200,
        context_processes=context_processes,
    )


if __name__ == "__main__":
    module.load = lambda _name, *, tokenizer: corpus()
    here = join("cpu")
    try:
        module.extend(request(sys.argv[1], int(sys.argv[3])), Path(sys.argv[2]), figure=False, device=here)
    finally:
        leave()
