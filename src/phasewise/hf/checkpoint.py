"""A Hugging Face decoder from a local folder: whole, finite, or refused in one sentence. Never from a hub."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from phasewise.model.fitting import few, require_finite, reshaping
from phasewise.model.folder import CONFIG, WEIGHTS, lacking, read_settings
from phasewise.record import parsed

WHOLE = (WEIGHTS, "pytorch_model.bin")
INDEXES = tuple(f"{name}.index.json" for name in WHOLE)
WEIGHT_FILES = tuple(name for both in zip(WHOLE, INDEXES, strict=True) for name in both)
"""In the order in which transformers takes the first that there is; what else lies beside it is not read."""


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The decoder in `folder`, in the dtype it is stored in unless `dtype` names another, for evaluation.

    The folder holds config.json and weights, or one .gguf file, whose weights are dequantised.

    Raises ValueError, naming what is wrong, for a folder without config.json or weights, a shard or tensor
    that is missing or of another shape, an architecture that transformers lacks, one that is no decoder, and
    weights that are not finite.
    """
    folder = Path(folder)
    source = _source(folder)
    config = read_config(folder, source)
    if not source:
        require_weights(folder)
    with quiet():
        try:
            both: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype="auto" if dtype is None else dtype,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
                **source,
            )
        except (SafetensorError, RuntimeError) as error:
            raise ValueError(
                f"the weights in {folder} cannot be loaded ({_first_line(error)}); fetch them again"
            ) from error
        except ImportError as error:  # as for quantised weights
            raise ValueError(f"{folder} needs another package ({_first_line(error)}); install it") from error
        except Exception as error:  # a config without sense fails wherever the model's own code meets it
            if "Unrecognized configuration class" in str(error):
                raise ValueError(
                    f"{folder} holds a {config.model_type} model, which is no decoder; give one that is"
                ) from error
            raise ValueError(
                f"transformers cannot build the model that {folder} describes "
                f"({type(error).__name__}: {_first_line(error)}); correct its config.json"
            ) from error
    model, loaded = both
    remedy = "fetch it again, or correct its config.json"
    if others := [reshaping(name, held, wanted) for name, held, wanted in loaded["mismatched_keys"]]:
        raise ValueError(
            f"{folder} does not fit its config: {len(others)} of another shape ({few(others)}); {remedy}"
        )
    if missing := loaded["missing_keys"]:
        raise ValueError(
            f"{folder} does not fit its config: {len(missing)} tensors missing ({few(missing)}); {remedy}"
        )
    require_finite(dict(model.named_parameters()), folder)
    if dtype is not None:
        # Where a loader keeps its own dtype, as for .gguf files. Parameters alone: buffers hold the rates.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()


def _source(folder: Path) -> dict[str, str]:
    """What tells transformers to read a .gguf file; nothing where there is a config.json."""
    if (folder / CONFIG).is_file():
        return {}
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if not files:
        raise ValueError(lacking(folder))
    if len(files) > 1:
        raise ValueError(f"{folder} has {len(files)} .gguf files ({', '.join(files)}); keep one in a folder")
    if find_spec("gguf") is None:
        raise ValueError(f"{files[0]} needs gguf: pip install 'phasewise[hf]'")
    return {"gguf_file": files[0]}


def read_config(folder: Path, source: Mapping[str, str] = {}) -> Any:
    """The config in `folder`; `source` names its file where that is not config.json. ValueError for none."""
    try:
        with quiet():
            return AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **source
            )
    except Exception as error:  # of as many kinds as there are settings, dataclasses and parsers behind them
        if source:
            name = source["gguf_file"]
            raise ValueError(
                f"{folder / name} cannot be read ({_first_line(error)}); fetch it again"
            ) from error
        content = read_settings(folder / CONFIG)
        family = content.get("model_type")
        reason = (
            "it brings code of its own, and none is run here" if "auto_map" in content else _first_line(error)
        )
        raise ValueError(
            f"transformers cannot read the config of {folder} (model_type {family!r}): {reason}; "
            "correct it, or give a checkpoint of an architecture that transformers has"
        ) from error


def require_weights(folder: Path) -> None:
    """See that every file of the weights that are read is there, and every one of safetensors whole.

    Raises ValueError for what is not. Only lengths and headers are read.
    """
    found = next((name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(
            f"{folder} has a {CONFIG} but no weights: it needs one of {', '.join([*WHOLE, *INDEXES])}"
        )
    files = [found]
    if found in INDEXES:
        try:
            files = sorted(set(parsed((folder / found).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder / found} does not say which shards there are; fetch it again"
            ) from error
        if absent := [name for name in files if not (folder / name).is_file()]:
            raise ValueError(f"{folder} lacks {few(absent)}, which {found} lists; fetch it again")
    for path in (folder / name for name in files if name.endswith(".safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(
                f"the weights in {path} cannot be loaded ({_first_line(error)}); fetch them again"
            ) from error


def unrunnable(model: str, error: Exception) -> ValueError:
    """What to raise for a decoder, so named, that failed as it ran: the sizes of its config do not fit."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ValueError(f"transformers cannot run {model} ({reason}); correct its config.json")


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own bars and warnings: what they say is checked here, or irrelevant."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    """The first line of what an error says, and the next where that ends in a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
