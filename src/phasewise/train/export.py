"""A trained model as a Hugging Face checkpoint: written beside, compared with the model, and only then there."""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from phasewise.data.codec import BYTES, byte_definition, unmarked
from phasewise.data.sources import TOKENIZER, WRITTEN
from phasewise.device import floating
from phasewise.frequencies_hf import stretched
from phasewise.model import Transformer
from phasewise.model import folder as on_disk
from phasewise.model.history import read_history
from phasewise.model.reading import require_count
from phasewise.train.folder import appearing, ask, require_free
from phasewise.train.kept import write_tokenizer

OF_TEXT = (*WRITTEN, "shards")


class Export(BaseModel):
    """What was written, and how near it is. difference: the largest of two logits, in float32; largest: logit.

    tokenizer: the model's own; bytes, as a tokenizer.json that makes them; or None, where none is known.
    passed_over: what other programs may not read of its config.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    parameters: int
    dtype: str
    length: int
    tokenizer: str | None
    passed_over: tuple[str, ...]
    difference: float
    largest: float


def export(
    checkpoint: str | Path,
    out: Path,
    *,
    length: int | None = None,
    dtype: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Export:
    """Write a model of this library, a run's or one in a folder, to `out` as a Hugging Face checkpoint.

    length: tokens it is for, its max_position_embeddings; None: what its rule or its training says.
    dtype: float32 | bfloat16 | float16; None: as stored. stop: asked between steps; when it says so, nothing is
    left and Interrupted raised.

    Raises ValueError, and writes nothing, without transformers, for a folder that holds something, a checkpoint that
    is no whole model or does not say its length, a model that no decoder of transformers computes, weights beyond
    the dtype, and logits that differ by more than rounding; Unwritten when `out` cannot be written, as on a full disk.
    """
    try:
        from phasewise.hf.export import compare, hf_config, passed_over, write
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Hugging Face checkpoints need {error.name}: pip install 'phasewise[hf,train]'"
        ) from error
    require_free(out, resumed=False)
    precision, folder = floating(dtype), on_disk.inside(checkpoint)
    if "model_type" in on_disk.read_settings(folder / on_disk.CONFIG):
        raise ValueError(f"{folder} is a Hugging Face checkpoint already: give a model of this library")
    model = on_disk.load(folder, dtype=precision)
    _require_within(model, dtype)
    length = _length(model, folder) if length is None else length
    require_count("length", length)
    hf_config(model.config, length=length)  # raises before anything is written
    with appearing(out) as unfinished:
        ask(stop)
        architecture = write(model, unfinished, length=length)
        tokenizer = _bring_tokenizer(model, folder, unfinished)
        ask(stop)
        difference, largest = compare(model, unfinished, length=length)
        ask(stop)
    return Export(
        architecture=architecture,
        parameters=model.parameter_count,
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        length=length,
        tokenizer=tokenizer,
        passed_over=tuple(passed_over(model.config)),
        difference=difference,
        largest=largest,
    )


def _require_within(model: Transformer, dtype: str | None) -> None:
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            raise ValueError(f"{name} does not fit {dtype}: give bfloat16, or leave dtype out")


def _length(model: Transformer, folder: Path) -> int:
    """Tokens a model is for: those of its last training, or of its rule where that names more."""
    rule, history = model.config.frequencies, read_history(folder)
    original, factor = getattr(rule, "original_length", None), getattr(rule, "factor", None)
    known = [stage.length for stage in history[-1:]]
    if original is not None:
        known.append(stretched(original, factor or 1))
    elif history and history[-1].encoding != model.config.encoding:
        raise ValueError(
            f"the rates in {folder} were changed after its training at {history[-1].length}, and do not say for which "
            "length: give --length"
        )
    if not known:
        raise ValueError(f"{folder} does not say the length it was trained at: give --length")
    return max(known)


def _bring_tokenizer(model: Transformer, folder: Path, out: Path) -> str | None:
    if (own := folder / TOKENIZER).is_file():
        write_tokenizer(out, unmarked(str(own), own.read_text(encoding="utf-8")))
        return str(own)
    kinds = {stage.corpus.partition(":")[0] for stage in read_history(folder)}
    if model.config.vocab_size != BYTES or not kinds <= set(OF_TEXT):
        return None
    write_tokenizer(out, byte_definition())
    return "bytes"
