"""The GPU record goes stale when what runs on the GPU changes, and only then."""

import json
import shutil

from tests.gpu_record import ROOT, age, sources_hash


def recorded(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "test-gpu.json"
    values = {"sources_sha256": sources_hash(tmp_path), "passed": 1}
    document = {"values": values, "device": "a GPU", "commit": "0" * 40, "date": "2026-01-01"}
    path.write_text(json.dumps(document))
    return path


def test_record_of_the_same_sources_is_current(tmp_path):
    path = recorded(tmp_path)
    (tmp_path / "src/phasewise/positions.py").write_text("changed = True\n")
    assert "current" in age(path, tmp_path)


def test_record_is_stale_after_a_kernel_or_the_choice_of_one_changes(tmp_path):
    path = recorded(tmp_path)
    (tmp_path / "src/phasewise/kernels/new.json").write_text("{}")
    assert "STALE" in age(path, tmp_path)
    (tmp_path / "src/phasewise/kernels/new.json").unlink()
    (tmp_path / "src/phasewise/attention.py").write_text("changed = True\n")
    assert "STALE" in age(path, tmp_path)


def test_absent_record_is_said_to_be_absent(tmp_path):
    assert "none yet" in age(tmp_path / "test-gpu.json", tmp_path)


def test_record_names_the_tests_that_failed(tmp_path):
    path = recorded(tmp_path)
    assert "FAILED" not in age(path, tmp_path)
    document = json.loads(path.read_text())
    document["values"]["failures"] = ["tests/kernels/test_x.py::test_y"]
    path.write_text(json.dumps(document))
    assert "FAILED: tests/kernels/test_x.py::test_y" in age(path, tmp_path)
