"""A model on disk: a folder with config.json and model.safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from phasewise.model.config import ModelConfig
from phasewise.model.fitting import misfit, require_finite
from phasewise.model.transformer import Transformer
from phasewise.problems import first
from phasewise.record import parsed, replacing

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
MODEL, METRICS = "model", "metrics.jsonl"
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def inside(folder: str | Path) -> Path:
    """The folder of the model itself: a training keeps it in `model`, inside its own.

    >>> inside("runs/mine")
    PosixPath('runs/mine')
    """
    folder = Path(folder)
    inner = folder / MODEL
    return inner if not (folder / CONFIG).exists() and (inner / CONFIG).exists() else folder


def lacking(folder: Path) -> str:
    """What to say of a folder without a model: that it has none, and of a run, where its models are or why not yet."""
    below = sorted(str(path.parents[1]) for path in folder.glob(f"runs/*/{MODEL}/{CONFIG}"))
    if not below and any(any(folder.glob(f"{of}{METRICS}")) for of in ("", "stages/*/", "runs/*/")):
        return f"{folder} has no {MODEL} yet, as its training has not ended: go on with it by --resume"
    return f"{folder} has no {CONFIG}; give the folder of a checkpoint{', as ' * bool(below)}{' or '.join(below)}"


def read_settings(path: Path) -> dict[str, Any]:
    """What a config.json holds, this library's or another's; ValueError for what is none."""
    if not path.is_file():
        raise ValueError(lacking(path.parent))
    try:
        content = parsed(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch it again, or correct it") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds {type(content).__name__}, not the settings of a model; give a config.json"
        )
    return content


def save(model: Transformer, folder: str | Path) -> None:
    """Write the model to `folder`, making it; what is there afterwards is a whole model, old or new.

    A folder that holds a model of the same config gets the new weights. Raises ValueError when it holds
    a model of another config, which is left untouched, and without safetensors installed; OSError when it
    cannot be written, as on a full disk.
    """
    safetensors = require_safetensors()
    folder = Path(folder)
    text = model.config.model_dump_json(indent=2) + "\n"
    if (folder / CONFIG).exists() and _read_config(folder) != model.config:
        raise ValueError(f"{folder} holds a model with another {CONFIG}; give another folder, or remove it")
    with replacing(folder / WEIGHTS) as path:
        path.touch()
        mode = path.stat().st_mode  # as for any file; safetensors makes one that nobody else may read
        try:
            safetensors.torch.save_file(model.state_dict(), path, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OSError(f"{folder / WEIGHTS}: {error}") from error
        path.chmod(mode)
    # Last: weights without a config are no model yet.
    with replacing(folder / CONFIG) as path:
        path.write_text(text, encoding="utf-8")


def load(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Transformer:
    """The model saved in `folder`, in the dtype it was saved in unless `dtype` names another, for evaluation.

    Raises ValueError when the folder holds no whole model, its weights do not fit its config or are not finite,
    `dtype` is none that a model computes in, or safetensors is not installed.
    """
    if dtype is not None and dtype not in FLOATING:
        raise ValueError(f"dtype is {dtype!r}; give one of {', '.join(map(str, FLOATING))}, or None as saved")
    safetensors = require_safetensors()
    folder = Path(folder)
    config = _read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}; give a folder that `save` has written")
    with torch.device("meta"):
        model = Transformer(config)
    try:
        held = safetensors.torch.load_file(folder / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{folder / WEIGHTS} is not a whole safetensors file: {error}; copy it again"
        ) from error
    other = {name: weight.dtype for name, weight in held.items() if weight.dtype not in FLOATING}
    if other:
        name, dtype = min(other.items())
        raise ValueError(
            f"{folder / WEIGHTS} holds {name} in {str(dtype).removeprefix('torch.')}, in which nothing can be "
            "computed; store it in float32, bfloat16 or float16"
        )
    if (problem := misfit(model.state_dict(), held)) is not None:
        raise ValueError(
            f"{folder / WEIGHTS} does not fit {CONFIG} beside it: {problem}; copy both again from one model"
        )
    require_finite(held, folder)
    # Copied out of the mapped file, whose alignment would change the last bits of matrix products.
    weights = {name: weight.to(device, copy=True) for name, weight in held.items()}
    model.load_state_dict(weights, assign=True)
    return (model if dtype is None else model.to(dtype)).eval()


def _read_config(folder: Path) -> ModelConfig:
    try:
        return ModelConfig.model_validate_json((folder / CONFIG).read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {CONFIG}; give a folder that `save` has written") from error
    except ValidationError as error:
        raise ValueError(
            f"{folder / CONFIG} is not a model's config: {first(error)}; correct it, or copy it again"
        ) from error


def require_safetensors():
    """The safetensors package; ValueError, with what to install, when there is none."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise ValueError("models on disk need safetensors: pip install 'phasewise[train]'") from error
    return safetensors
