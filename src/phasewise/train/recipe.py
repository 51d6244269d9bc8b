"""What a training and a comparison of trainings are made of, as frozen values that JSON holds."""

from collections.abc import Callable
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from phasewise.data import CORPORA, TOKENIZERS
from phasewise.encodings import AnyEncodingConfig, RoPEConfig, named
from phasewise.frequencies import NTK, AnyFrequencies, Linear, YaRN
from phasewise.model import ModelConfig
from phasewise.model.layout import Layout
from phasewise.problems import once
from phasewise.train.initial import Initial
from phasewise.train.schedule import AnySchedule, Cosine, from_text
from phasewise.train.sizes import SIZES

Value = TypeVar("Value")
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Weights = Literal["replicated", "sharded", "resharded"]
"""Where several processes have a model's weights: all in each (DDP); a part in each, gathered for a step or, with
less memory and more to send, once for the forward and once for the backward pass (FSDP2)."""
MULTIPLES = (1, 2, 4, 8)
SCALINGS: dict[str, Callable[[float, int, float], AnyFrequencies]] = {
    "linear": lambda base, _trained, factor: Linear(base=base, factor=factor),
    "ntk": lambda base, _trained, factor: NTK(base=base, factor=factor),
    "yarn": lambda base, trained, factor: YaRN(base=base, factor=factor, original_length=trained),
}


class Budget(BaseModel):
    """What every encoding of a comparison gets alike: the data, the steps and the optimizer."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    data: str = Field(default="austen", description=f"Corpus: {CORPORA}.")
    tokenizer: str = Field(default="bytes", description=TOKENIZERS)
    context: int = Field(default=128, ge=2, le=2**20)
    """Trained length in tokens."""
    batch_size: int = Field(default=16, ge=1, le=2**16)
    """Sequences in a training step."""
    steps: int = Field(default=450, ge=1, le=10**9)
    """Training steps."""
    learning_rate: float = Field(default=5e-3, gt=0)
    """Highest learning rate, reached at the end of the warm-up."""
    final_learning_rate: float = Field(default=5e-4, ge=0)
    """Learning rate at the last step."""
    warmup: int = Field(default=50, ge=0, le=10**9)
    """Steps over which the learning rate rises linearly."""
    schedule: AnySchedule = Cosine()
    """How the learning rate goes from there to the final one: cosine | wsd."""
    encoding_rate: float = Field(default=1.0, gt=0)
    """Learning rate of an encoding's own parameters (PoPE's phases), over that of the weights."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's decoupled decay, on matrices only."""
    beta2: float = Field(default=0.99, gt=0, lt=1)
    """AdamW's second-moment memory (the first is 0.9)."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""
    checkpoint_every: int = Field(default=100, ge=1, le=10**9)
    """Steps between checkpoints; the last step is always kept."""
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads; another count changes the last digits of the losses."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup {self.warmup} leaves nothing of steps {self.steps}: choose a smaller one"
            )
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate} is above "
                f"learning_rate {self.learning_rate}: lower it"
            )
        return self

    @property
    def trained_tokens(self) -> int:
        """Tokens the model sees in training."""
        return self.steps * self.batch_size * self.context


class Execution(Budget):
    """How a training computes its steps and watches them."""

    seed: Seed = 0
    """Of the first weights, the batches and the dropout."""
    packed: bool = False
    """Fill each row with whole documents that do not see each other, instead of a piece of one."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What matrix products are computed in; weights, positions and the loss are float32 in any case."""
    compile: bool = False
    """Compile the blocks of the model and the loss; worth its seconds on a GPU."""
    recompute: bool = False
    """Compute each block again in the backward pass instead of keeping its activations."""
    accumulate: int = Field(default=1, ge=1, le=2**16)
    """Parts that each process takes its rows of a batch in, one after another."""
    sharding: Weights = "replicated"
    """Of several processes: a whole model in each (DDP), or a part of every weight (FSDP2), gathered for a step
    (sharded) or for the forward and again for the backward pass (resharded: reshard_after_forward)."""
    context_processes: int = Field(default=1, ge=1, le=2**16)
    """Processes that share each row, for contexts longer than one device holds."""
    evaluate_every: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Steps between measurements of the validation loss; none given: none."""
    evaluate_tokens: int = Field(default=2**16, ge=1, le=10**12)
    """Tokens of the validation split that are scored for it (of a task: examples)."""

    def divide(self, processes: int) -> int:
        """The rows of one part in one process; ValueError when batch, rows or processes do not divide."""
        groups, rest = divmod(processes, self.context_processes)
        if rest:
            raise ValueError(
                f"{processes} processes do not divide into groups of context_processes "
                f"{self.context_processes}: choose a divisor"
            )
        chunks = Layout(0, self.context_processes).count
        if self.context_processes > 1 and self.context % chunks:
            raise ValueError(
                f"context {self.context} does not divide over context_processes {self.context_processes}: "
                f"choose a multiple of {chunks}"
            )
        rows, rest = divmod(self.batch_size, groups * self.accumulate)
        if rest:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {groups} processes x "
                f"accumulate {self.accumulate}: choose a multiple of {groups * self.accumulate}"
            )
        return rows


class TrainRecipe(Execution):
    """One training run, whole: with the corpus it determines every loss to the last digit.

    >>> from phasewise.encodings import RoPEConfig
    >>> model = ModelConfig(vocab_size=256, width=32, layers=1, heads=2, encoding=RoPEConfig())
    >>> TrainRecipe(model=model, seed=0, steps=100, warmup=10).trained_tokens
    204800
    """

    model: ModelConfig
    initial: Initial | None = None
    """Another model's weights to start from; none: fresh ones, drawn from the seed."""


class RunRecipe(Execution):
    """What `phasewise train` reads: a training whose vocabulary is that of its data.

    >>> RunRecipe(size="124M", encoding="pope", vocabulary_multiple=128).training(vocab_size=50257).model.vocab_size
    50304
    """

    size: str = "10M"
    """Shape of the model; the options below change parts of it."""
    width: Annotated[int, Field(ge=1, le=2**14)] | None = None
    """Width of the model, if not the size's."""
    layers: Annotated[int, Field(ge=1, le=256)] | None = None
    """Layers, if not the size's."""
    heads: Annotated[int, Field(ge=1, le=2**10)] | None = None
    """Attention heads, if not the size's."""
    kv_heads: Annotated[int, Field(ge=1, le=2**10)] | None = None
    """Heads of keys and values; none given: as many as heads."""
    head_dim: Annotated[int, Field(ge=1, le=2**12)] | None = None
    """Width of a head; none given: width / heads."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """Feed-forward, 4 (gelu) or 8/3 (swiglu) times the width."""
    hidden: Annotated[int, Field(ge=1, le=2**17)] | None = None
    """Width of the feed-forward, if not that."""
    tied: bool | None = None
    """Whether the head shares the embedding's weight, if not as the size has it."""
    qk_norm: bool = False
    """Normalise each head's queries and keys."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout in training."""
    window: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Distance below which a query sees keys, itself counted; none given: all."""
    encoding: Annotated[AnyEncodingConfig, BeforeValidator(from_text)] = RoPEConfig()
    """Encoding: rope | pope | tapa | nope | alibi, or its settings as JSON."""
    vocabulary_multiple: int = Field(default=1, ge=1, le=2**12)
    """Round the model's vocabulary up to a multiple of this; 128 suits matrix products on a GPU."""

    @field_validator("size")
    @classmethod
    def _known_size(cls, name: str) -> str:
        if name not in SIZES:
            raise ValueError(f"unknown size {name!r}; choose from {', '.join(SIZES)}")
        return name

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.training(vocab_size=1)
        return self

    def training(self, *, vocab_size: int) -> TrainRecipe:
        """The recipe of the training on data with that many kinds of tokens."""
        shape = SIZES[self.size]._asdict()
        given = {
            name: getattr(self, name) for name in RunRecipe.model_fields if name in ModelConfig.model_fields
        }
        shape |= {name: value for name, value in given.items() if value is not None}
        multiple = self.vocabulary_multiple
        model = ModelConfig.model_validate({**shape, "vocab_size": -(-vocab_size // multiple) * multiple})
        settings = {name: getattr(self, name) for name in Execution.model_fields}
        return TrainRecipe(**settings, model=model)


PLACEMENT = ("sharding", "context_processes", "accumulate", "recompute", "compile")
"""What may change when a run is resumed: it changes where numbers are computed, and at most how they round."""


class CompareRecipe(Budget):
    """Train several encodings on one corpus under one budget and evaluate each beyond the trained length."""

    encodings: tuple[str, ...] = ("rope", "pope", "tapa", "nope", "alibi")
    """Encodings to train, of these."""
    scalings: tuple[str, ...] = tuple(SCALINGS)
    """Rules that RoPE is also evaluated with, applied after training; none: --scalings alone."""
    seeds: tuple[Seed, ...] = (0,)
    """Seeds; each encoding is trained once from each."""
    width: int = Field(default=64, ge=1, le=2**14)
    """Width of the model."""
    layers: int = Field(default=2, ge=1, le=256)
    """Layers of the model."""
    heads: int = Field(default=2, ge=1, le=2**10)
    """Attention heads of the model."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout in training."""
    evaluate_lengths: tuple[Annotated[int, Field(ge=2, le=10**12)], ...] = ()
    """Lengths to evaluate at; none given: 1, 2, 4 and 8 times the context (a task: the context)."""
    evaluate_tokens: int = Field(default=16384, ge=1, le=10**12)
    """Tokens to score at each length, the same ones at all."""
    evaluate_stride: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Tokens between evaluation windows; none given: half of each length."""

    @field_validator("encodings")
    @classmethod
    def _known_encodings(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            named(name)
        return once(names)

    @field_validator("scalings")
    @classmethod
    def _known_scalings(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in SCALINGS:
                raise ValueError(f"unknown scaling {name!r}; choose from {', '.join(SCALINGS)}")
        return once(names)

    @field_validator("seeds", "evaluate_lengths")
    @classmethod
    def _given_once(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        return once(values)

    @field_validator("encodings", "seeds")
    @classmethod
    def _one_at_least(cls, values: tuple[Value, ...]) -> tuple[Value, ...]:
        if not values:
            raise ValueError("give at least 1 item")
        return values

    @model_validator(mode="after")
    def _whole_heads(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not divide into {self.heads} heads: "
                "choose another number of heads or another width"
            )
        return self

    def training(self, encoding: str, seed: int, *, vocab_size: int) -> TrainRecipe:
        """The recipe of one of the trainings."""
        sizes = {name: getattr(self, name) for name in ("width", "layers", "heads", "dropout")}
        model = ModelConfig.model_validate({**sizes, "vocab_size": vocab_size, "encoding": named(encoding)})
        budget = {name: getattr(self, name) for name in Budget.model_fields}
        return TrainRecipe(**budget, model=model, seed=seed)

    def lengths(self, *, task: bool) -> tuple[int, ...]:
        """The lengths to evaluate at, shortest first."""
        return tuple(sorted(self.evaluate_lengths)) or tuple(
            n * self.context for n in MULTIPLES[: 1 if task else None]
        )
