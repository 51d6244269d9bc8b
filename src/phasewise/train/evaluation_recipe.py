"""What an evaluation of checkpoints is made of, as frozen values that JSON holds."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from phasewise.data import CORPORA, TOKENIZERS
from phasewise.device import floating
from phasewise.problems import once
from phasewise.train.folder import begun_in


class EvaluateRecipe(BaseModel):
    """What to measure, on what, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    checkpoints: Annotated[tuple[str, ...], Field(min_length=1)]
    """Folders of checkpoints: of this library, or of Hugging Face."""
    data: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default=("austen",), description=f"Corpora: {CORPORA}."
    )
    tokenizer: str | None = Field(
        default=None, description=f"None: each checkpoint's own for text, or else bytes. {TOKENIZERS}"
    )
    split: str = "test"
    """Part of each corpus: train | validation | test."""
    lengths: tuple[Annotated[int, Field(ge=2, le=10**12)], ...] = ()
    """Context lengths, in tokens; needed for all but tasks, which have lengths of their own."""
    stride: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Tokens between windows, a whole length at most; none given: half of each length."""
    tokens: int = Field(default=32768, ge=1, le=10**12)
    """Tokens to score at each length, the same ones at all; of corpora of questions: questions."""
    needles: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Passkeys hidden at a time, as 1 4; none given: no retrieval."""
    depths: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1)] = (
        0,
        0.25,
        0.5,
        0.75,
        1,
    )
    """Where the passkey stands: 0 at the start, 1 just before the question."""
    examples: int = Field(default=5, ge=1, le=10**6)
    """Passkeys at each length and depth."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval: a name it knows (documents from the hub), or NAME:PATH for documents in local files."""
    task_limit: Annotated[int, Field(ge=1)] | None = None
    """Documents of each task; none given: all."""
    dtype: str | None = None
    """Run in float32 | bfloat16 | float16; none given: as stored. Losses are float32 in any case."""
    batch_tokens: int = Field(default=4096, ge=1, le=2**30)
    """Tokens of a batch, one row at least; what is measured does not depend on it."""
    seed: int = Field(default=0, ge=0)
    """Of the passkeys."""

    @field_validator("checkpoints", "data", "lengths", "needles", "depths", "tasks")
    @classmethod
    def _given_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return once(values)

    @model_validator(mode="after")
    def _lengths_for_needles(self) -> "EvaluateRecipe":
        if self.needles and not self.lengths:
            raise ValueError("needles are hidden at each length: give lengths")
        floating(self.dtype)
        return self


class Begun(BaseModel):
    """What a run was begun with: the content of recipe.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: EvaluateRecipe
    corpora: dict[str, str]
    """SHA-256 of each corpus's tokens, by its name."""


def read_begun(out: Path) -> Begun:
    """What the evaluation in `out` was begun with; ValueError when there is none, or one that cannot be read."""
    return begun_in(out, Begun, "evaluate")
