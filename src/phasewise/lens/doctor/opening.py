"""What a doctor is given: a folder, a config alone, or a model in memory, opened or refused in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from phasewise.device import floating, usable
from phasewise.lens.doctor.patient import HFPatient, OwnPatient, Patient
from phasewise.lens.doctor.written import Written
from phasewise.model import ModelConfig, Transformer, history
from phasewise.model import folder as own_folder
from phasewise.model.reading import TransformerReader
from phasewise.model.sight import Bound
from phasewise.problems import first


@dataclass(frozen=True)
class Case:
    """What was given: a config, Hugging Face's (`written`) or ours (`own`), and the model if there is one."""

    name: str
    family: str
    written: Written | None
    own: ModelConfig | None
    patient: Patient | None
    trained_length: int | None = None
    """Of a model of this library: what was given, or else what its folder says."""

    @cached_property
    def bound(self) -> Bound | None:
        """How far layers with rates see, where each of them has a window; None also where it cannot be told."""
        if self.own is not None:
            return self.own.bound
        if find_spec("transformers") is None:
            return None
        from phasewise.hf.sight import bound

        assert self.written is not None
        return bound(self.written.whole)


def open_case(checkpoint: Any, *, trained_length: int | None, dtype: str | None, device: str) -> Case:
    """What stands at a path, or a model in memory; ValueError as `doctor`."""
    if not isinstance(checkpoint, str | Path):
        if dtype is not None:
            raise ValueError("a model in memory has its dtype; leave dtype out")
        return _of_memory(checkpoint, trained_length)
    path = own_folder.inside(checkpoint)
    usable(device)
    precision = floating(dtype)
    if not path.exists():
        raise ValueError(f"no file or folder {path}; give the folder of a checkpoint, or a config.json")
    if path.is_dir() and not (path / own_folder.CONFIG).exists() and any(path.glob("*.gguf")):
        if trained_length is not None:
            raise ValueError("a .gguf file has its trained length; leave trained_length out")
        patient = _hugging_face(path, precision, device)
        return Case(str(path), patient.config.model_type, Written(patient.config.to_dict()), None, patient)
    content = own_folder.read_settings(path / own_folder.CONFIG if path.is_dir() else path)
    if not is_hugging_face(content):
        return _of_own(path, content, trained_length, precision, device)
    if trained_length is not None:
        raise ValueError("a Hugging Face config has its trained length; leave trained_length out")
    patient = _hugging_face(path, precision, device) if path.is_dir() else None
    written = Written(_with_the_share_of_its_family(content))
    return Case(str(path), str(content.get("model_type", "config")), written, None, patient)


def _with_the_share_of_its_family(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config as transformers reads it; without transformers, as it is written."""
    if find_spec("transformers") is None:
        return content
    from phasewise.hf.settings import completed

    return completed(content)


def _of_memory(model: Any, trained_length: int | None) -> Case:
    if isinstance(model, Transformer):
        patient = _own_patient(model, trained_length)
        return Case("a model in memory", "phasewise", None, model.config, patient, trained_length)
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise ValueError(
            f"{type(model).__name__} is no model; give a folder, a decoder of transformers, or a Transformer"
        )
    from phasewise.hf.reading import HFReader

    written = Written(model.config.to_dict())
    patient = HFPatient(model, HFReader(model))
    return Case("a model in memory", model.config.model_type, written, None, patient)


def _of_own(
    path: Path,
    content: Mapping[str, Any],
    trained_length: int | None,
    precision: torch.dtype | None,
    device: str,
) -> Case:
    if trained_length is None:
        trained_length = history.trained_length(path if path.is_dir() else path.parent)
    if not path.is_dir():
        try:
            settings = ModelConfig.model_validate(content)
        except ValidationError as error:
            raise ValueError(
                f"{path} is no config of a checkpoint: {first(error)}; correct it, or copy it again"
            ) from error
        return Case(str(path), "phasewise", None, settings, None, trained_length)
    model = own_folder.load(path, dtype=precision, device=device)
    patient = _own_patient(model, trained_length)
    return Case(str(path), "phasewise", None, model.config, patient, trained_length)


def _hugging_face(folder: Path, precision: torch.dtype | None, device: str) -> HFPatient:
    try:
        from phasewise.hf.checkpoint import load
        from phasewise.hf.reading import HFReader
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Hugging Face checkpoints need {error.name}: pip install 'phasewise[hf,train]'"
        ) from error
    try:
        model = load(folder, dtype=precision, device=device)
    except ValueError as error:
        config = folder / own_folder.CONFIG
        alone = f". What its config alone tells: phasewise doctor {config}" if config.is_file() else ""
        raise ValueError(f"{error}{alone}") from error
    return HFPatient(model, HFReader(model))


def _own_patient(model: Transformer, trained_length: int | None) -> OwnPatient:
    return OwnPatient(model.eval(), TransformerReader(model, trained_length=trained_length))


def is_hugging_face(content: Mapping[str, Any]) -> bool:
    """Whether a config is Hugging Face's, whole or the rotary part alone, rather than this library's."""
    return "encoding" not in content


def first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return first(error)
    return str(error).splitlines()[0]
