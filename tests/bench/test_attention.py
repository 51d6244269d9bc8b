"""What `phasewise bench attention` records when one of the implementations fails; what it measures needs a GPU."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.bench import attention, decode, visits
from phasewise.bench.subjects import Subject, later
from phasewise.encodings import NoPE


@pytest.fixture
def pretended(monkeypatch):
    """A GPU that is not there, processes that are this one, and three implementations, of which two fail."""

    def gate(subject, width):
        if subject.name == "plain b":
            raise AssertionError("out is 0.5 from the float64 reference")
        return {"out": 0.002}

    def subjects(width, length):
        def long(q, k, v):
            if length == 8192:
                raise RuntimeError("too long")
            return v

        runs = {"plain a": lambda q, k, v: v, "plain b": lambda q, k, v: v, "plain c": long}
        return [Subject(name, NoPE(), run, 64) for name, run in runs.items()]

    def measure(width, length, selection, refused):
        return [{"subject": s.name, "length": length} for s in selection.of(width, length, refused)]

    def draw(width, length, rows):
        return {name: torch.zeros(1, requires_grad=True) for name in "qkv"}, torch.ones(1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(visits, "forget_sizes", lambda: None)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_: None)
    monkeypatch.setattr(visits, "outcomes", lambda work, tasks, **_: ((task, work(task)) for task in tasks))
    monkeypatch.setattr(attention, "keep_kernels", lambda: None)
    monkeypatch.setattr(attention, "NOTES", {"plain a": "a is ours", "plain b": "b is not"})
    for module, name, stub in (
        (visits, "subjects", subjects), (attention, "subjects", subjects), (visits, "gate", gate),
        (visits, "draw", draw), (attention, "measure", measure), (attention, "_line", str),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, stub)


def test_an_implementation_that_fails_costs_no_other_its_times(pretended, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert attention.main(["--out", str(path), "--widths", "64", "--lengths", "2048", "8192"]) == 1
    document = json.loads(path.read_text())
    assert document["recipe"]["note"] == "a is ours"
    values = document["values"]
    found = [(row["length"], row["subject"]) for row in values["times"]]
    assert found == [(2048, "plain a"), (2048, "plain c"), (8192, "plain a")]
    assert values["refused"] == {
        "plain b 64": "AssertionError: out is 0.5 from the float64 reference",
        "plain c 64 8192": "RuntimeError: too long",
    }
    assert "plain b 64" in capsys.readouterr().err


def test_nothing_is_recorded_when_nothing_passes_the_gate(pretended, tmp_path):
    path = tmp_path / "found.json"
    with pytest.raises(ValueError, match=r"no implementation passed.*plain b 64: AssertionError: out is 0.5"):
        attention.main(["--out", str(path), "--widths", "64", "--only", "plain b"])
    assert not path.exists()


@pytest.mark.parametrize(
    ("main", "options", "message"),
    [
        (attention.main, ["--only", "rope", "flesh"], "'flesh' in its name; there are rope flash"),
        (attention.main, ["--widths", "64", "-3"], "even numbers from 2 to 256, not -3"),
        (attention.main, ["--widths", "300"], "even numbers from 2 to 256, not 300"),
        (attention.main, ["--lengths", "2048", "0"], "lengths must be from 1 to the 32768 .*, not 0"),
        (decode.main, ["--widths", "65"], "even numbers from 2 to 256, not 65"),
        (decode.main, ["--keys", "4096", "-1"], "16 keys or more, not -1"),
    ],
)
def test_what_cannot_be_measured_is_named_before_anything_is_tuned(
    main, options, message, monkeypatch, tmp_path
):
    def subjects(width, length):
        return [Subject("rope flash", NoPE(), lambda q, k, v: v, width)]

    def tune(*_, **__):
        raise AssertionError("tuned")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention, "subjects", subjects)
    for module in (attention, decode):
        monkeypatch.setattr(module, "keep_kernels", lambda: None)
        monkeypatch.setattr(module, "tune", tune)
    with pytest.raises(ValueError, match=message):
        main(["--out", str(tmp_path / "found.json"), *options, "--tune", "rope"])


def test_an_implementation_that_cannot_be_made_fails_when_it_is_called():
    def make():
        raise ImportError("another version of it")

    run = later(make)
    with pytest.raises(ImportError, match="another version"):
        run(*torch.zeros(3, 1))
