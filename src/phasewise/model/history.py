"""What a model on disk was trained at, stage after stage: a file beside its config and weights."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from phasewise.encodings import AnyEncodingConfig
from phasewise.problems import first
from phasewise.record import replacing

HISTORY = "history.json"


class Stage(BaseModel):
    """A training at one length.

    encoding: what the layers had then, one for all or one for each. tokens: seen in training.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    corpus: str
    corpus_sha256: str
    encoding: AnyEncodingConfig | tuple[AnyEncodingConfig, ...]


_STAGES = TypeAdapter(tuple[Stage, ...])


def write_history(folder: str | Path, stages: tuple[Stage, ...]) -> None:
    """Write the stages of the model in `folder`, the first one first.

    >>> from phasewise.encodings import RoPEConfig
    >>> stage = Stage(length=128, tokens=10**6, corpus="austen", corpus_sha256="0" * 64, encoding=RoPEConfig())
    >>> write_history("model", (stage,))
    >>> read_history("model")[-1].length
    128
    """
    with replacing(Path(folder) / HISTORY) as path:
        path.write_bytes(_STAGES.dump_json(stages, indent=2) + b"\n")


def read_history(folder: str | Path) -> tuple[Stage, ...]:
    """The stages of the model in `folder`; none where nothing is written of them.

    Raises ValueError for a file that is no history.
    """
    path = Path(folder) / HISTORY
    if not path.exists():
        return ()
    try:
        return _STAGES.validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(
            f"{path} is not a model's history ({first(error)}): delete it, or restore it"
        ) from error


def trained_length(folder: str | Path) -> int | None:
    """The length of the last stage of the model in `folder`; None where nothing is written of it."""
    stages = read_history(folder)
    return stages[-1].length if stages else None
