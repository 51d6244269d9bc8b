"""The tables of docs/small-models.md say what the records say."""

from experiments.small_models_page import chorales, speed

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
