"""How the learning rate goes after the warm-up: one frozen type a shape."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import from_json


class Schedule(BaseModel):
    """The share of the highest rate, above the final one, that is left after some part of the steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Cosine(Schedule):
    """Half a cosine from the highest rate to the final one.

    >>> Cosine().share(0.5)
    0.5
    """

    kind: Literal["cosine"] = "cosine"

    def share(self, done: float) -> float:
        """The share left when `done`, in [0, 1], of the steps after the warm-up are done."""
        return (1 + math.cos(math.pi * done)) / 2


class WarmupStableDecay(Schedule):
    """The highest rate until the last part of the steps, `decay` of them, then a line to the final rate.

    A run can be cut or lengthened anywhere before the decay. Source: Hu et al., arXiv 2404.06395.

    >>> WarmupStableDecay(decay=0.2).share(0.9)
    0.5
    """

    kind: Literal["wsd"] = "wsd"
    decay: float = Field(default=0.2, gt=0, le=1)

    def share(self, done: float) -> float:
        """The share left when `done`, in [0, 1], of the steps after the warm-up are done."""
        return round(min(1.0, (1 - done) / self.decay), 15)


def from_text(value: Any) -> Any:
    """A kind's name, or JSON, as the settings it stands for; anything else as it is.

    >>> from_text("wsd"), from_text('{"kind": "wsd", "decay": 0.1}')
    ({'kind': 'wsd'}, {'kind': 'wsd', 'decay': 0.1})
    """
    if not isinstance(value, str):
        return value
    return from_json(value) if value.lstrip().startswith("{") else {"kind": value}


AnySchedule = Annotated[Cosine | WarmupStableDecay, Field(discriminator="kind"), BeforeValidator(from_text)]
