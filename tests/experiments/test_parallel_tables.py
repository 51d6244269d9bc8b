"""The tables of several GPUs say what the records say."""

import pytest

from experiments.killed import compared
from experiments.parallel_tables import context_table, efficiency, killed_table, training_table


def document(values, processes, **recipe):
    return {
        "values": values,
        "recipe": {"NCCL_NVLS_ENABLE": "0", "all_reduce_gb_per_second": 300.0 + processes, **recipe},
        "device": "a GPU",
        "versions": {"torch": "2.0"},
        "commit": "0123456789abcdef",
        "date": "2026-01-01T00:00:00+00:00",
    }


def trained(sharding, processes, speed):
    return {
        "case": {"size": "124M", "sharding": sharding, "processes": processes, "rows": 8},
        "tokens_per_second": speed,
        "mfu": 0.4,
        "ms_per_step": {"median": 10.0, "low": 9.0, "high": 11.0},
        "peak_gib": 3.0,
    }


def shared(processes, speed, losses):
    return {
        "case": {"encoding": "rope", "length": 64, "processes": processes, "recompute": True},
        "losses": losses,
        "gradient_norms": [1.0, 1.0],
        "tokens_per_second": speed,
        "exchange_seconds": 0.1 * 64 / speed,
        "peak_gib": 3.0,
    }


def cells(table, number):
    return [cell.strip() for cell in table.splitlines()[2 + number].strip("|").split("|")]


def test_efficiency_is_the_share_of_as_many_that_lose_nothing():
    one, four = trained("replicated", 1, 100.0), trained("sharded", 4, 360.0)
    assert efficiency(four, one) == pytest.approx(0.9)
    assert efficiency(four, None) is None
    assert efficiency({"case": four["case"], "failed": "why"}, one) is None


def test_sharded_training_is_held_against_one_gpu_too():
    recipe = {"context": 16, "samples": 5, "steps": 6}
    several = [trained("replicated", 2, 190.0), trained("sharded", 2, 180.0)]
    table = training_table(
        [document([trained("replicated", 1, 100.0)], 1, **recipe), document(several, 2, **recipe)]
    )
    assert [cells(table, number)[7] for number in range(3)] == ["100.0%", "95.0%", "90.0%"]
    assert "301 to 302 GB/s" in table


def test_shared_rows_show_how_far_their_losses_are_from_one_gpus():
    recipe = {"model": {"layers": 1, "width": 8, "heads": 2}, "timed": 1, "warm_up": 1}
    fits_not = {"case": {**shared(1, 1.0, [])["case"], "length": 128}, "out_of_memory": True}
    one = document([shared(1, 100.0, [2.0, 4.0]), fits_not], 1, **recipe)
    table = context_table([one, document([shared(2, 150.0, [2.0, 4.004])], 2, **recipe)])
    assert cells(table, 1)[3:] == ["150", "75.0%", "10.0%", "3.0 GiB", "0e+00", "0e+00", "1e-03"]
    assert cells(table, 2)[3] == "does not fit"


def test_an_encoding_that_was_measured_again_is_shown_from_that_commit_alone():
    recipe = {"model": {"layers": 1, "width": 8, "heads": 2}, "timed": 1, "warm_up": 1}
    other = shared(1, 80.0, [2.0, 4.0])
    other["case"] = {**other["case"], "encoding": "tapa"}
    early = document([shared(1, 100.0, [2.0, 4.0]), other], 1, **recipe)
    again = {**document([shared(1, 120.0, [2.0, 4.0])], 1, **recipe), "commit": "fedcba98765432"}
    table = context_table([{**again, "date": "2026-01-02T00:00:00+00:00"}, early])
    assert [cells(table, row)[1:4] for row in (0, 1)] == [["rope", "1", "120"], ["tapa", "1", "80"]]
    assert "commit 0123456789 and fedcba9876" in table


def test_resumed_losses_are_held_against_both_runs():
    found = compared([4.0, 2.0, 1.0], [4.0, 2.002], [4.0, 2.0, 1.01])
    row = {"setting": "float32", "killed_in": 2, "resumed_in": 1, **found}
    assert cells(killed_table(document([row], 2)), 0)[3:] == ["1e-03 (2 steps)", "1e-02 (3 steps)"]
