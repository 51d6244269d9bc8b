import json

import pytest

from phasewise.bench import cpu
from phasewise.cli import main as cli


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cpu, "LENGTH", 300)
    monkeypatch.setattr(cpu, "PAIRS", 3)
    monkeypatch.setattr(cpu, "MEMORY_LENGTHS", (1024, 2048))


@pytest.mark.usefixtures("small")
def test_the_command_writes_both_records_with_their_recipes(tmp_path):
    assert cli(["bench", "cpu", "--out", str(tmp_path)]) == 0
    times = json.loads((tmp_path / "attention.json").read_text())
    assert set(times["values"]) >= {"pope_forward", "pope_forward_backward", "nope_forward"}
    assert times["recipe"]["length"] == 300
    low, high = times["values"]["pope_forward"]["ratio_quartiles"]
    assert 0 < low <= times["values"]["pope_forward"]["ratio_median"] <= high
    memory = json.loads((tmp_path / "reference-memory.json").read_text())
    assert set(memory["values"]["peak_mebibytes"]) == {"1024", "2048"}


@pytest.mark.usefixtures("small")
def test_a_wrong_output_is_not_timed(monkeypatch):
    exact = cpu.attention

    def wrong(*arguments, impl):
        out = exact(*arguments, impl=impl)
        return out + 1e-3 if impl == "sdpa" else out

    monkeypatch.setattr(cpu, "attention", wrong)
    with pytest.raises(RuntimeError, match="not timed"):
        cpu.attention_times()
