import json
import math
import shutil

import pytest
import torch

from phasewise.cli import main
from phasewise.encodings import NoPEConfig, RoPEConfig
from phasewise.lens.doctor.diagnosis import Diagnosis
from phasewise.lens.doctor.examine import doctor
from phasewise.model import folder as own
from tests.hf.folders import change_config
from tests.model.small import model_of

pytest.importorskip("transformers", reason="examining checkpoints needs transformers")
pytest.importorskip("plotly", reason="reports need plotly")


def run(capsys, *arguments):
    code = main(["doctor", *map(str, arguments), "--device", "cpu"])
    return code, *capsys.readouterr()


def test_healthy_checkpoint_exits_with_0_and_says_what_passed(capsys, llama):
    code, said, _ = run(capsys, llama)
    said = " ".join(said.split())  # lines end where the folder's name lets them
    assert code == 0
    assert "0 wrong, 0 warnings" in said
    assert "passed: phases (at most" in said


def test_broken_config_exits_with_1_and_shows_numbers_and_remedy(capsys, copy):
    change_config(copy, rope_parameters={"rope_theta": 1e4, "factor": 4.0})
    code, said, _ = run(capsys, copy / "config.json")
    assert code == 1
    for wanted in ("wrong", "factor: 4", "Remedy:", "needs the weights"):
        assert wanted in said


def test_json_is_the_one_thing_on_stdout_and_equals_the_function(capsys, llama):
    code, said, _ = run(capsys, llama, "--json", "--length", "128")
    assert code == 0
    assert Diagnosis.model_validate(json.loads(said)["values"]) == doctor(llama, length=128)


def test_report_holds_the_values_first_and_a_page(capsys, copy, tmp_path):
    change_config(copy, rope_parameters={"rope_theta": 1e4, "factor": 4.0})
    out = tmp_path / "report"
    code, said, _ = run(capsys, copy, "--out", out)
    assert code == 1
    assert "report.html" in said
    values = json.loads((out / "report.json").read_text())["values"]
    assert Diagnosis.model_validate(values).wrong
    assert "names no rule" in (out / "report.html").read_text()
    code, _, error = run(capsys, copy, "--out", out)
    assert (code, "choose another folder" in error) == (2, True)


def test_fix_writes_another_config_and_says_what_it_left(capsys, copy, tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0, "original_max_position_embeddings": 64}
    change_config(copy, rope_parameters=rope)
    before = (copy / "config.json").read_bytes()
    code, said, _ = run(capsys, copy / "config.json", "--fix", tmp_path / "fixed")
    assert code == 1
    assert "changed: rope_theta = 500000.0 (base)" in said
    assert "left alone: factor" in said
    assert json.loads((tmp_path / "fixed" / "config.json").read_text())["rope_theta"] == 5e5
    assert (copy / "config.json").read_bytes() == before
    code, _, error = run(capsys, copy, "--fix", copy)
    assert (code, "never changed in place" in error) == (2, True)


def test_checkpoint_of_this_library_is_examined_and_has_nothing_to_fix(capsys, tmp_path):
    own.save(model_of(RoPEConfig(), dtype=torch.float32), tmp_path / "model")
    code, said, _ = run(capsys, tmp_path / "model", "--trained-length", 512, "--length", 4096)
    assert code == 0
    assert "frequencies beyond" in said
    code, said, _ = run(capsys, tmp_path / "model" / "config.json", "--trained-length", 512)
    assert code == 0
    assert run(capsys, tmp_path / "model", "--fix", tmp_path / "fixed.json")[0] == 2


def test_model_without_rotary_positions_of_this_library_has_nothing_wrong(capsys, tmp_path):
    own.save(model_of(NoPEConfig(), dtype=torch.float32), tmp_path / "model")
    code, said, _ = run(capsys, tmp_path / "model")
    assert code == 0
    assert "no layer has rates" in said


def broken_json(folder):
    (folder / "config.json").write_text("{")


def nan_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def missing_tensor(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (broken_json, "is not JSON"),
        (nan_weights, "is not finite"),
        (missing_tensor, "1 tensors missing"),
        (lambda folder: change_config(folder, model_type="martian"), "model_type 'martian'"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config.json"),
        (shutil.rmtree, "no file or folder"),
    ],
)
def test_broken_checkpoint_is_one_line_and_exit_code_2(capsys, copy, damage, said):
    damage(copy)
    code, out, error = run(capsys, copy)
    assert (code, out) == (2, "")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--length", "1"], "length must be at least 2"),
        (["--trained-length", "64"], "leave trained_length out"),
    ],
)
def test_option_that_does_not_apply_is_exit_code_2(capsys, llama, options, said):
    code, _, error = run(capsys, llama, *options)
    assert (code, said in error) == (2, True)
