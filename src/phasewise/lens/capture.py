"""A checkpoint on disk, Hugging Face's or of this library, as something that can be read."""

from pathlib import Path

from phasewise.hf.language_model import open_language_model
from phasewise.model.reading import Reader


def open_checkpoint(
    folder: str | Path,
    *,
    dtype: str | None = None,
    trained_length: int | None = None,
    device: str = "cpu",
) -> Reader:
    """The model in `folder`, ready to be read: what `open_language_model` opens there.

    dtype: float32, bfloat16 or float16; None: as stored. trained_length: only for models of this library;
    None: what the folder says, where it does.

    Raises ValueError for a folder that holds no whole model, weights that are not finite, an architecture
    that is not read, a device that is not there, and options that do not apply.
    """
    return open_language_model(folder, dtype=dtype, device=device).reader(trained_length=trained_length)
