"""Which documents and which codec each kind of data has that can be tokenised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from phasewise.data.codec import Codec, defined_codec, text_codec
from phasewise.data.corpus import Split
from phasewise.data.documents import Source, text_source
from phasewise.data.genome import genome_codec, genome_source
from phasewise.data.midi import midi_source, remi_codec, transposed

MUSIC = ("midi", "maestro", "asap")
KINDS = ("text", "jsonl", "parquet", "datasets", "genome", *MUSIC)
TOKENIZERS = (
    "Of text: bytes | gpt2 | bpe:SIZE (trained on the training split) | PATH of a tokenizer.json; "
    "of genomes: bytes (a base a token) | kmers:K."
)


class Origin(BaseModel):
    """What is tokenised, and how: equal origins of equal sources give equal shards."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    data: str
    """text:PATH | jsonl:PATH | parquet:PATH | datasets:NAME (or NAME:CONFIG) | genome:PATH |
    midi:PATH | maestro:PATH | asap:PATH."""
    tokenizer: str = Field(default="bytes", description=f"{TOKENIZERS} Music has one of its own, REMI.")
    separator: str | None = None
    """Of text: what stands between documents inside a file (in bash $'\\n' for a line end); None: a file is one."""
    field: str = "text"
    """Of jsonl, parquet and datasets: the field that holds the text; rows where it is null are left out."""
    held_out: float = Field(default=0.05, ge=0, lt=0.5)
    """Share of the documents for validation, and as many for test, where the data have no splits of their own."""
    seed: int = Field(default=0, ge=0)
    """Of that split."""
    learn_from: int | None = Field(default=None, ge=1)
    """Of bpe:SIZE: bytes of the training split that it is trained on at most, documents drawn by their hash;
    None: 256 MiB."""

    @model_validator(mode="after")
    def _something_learns(self) -> Origin:
        if self.learn_from is not None and not self.tokenizer.startswith("bpe:"):
            raise ValueError(
                f"tokenizer {self.tokenizer!r} is not trained: leave learn_from (--learn-from) out, or give bpe:SIZE"
            )
        return self

    @property
    def kind(self) -> str:
        return self.data.partition(":")[0]


def open_source(origin: Origin) -> Source:
    """The documents of an origin; ValueError for data of no such kind, or none at the place."""
    if origin.kind not in KINDS or not origin.data.partition(":")[2]:
        known = ", ".join(f"{kind}:{'NAME' if kind == 'datasets' else 'PATH'}" for kind in KINDS)
        raise ValueError(f"{origin.data!r} cannot be tokenised; give {known}")
    path = Path(origin.data.partition(":")[2]).expanduser()
    if origin.kind in MUSIC:
        return midi_source(origin.kind, path, held_out=origin.held_out, seed=origin.seed)
    if origin.kind == "genome":
        return genome_source(path)
    return text_source(origin.data, separator=origin.separator, field=origin.field)


def make_codec(origin: Origin, training: Callable[[], Iterable[bytes]]) -> Codec:
    """The codec of an origin; `training` gives the documents of its training split, for a BPE to learn from."""
    if origin.kind in MUSIC:
        if origin.tokenizer != "bytes":
            raise ValueError(f"music has one tokenizer, REMI, not {origin.tokenizer!r}; leave tokenizer out")
        return remi_codec()
    return (
        genome_codec(origin.tokenizer) if origin.kind == "genome" else text_codec(origin.tokenizer, training)
    )


def stored_codec(origin: Origin, definition: str) -> Codec:
    """The codec that made the tokens of an origin, from its stored definition."""
    if origin.kind in MUSIC:
        return remi_codec(definition)
    if origin.kind == "genome":
        return replace(genome_codec(origin.tokenizer), definition=definition)
    return defined_codec(origin.tokenizer, definition)


def for_training(origin: Origin, codec: Codec, splits: Mapping[str, Split]) -> dict[str, Split]:
    """The splits as a model is shown them: the training pieces of music in seven keys, all else as it is."""
    if origin.kind not in MUSIC:
        return dict(splits)
    return {**splits, "train": transposed(splits["train"], codec)}
