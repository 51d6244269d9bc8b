"""A checkpoint on disk, Hugging Face's or of this library, as something that can be read."""

from pathlib import Path

import torch

from phasewise.device import floating, usable
from phasewise.hf.language_model import is_hugging_face
from phasewise.model import folder as own
from phasewise.model import history
from phasewise.model.reading import Reader, TransformerReader


def open_checkpoint(
    folder: str | Path,
    *,
    dtype: str | None = None,
    trained_length: int | None = None,
    device: str = "cpu",
) -> Reader:
    """The model in `folder`, ready to be read; Hugging Face's config.json names a model_type, ours does not.

    A training's folder stands for the model in it.

    dtype: float32, bfloat16 or float16; None: as stored. trained_length: only for models of this library;
    None: what the folder says, where it does.

    Raises ValueError for a folder that holds no whole model, weights that are not finite, an architecture
    that is not read, a device that is not there, and options that do not apply.
    """
    folder = own.inside(folder)
    usable(device)
    precision = floating(dtype)
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}; give the folder of a checkpoint")
    if not is_hugging_face(folder):
        return _own(folder, precision, trained_length, device)
    if trained_length is not None:
        raise ValueError("a Hugging Face config has its trained length; leave trained_length out")
    try:
        from phasewise.hf.checkpoint import load
        from phasewise.hf.reading import HFReader
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Hugging Face checkpoints need {error.name}: pip install 'phasewise[hf,train]'"
        ) from error
    return HFReader(load(folder, dtype=precision, device=device))


def _own(
    folder: Path, dtype: torch.dtype | None, trained_length: int | None, device: str
) -> TransformerReader:
    model = own.load(folder, device=device)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ValueError(f"{name} in {folder} is not finite; the checkpoint is broken, copy it again")
    if dtype is not None:
        model.to(dtype)
    if trained_length is None:
        trained_length = history.trained_length(folder)
    return TransformerReader(model, trained_length=trained_length)
