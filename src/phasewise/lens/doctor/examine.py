"""doctor: what is silently wrong with the positions of a checkpoint, or of a config alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from phasewise.encodings import PoPEConfig, RoPEConfig
from phasewise.encodings.spectral import Spectral
from phasewise.frequencies_hf import RopeSettings
from phasewise.lens.doctor import agreement, config, engines, own, reach, rotation, sizes
from phasewise.lens.doctor.diagnosis import Check, Curve, Diagnosis, Finding, NotMade
from phasewise.lens.doctor.examined import Examined, Result, Wanted
from phasewise.lens.doctor.opening import Case, first_line, open_case
from phasewise.lens.doctor.patient import HFPatient, OwnPatient
from phasewise.lens.doctor.reach import Field
from phasewise.lens.doctor.written import Written, whole_number
from phasewise.model import ModelConfig
from phasewise.model.reading import require_count
from phasewise.model.sight import Bound
from phasewise.progress import bars

DEFAULT_LENGTH = 4096
WRITTEN_CHECKS: dict[str, Callable[[Written], Any]] = {
    "two forms": config.forms,
    "base": config.base,
    "rule": config.rule,
    "keys": config.keys,
    "original length": sizes.original,
    "factor": sizes.factor,
    "head width": sizes.head_width,
    "layer types": sizes.layers,
    "lists": sizes.lists,
    "rotated share": sizes.share,
    "attention factor": engines.attention,
}
MODEL_CHECKS: dict[str, Callable[[Examined], Result]] = {
    "config read": rotation.config_read,
    "buffers": rotation.buffers,
    "rates": rotation.rates,
    "phases": rotation.phases,
    "pairing": rotation.pairing,
    "decoding": agreement.decoding,
    "switch": agreement.switch,
    "moved text": agreement.moved,
    "left padding": agreement.padding,
    "packing": agreement.packing,
    "frozen phases": own.frozen,
    "phase argument": own.argument,
}
NEEDS_RATES = ("phases", "pairing")
"""Checks that say nothing where the rates are not the config's."""


@dataclass
class _Notes:
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    turns: tuple[Curve, ...] = ()

    def add_fields(self, fields: Callable[[], list[Field]], bound: Callable[[], Bound | None]) -> None:
        """Check the reach of every field, as far as any layer with rates sees, and keep its turns."""

        def check() -> Result:
            given = fields()
            windowed = bound() if any(reach.asked(one) for one in given) else None
            found = given if windowed is None else [replace(one, sees=windowed.window) for one in given]
            self.turns = tuple(curve for one in found for curve in one.turns())
            findings = [finding for one in found for finding in one.findings()]
            return [*findings, *reach.within(windowed, found)], reach.said(found)

        self.add("field", check)

    def add(self, name: str, check: Callable[[], Result]) -> bool:
        """Make a check; whether it passed."""
        try:
            found, said = check()
        except NotMade as reason:
            self.skip(name, str(reason))
            return True
        self.findings += found
        self.checks.append(
            Check(name=name, outcome="found" if found else "passed", said="" if found else said)
        )
        return not found

    def skip(self, name: str, why: str) -> None:
        self.checks.append(Check(name=name, outcome="not made", said=why))


def doctor(
    checkpoint: str | Path | nn.Module,
    *,
    length: int | None = None,
    trained_length: int | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    console: Console | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Diagnosis:
    """What is wrong with the positions of a checkpoint that serves `length` tokens.

    checkpoint: a folder (a Hugging Face decoder, or a model of this library), a config.json alone (then only
    what needs no weights), or a model in memory, of transformers or of this library, as it is. length: tokens;
    by default what the checkpoint states, or 4096. trained_length: for models of this library; by default what
    the folder says, where it does. dtype: load in float32, bfloat16 or float16; None: as stored. `console` shows
    the progress of the checks that need weights; `stop` is asked between them, and what is then left out is
    named in `partial`.

    Raises ValueError for a path without a whole, finite model, an architecture that is not read, a model without
    rotary positions, and options that do not apply.

    >>> from phasewise import ModelConfig, RoPEConfig, Transformer
    >>> config = ModelConfig(vocab_size=11, width=32, layers=2, heads=2, encoding=RoPEConfig())
    >>> doctor(Transformer(config).eval(), length=1024, trained_length=1024).wrong
    False
    """
    for name, value in (("length", length), ("trained_length", trained_length)):
        if value is not None:
            require_count(name, value, least=2)
    case = open_case(checkpoint, trained_length=trained_length, dtype=dtype, device=device)
    notes = _Notes()
    if case.written is not None:
        wanted_length = length or case.written.longest or DEFAULT_LENGTH
        trained = _of_config(case.written, notes, wanted_length, lambda: case.bound)
    else:
        assert case.own is not None
        settings, trained = case.own, case.trained_length
        wanted_length = length or trained or DEFAULT_LENGTH
        notes.add("contradictions", lambda: ([], "every setting has one value"))
        notes.add_fields(lambda: _own_fields(settings, wanted_length, trained), lambda: case.bound)
    partial_said = phase_error = None
    if case.patient is None:
        for name in MODEL_CHECKS:
            notes.skip(name, "needs the weights")
    else:
        examined = _examined(case, wanted_length, trained)
        with bars(console) as progress:
            partial_said = _of_model(examined, notes, progress, stop)
        if any(check.name == "phases" and check.outcome != "not made" for check in notes.checks):
            phase_error = rotation.error_by_position(examined)
    return Diagnosis(
        checkpoint=case.name,
        family=case.family,
        dtype=None if case.patient is None else str(case.patient.dtype).removeprefix("torch."),
        length=wanted_length,
        trained_length=trained,
        findings=tuple(
            sorted(notes.findings, key=lambda found: ("wrong", "warning", "note").index(found.severity))
        ),
        checks=tuple(notes.checks),
        turns=notes.turns,
        phase_error=phase_error,
        partial=partial_said,
    )


def _of_config(written: Written, notes: _Notes, length: int, bound: Callable[[], Bound | None]) -> int | None:
    """The checks of a Hugging Face config; the trained length."""
    for name, check in WRITTEN_CHECKS.items():
        notes.add(name, lambda check=check: (list(check(written)), ""))
    try:
        settings = written.settings()
    except ValueError as error:
        if not any(found.severity == "wrong" or found.check == "base" for found in notes.findings):
            notes.findings.append(
                Finding(
                    check="contradictions",
                    severity="wrong",
                    said="the settings contradict themselves, or one is of the wrong kind",
                    evidence={"problem": first_line(error)},
                    remedy="correct what is named",
                    by_hand="which of the values was meant is not in the config",
                )
            )
        for name in ("contradictions", "dynamic", "short inputs", "field"):
            found = any(finding.check == name for finding in notes.findings)
            outcome = "found" if found else "not made"
            said = "" if found else "the settings contradict themselves"
            notes.checks.append(Check(name=name, outcome=outcome, said=said))
        return written.longest
    rules = {layer: one.frequencies for layer, one in settings.items() if one is not None}
    notes.add("contradictions", lambda: ([], "every setting has one value"))
    notes.add("dynamic", lambda: (list(engines.dynamic(rules, length)), ""))
    notes.add("short inputs", lambda: (list(engines.short_inputs(rules, length)), ""))
    notes.add_fields(lambda: _fields(written, settings, length), bound)
    return _trained(written)


def _trained(written: Written) -> int | None:
    lengths = [written.original(group) for group in written.groups if group.rule not in ("default", "linear")]
    known = [length for length in lengths if length is not None]
    return min(known) if known else written.longest


def _fields(written: Written, settings: Mapping[str | None, RopeSettings | None], length: int) -> list[Field]:
    """The field of every layer type; NotMade where sizes are missing."""
    trained, width = _trained(written), written.head_dim
    if trained is None or width is None:
        raise NotMade(f"the config says no {'trained length' if trained is None else 'head width'}")
    window = whole_number(written.config.get("sliding_window"))
    longest = max(trained, written.longest or trained)
    found = []
    for layer, one in settings.items():
        if one is None:
            continue
        where = "" if layer is None else f" of {layer}"
        n = one.channels(width)
        sees = window if layer == "sliding_attention" else None
        found.append(Field(one.frequencies, n, length, trained, longest, where=where, sees=sees))
    return found


def _own_fields(settings: ModelConfig, length: int, trained: int | None) -> list[Field]:
    if trained is None:
        raise NotMade("the trained length is not known; give it as trained_length")
    first = {encoding: index for index, encoding in reversed(list(enumerate(settings.encodings)))}
    found = []
    for encoding, index in first.items():
        if isinstance(encoding, RoPEConfig | PoPEConfig):
            built = encoding.build(num_heads=settings.heads, head_dim=settings.head_dim)
            where = "" if len(first) == 1 else f" of layer {index}"
            n, polar = built.channels // built.axes, isinstance(encoding, PoPEConfig)
            found.append(Field(encoding.frequencies, n, length, trained, trained, where=where, polar=polar))
    if not found:
        raise NotMade("no layer has rates")
    return found


def _examined(case: Case, length: int, trained: int | None) -> Examined:
    assert case.patient is not None
    wanted, stated, unreadable = {}, {}, None
    if isinstance(case.patient, HFPatient):
        text = case.patient.config.get_text_config()
        layer_types = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
        try:
            wanted = _by_layer(Written(case.patient.config.to_dict()), layer_types)
            assert case.written is not None
            stated = _by_layer(case.written, layer_types)
        except ValueError as error:
            unreadable = first_line(error)
    else:
        assert isinstance(case.patient, OwnPatient)
        for layer, encoding in case.patient.encodings():
            if isinstance(encoding, Spectral):
                wanted[layer] = stated[layer] = Wanted(
                    encoding.frequencies, encoding.channels // encoding.axes
                )
    return Examined(case.patient, wanted, stated, unreadable, length, trained)


def _by_layer(written: Written, layer_types: Sequence[str | None]) -> dict[int, Wanted]:
    """What a config asks of each layer that turns."""
    settings, width = written.settings(), written.head_dim
    if width is None:
        raise ValueError("the config says no head width")
    each = [settings[None] if None in settings else settings.get(layer_type) for layer_type in layer_types]
    return {
        layer: Wanted(one.frequencies, one.channels(width))
        for layer, one in enumerate(each)
        if one is not None
    }


@torch.no_grad()
def _of_model(examined: Examined, notes: _Notes, progress: Progress, stop: Callable[[], bool]) -> str | None:
    """The checks that need weights; what was left out when asked to stop."""
    bar = progress.add_task("checks of the weights", total=len(MODEL_CHECKS))
    as_told = True
    for done, (name, check) in enumerate(MODEL_CHECKS.items()):
        if stop():
            left = list(MODEL_CHECKS)[done:]
            for other in left:
                notes.skip(other, "interrupted")
            return f"interrupted before {', '.join(left)}"
        if name in NEEDS_RATES and not as_told:
            notes.skip(name, "the rates are not the config's")
        else:
            passed = notes.add(name, partial(check, examined))
            as_told = passed if name == "rates" else as_told
        progress.advance(bar)
    return None
