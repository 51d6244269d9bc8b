"""The tables of docs/small-models.md say what the records say."""

from experiments.small_models_page import chorales, indexing, speed

RUN = {"commit": "abcdef0123456", "device": "a GPU", "versions": {"torch": "2.11"}}


def test_chorales_give_every_seed_the_difference_and_its_interval():
    difference = {"seeds": [-0.02, -0.01], "mean": -0.015, "interval_95": [-0.025, -0.005]}
    test = {"rope": {"mean": 0.51, "seeds": [0.52, 0.5]}, "pope": {"mean": 0.495, "seeds": [0.5, 0.49]}}
    paper = {"rope": 0.5081, "pope": 0.4889}
    values = {"steps": 2500, "test": test, "pope_less_rope": difference, "paper": paper}
    lines = chorales({"values": values, **RUN}).splitlines()
    assert lines[2] == "| RoPE | 0.5200 | 0.5000 | 0.5100 | 0.5081 |"
    assert lines[4] == "| PoPE less RoPE | -0.0200 | -0.0100 | -0.0150 | -0.0192 |"
    assert "difference: -0.0250 to -0.0050. 2500 steps." in lines[-1]


def test_speeds_are_given_over_the_ordinary_loop():
    values = {"pope, side by side, 1 model": {"model_steps_per_second": 400.0}}
    values["pope, ordinary loop"] = {"model_steps_per_second": 80.0}
    lines = speed({"values": values, **RUN}).splitlines()
    assert lines[2] == "| pope, side by side, 1 model | 400 | 2.50 | 5.0 |"
    assert lines[-1].endswith("commit abcdef0123, a GPU, torch 2.11.")


def test_indexing_gives_every_seed_of_every_variant_beside_the_paper():
    test = {"mean": 0.75, "seeds": [1.0, 0.5]}
    found = {"test_accuracy": test, "solved": 1, "paper": {"mean": 94.82, "spread": 2.91}}
    found["seeds"] = [{"seed": 0}, {"seed": 1}]
    document = {"values": {"pope": found}, "recipe": {"variant": "steady"}, **RUN}
    lines = indexing({"h200": document}).splitlines()
    assert lines[2] == "| PoPE, steady | 100.00 | 50.00 |  | 75.00 | 1 of 2 | 94.82 ± 2.91 |"
    assert "Solved: at least 90%" in lines[-1]
    assert "h200.json`: commit abcdef0123" in lines[-1]


def test_a_seed_stands_in_its_own_column_where_one_before_it_is_missing():
    found = {"test_accuracy": {"seeds": [1.0, 0.5]}, "solved": 1, "paper": {"mean": 94.82, "spread": 2.91}}
    found["seeds"] = [{"seed": 0}, {"seed": 2}]
    document = {"values": {"pope": found}, "recipe": {"variant": "steady"}, **RUN}
    lines = indexing({"h200": document}).splitlines()
    assert lines[2].startswith("| PoPE, steady | 100.00 |  | 50.00 | 75.00 |")
