"""What `phasewise bench attention` records when one of the implementations fails; what it measures needs a GPU."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.bench import attention
from phasewise.bench.subjects import Subject, later
from phasewise.encodings import NoPE


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning"
)  # torch's own, as its compiler is imported
def test_an_implementation_that_fails_the_gate_costs_no_other_its_times(monkeypatch, tmp_path, capsys):
    right, wrong = (Subject(name, NoPE(), lambda q, k, v: v, 64) for name in ("plain a", "plain b"))

    def gate(subject, width):
        if subject is wrong:
            raise AssertionError("out is 0.5 from the float64 reference")
        return {"out": 0.002}

    def measure(width, length, selection, refused):
        return [
            {"subject": s.name} for s in selection.of(width, length) if f"{s.name} {width}" not in refused
        ]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    for name, stub in (
        ("subjects", lambda *_: [right, wrong]),
        ("gate", gate),
        ("measure", measure),
        ("_line", str),
    ):
        monkeypatch.setattr(attention, name, stub)
    path = tmp_path / "found.json"
    assert attention.main(["--out", str(path), "--widths", "64", "--lengths", "2048"]) == 1
    values = json.loads(path.read_text())["values"]
    assert [row["subject"] for row in values["times"]] == ["plain a"]
    assert values["refused"] == {"plain b 64": "AssertionError: out is 0.5 from the float64 reference"}
    assert "plain b 64" in capsys.readouterr().err


def test_a_part_of_no_implementations_name_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        attention, "subjects", lambda *_: [Subject("rope flash", NoPE(), lambda q, k, v: v, 64)]
    )
    with pytest.raises(ValueError, match=r"'flesh' in its name; there are rope flash"):
        attention.main(["--out", str(tmp_path / "found.json"), "--only", "rope", "flesh"])


def test_an_implementation_that_cannot_be_made_fails_when_it_is_called():
    def make():
        raise ImportError("another version of it")

    run = later(make)
    with pytest.raises(ImportError, match="another version"):
        run(*torch.zeros(3, 1))
