"""The corrected config: safe edits alone, what they were, and what is left to a person."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasewise.lens.doctor.diagnosis import Diagnosis, Edit
from phasewise.lens.spectrum import Values
from phasewise.model.folder import CONFIG
from phasewise.record import replacing


class Repair(Values):
    """What was changed, and what not and why."""

    changed: tuple[str, ...]
    left: tuple[str, ...]


def repair(content: Mapping[str, Any], diagnosis: Diagnosis) -> tuple[dict[str, Any], Repair]:
    """The config with every safe edit of a diagnosis, and what was done.

    >>> from phasewise.lens.doctor.diagnosis import Finding
    >>> edit = Edit(path=("head_dim",), value=64)
    >>> found = Finding(check="head width", severity="warning", said="null", evidence={}, remedy="", edits=(edit,))
    >>> facts = dict(checkpoint="c", family="f", dtype=None, length=1, trained_length=1, checks=())
    >>> fixed, done = repair({"head_dim": None}, Diagnosis(findings=(found,), **facts))
    >>> fixed, done.changed
    ({'head_dim': 64}, ('head_dim = 64 (head width)',))
    """
    fixed = copy.deepcopy(dict(content))
    changed, left = [], []
    for finding in diagnosis.findings:
        for edit in finding.edits:
            _apply(fixed, edit)
            changed.append(f"{edit} ({finding.check})")
        if not finding.edits:
            left.append(f"{finding.check}: {finding.by_hand}")
    return fixed, Repair(changed=tuple(changed), left=tuple(left))


def destination(out: Path, source: Path) -> Path:
    """The file to write: `out`, or config.json in the folder `out`; ValueError where a file is already."""
    path = out / CONFIG if out.is_dir() or not out.suffix else out
    if path.exists():
        same = source.exists() and path.samefile(source)
        raise ValueError(
            f"{path} {'is the config examined, which is never changed in place' if same else 'already exists'}; "
            "give another path"
        )
    return path


def write(content: Mapping[str, Any], path: Path) -> None:
    """Write a config, whole or not at all."""
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _apply(content: dict[str, Any], edit: Edit) -> None:
    *above, name = edit.path
    for key in above:
        content = content[key]
    if edit.remove:
        del content[name]
    else:
        content[name] = edit.value
