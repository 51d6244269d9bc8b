import json
import os
import resource
import signal

import pytest
import torch

from phasewise.cli import main
from phasewise.encodings import NoPEConfig, PoPEConfig, RoPEConfig
from phasewise.lens import report
from phasewise.lens.inspect import Inspection, inspect
from phasewise.model import ModelConfig, Transformer
from phasewise.model import folder as own
from phasewise.model.reading import TransformerReader

pytest.importorskip("plotly", reason="reports need plotly")
pytest.importorskip("safetensors", reason="models on disk need safetensors")

QUICK = ["--tokens", "256", "--context", "64", "--device", "cpu"]


def save(folder, encoding=None, **changes):
    torch.manual_seed(0)
    encoding = encoding or (RoPEConfig(), PoPEConfig())
    config = {"vocab_size": 256, "width": 32, "layers": 2, "heads": 2, "encoding": encoding, **changes}
    own.save(Transformer(ModelConfig(**config)), folder)
    return str(folder)


def run(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.fixture
def model(tmp_path):
    return save(tmp_path / "model")


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without their figures, for what does not ask about these."""
    monkeypatch.setattr(report, "draw", lambda *_: None)


def test_inspect_prints_a_line_a_layer_and_writes_the_report(capsys, tmp_path):
    out = tmp_path / "report"
    options = ["--trained-length", "128", "--length", "1024", "--out", out]
    code, said, _ = run(capsys, save(tmp_path / "model"), *QUICK, *options)
    assert code == 0
    for wanted in ("theta_eff", "trained length: 128 tokens", "report.html", "figure-layers.svg"):
        assert wanted in said
    values = json.loads((out / "report.json").read_text())["values"]
    assert [layer.kind for layer in Inspection.model_validate(values).layers] == ["rope", "pope"]


def test_json_is_the_one_thing_on_stdout_with_or_without_a_folder(capsys, tmp_path, undrawn):
    model = save(tmp_path / "model")
    code, alone, _ = run(capsys, model, *QUICK, "--json")
    assert code == 0
    _, beside, _ = run(capsys, model, *QUICK, "--json", "--out", tmp_path / "report")
    assert json.loads(alone)["values"] == json.loads(beside)["values"]
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert written["values"] == json.loads(beside)["values"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no folder nowhere"),
        (["MODEL", "--data", "austin"], "no corpus 'austin'"),
        (["SMALL"], "256 tokens and the model knows 200"),
        (["MODEL", "--context", "1000000"], "a context of 1000000 needs a document as long"),
        (["MODEL", "--split", "dev"], "no split 'dev'"),
        (["MODEL", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["MODEL", "--device", "toaster"], "device 'toaster' cannot be used here"),
        (["MODEL", "--device", "meta"], "device 'meta' cannot be used here"),
        (["MODEL", "--length", str(10**23)], "wanted_length must be at least 1 and at most 1000000000000"),
        (["MODEL", "--trained-length", str(10**23)], "trained_length must be at least 1 and at most"),
        (["MODEL", "--trained-length", "0"], "trained_length must be at least 1"),
        (["MODEL", "--tokens", "1"], "tokens must be at least 2"),
        (["MODEL", "--tokenizer", ""], "no tokenizer ''; give"),
        (["NOPE"], "no frequencies and no phases (nope)"),
        (["MODEL", "--out", "MODEL"], "already exists: choose another folder"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys, tmp_path, arguments, said):
    folders = {
        "MODEL": save(tmp_path / "model"),
        "NOPE": save(tmp_path / "nope", NoPEConfig()),
        "SMALL": save(tmp_path / "small", vocab_size=200),
    }
    arguments = [folders.get(argument, argument) for argument in arguments]
    code, out, err = run(capsys, *arguments, *([] if "--tokens" in arguments else ["--tokens", "256"]))
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("phasewise: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_scheduler_keep_what_was_read_marked_partial(
    capsys, monkeypatch, tmp_path, undrawn, number
):
    def read_and_told(*arguments):
        read(*arguments)
        signal.raise_signal(number)

    read = TransformerReader.read
    monkeypatch.setattr(TransformerReader, "read", read_and_told)
    out = tmp_path / "report"
    code, _, err = run(capsys, save(tmp_path / "model"), *QUICK, "--out", out)
    assert code == 130
    assert "phasewise: interrupted after 1 of 4 rows" in err
    values = json.loads((out / "report.json").read_text())["values"]
    assert (values["partial"], values["tokens"]) == ("interrupted after 1 of 4 rows", 64)
    assert "Partial result." in (out / "report.html").read_text()


@pytest.mark.parametrize(("presses", "expected", "files"), [([2], 0, 10), ([1, 2], 130, 3)])
def test_ctrl_c_while_the_report_is_drawn_keeps_the_values(
    capsys, monkeypatch, tmp_path, presses, expected, files
):
    made = []

    def pressed(*arguments):
        made.append(arguments)
        if len(made) in presses:
            os.kill(os.getpid(), signal.SIGINT)
        draw(*arguments)

    draw = report.draw
    monkeypatch.setattr(report, "draw", pressed)
    monkeypatch.setattr("phasewise.interrupt.SAME_WISH", 0.0)
    out = tmp_path / "report"
    code, _, err = run(capsys, save(tmp_path / "model"), *QUICK, "--out", out)
    assert code == expected
    assert ("every value is in" in err) == (expected == 130)
    assert len(list(out.iterdir())) >= files
    values = json.loads((out / "report.json").read_text())["values"]
    assert Inspection.model_validate(values).partial is None


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(capsys, tmp_path):
    code, out, err = run(capsys, tmp_path / "nowhere", "--out", "/proc/report")
    assert (code, out) == (2, "")
    assert err.startswith("phasewise: /proc/report cannot be written")


@pytest.fixture
def full_disk():
    """Room for a thousand bytes a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_full_disk_does_not_take_is_printed(capsys, tmp_path, model, full_disk):
    out = tmp_path / "report"
    code, said, err = run(capsys, model, *QUICK, "--out", out)
    assert code == 1, err
    assert "theta_eff" in said
    assert "is not whole" in err
    assert err.count("\n") == 1
    assert list(out.iterdir()) == []
    _, said, _ = run(capsys, model, *QUICK, "--out", out, "--json")
    assert Inspection.model_validate(json.loads(said)["values"]).tokens == 256


def test_a_folder_that_another_command_filled_meanwhile_keeps_its_report(capsys, monkeypatch, tmp_path):
    out = tmp_path / "report"

    def measured(*arguments, **options):
        out.mkdir()
        (out / "report.json").write_text("another's")
        return inspect(*arguments, **options)

    monkeypatch.setattr("phasewise.lens.inspect.inspect", measured)
    code, said, err = run(capsys, save(tmp_path / "model"), *QUICK, "--out", out)
    assert code == 1
    assert "theta_eff" in said
    assert "already exists" in err
    assert [path.read_text() for path in out.iterdir()] == ["another's"]


def test_a_training_stands_for_the_model_in_it_by_its_own_name(capsys, tmp_path, undrawn):
    save(tmp_path / "mine" / "model")
    for number, given in enumerate((tmp_path / "mine", tmp_path / "mine" / "model")):
        out = tmp_path / f"report{number}"
        assert run(capsys, given, *QUICK, "--out", out)[0] == 0
        assert "<h1>Frequencies of mine</h1>" in (out / "report.html").read_text()


def test_a_narrow_terminal_cuts_no_number(capsys, monkeypatch, tmp_path):
    model = save(tmp_path / "model")
    _, wide, _ = run(capsys, model, *QUICK)
    monkeypatch.setenv("COLUMNS", "30")
    _, narrow, _ = run(capsys, model, *QUICK)
    assert "…" not in narrow
    assert [line for line in narrow.splitlines() if "│" in line] == [
        line for line in wide.splitlines() if "│" in line
    ]
