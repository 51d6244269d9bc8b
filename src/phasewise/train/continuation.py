"""What an extension is made of, as frozen values that JSON holds."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phasewise.data import CORPORA, TOKENIZERS
from phasewise.train.folder import begun_in
from phasewise.train.initial import Initial
from phasewise.train.recipe import Seed, Weights
from phasewise.train.rules import AnyWay, AsIs

Length = Annotated[int, Field(ge=2, le=2**20)]


class Continuation(BaseModel):
    """What an extension trains and measures on, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    data: str = Field(default="austen", description=f"Corpus: {CORPORA}.")
    tokenizer: str | None = Field(
        default=None, description=f"None: the checkpoint's own for text, or else bytes. {TOKENIZERS}"
    )
    trained_length: Length | None = None
    """Length the checkpoint was trained at, where its folder does not say."""
    batch_size: int = Field(default=4, ge=1, le=2**16)
    """Sequences in a training step."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Highest learning rate of each length, reached at the end of its warm-up."""
    final_learning_rate: float = Field(default=1e-4, ge=0)
    """Learning rate at the last step of each length."""
    warmup: int = Field(default=10, ge=0, le=10**9)
    """Steps of each length over which the learning rate rises."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's decoupled decay, on matrices only."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What matrix products are computed in while training."""
    recompute: bool = False
    """Compute each block again in the backward pass instead of keeping its activations."""
    sharding: Weights = "replicated"
    """Of several processes: a whole model in each (DDP), or a part of every weight (FSDP2), gathered for a step
    (sharded) or for the forward and again for the backward pass (resharded: reshard_after_forward)."""
    context_processes: int = Field(default=1, ge=1, le=2**16)
    """Processes that share each row, for contexts longer than one device holds."""
    checkpoint_every: int = Field(default=100, ge=1, le=10**9)
    """Steps between checkpoints; the last step is always kept."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads; another count changes the last digits of the losses."""
    seed: Seed = 0
    """Of the batches, and of the search for divisors."""
    evaluate_tokens: int = Field(default=16384, ge=1, le=10**12)
    """Tokens of the test split to score at each length, the same ones at all."""
    evaluate_stride: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Tokens between evaluation windows; none given: half of each length."""


class ExtendRecipe(Continuation):
    """A checkpoint, the lengths to continue it at one after another, and the way its rates are changed.

    checkpoint: a model's folder, or a run folder with one. steps: of training at each length; 0, of a single
    length, changes the rates alone.

    >>> ExtendRecipe(checkpoint="run", length=(256, 512), steps=(60, 40), rule="yarn").rule
    ByParts(kind='yarn')
    """

    checkpoint: str
    length: Annotated[tuple[Length, ...], Field(min_length=1)]
    steps: Annotated[tuple[Annotated[int, Field(ge=0, le=10**9)], ...], Field(min_length=1)]
    rule: AnyWay

    @model_validator(mode="after")
    def _scheduled(self) -> Self:
        if len(self.length) != len(self.steps):
            raise ValueError(
                f"{len(self.length)} lengths have {len(self.steps)} numbers of steps: give one for each length"
            )
        if list(self.length) != sorted(set(self.length)):
            raise ValueError(
                f"lengths must rise, but are {', '.join(map(str, self.length))}: put them in order"
            )
        if 0 in self.steps and (len(self.steps) > 1 or isinstance(self.rule, AsIs)):
            raise ValueError("0 steps change rates alone: give one length, and a rule other than none")
        return self


class Begun(BaseModel):
    """What an extension was begun with: the content of recipe.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: ExtendRecipe
    initial: Initial
    corpus_sha256: str


def read_begun(out: Path) -> Begun:
    """What the extension in `out` was begun with; ValueError when there is none, or one that cannot be read."""
    return begun_in(out, Begun, "extend")
