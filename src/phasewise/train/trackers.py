"""Experiment trackers, by name: what a run measures goes to them as well as to metrics.jsonl.

They are accelerate's, which knows how each is started and fed.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NAMES = ("tensorboard", "wandb", "trackio")


class Trackers:
    """The trackers of a run.

    Raises ValueError for an unknown name, and for a package that is missing.
    """

    def __init__(self, names: Sequence[str], out: Path, settings: Mapping[str, Any]) -> None:
        self.started = [_start(name, out) for name in names]
        for tracker in self.started:
            tracker.store_init_configuration(_flat(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Tell all of a step's values."""
        for tracker in self.started:
            tracker.log(dict(values), step=step)

    def finish(self) -> None:
        """Have all write what they hold."""
        for tracker in self.started:
            tracker.finish()


def require_trackers(names: Sequence[str]) -> None:
    """Raise ValueError, with the remedy, for a tracker that is unknown or not installed."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"unknown tracker {name!r}; choose from {', '.join(NAMES)}")
        missing = [package for package in (name, "accelerate") if find_spec(package) is None]
        if missing:
            raise ValueError(f"the tracker {name} needs {missing[0]}: pip install {missing[0]}")


def _start(name: str, out: Path) -> Any:
    require_trackers([name])
    from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker

    starts = {
        "tensorboard": lambda: TensorBoardTracker("tensorboard", logging_dir=out),
        "wandb": lambda: WandBTracker(out.name, dir=str(out)),
        "trackio": lambda: TrackioTracker(out.name),
    }
    tracker = starts[name]()
    tracker.start()
    return tracker


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str | float | bool]:
    """Nested settings with dotted names, as every tracker takes them."""
    flat: dict[str, str | float | bool] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, int | float | bool) else str(value)
    return flat
