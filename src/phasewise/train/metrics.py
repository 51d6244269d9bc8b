"""metrics.jsonl, a line a step: read back to a checkpoint's step."""

import json
from pathlib import Path

from phasewise.record import replacing


def losses_until(path: Path, steps: int) -> list[float]:
    """The losses of the first `steps` steps; ValueError, with the remedy, for a file that does not hold them."""
    remedy = f"restore it, or delete {path.parent} to train this model again"
    try:
        lines = path.read_text().splitlines()[:steps] if path.exists() else []
        losses = [float(json.loads(line)["loss"]) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged (not every line is a step's metrics): {remedy}") from error
    if len(lines) < steps:
        raise ValueError(f"{path} holds {len(lines)} of the checkpoint's {steps} steps: {remedy}")
    return losses


def cut(path: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps alone."""
    lines = path.read_text().splitlines()[:steps] if path.exists() else []
    with replacing(path) as unfinished:
        unfinished.write_text("".join(line + "\n" for line in lines))
