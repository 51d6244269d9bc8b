"""Thresholds are fitted on one half of the pairs, and what is reported is counted right."""

import json

import numpy as np
import pytest

from experiments.validate_interpolation import BLOCKS, addition_pairs, letter_pairs
from experiments.validation_tables import RESULT, calibrates, confusion, fingerprint, fitted, line


def test_every_pair_has_a_name_of_its_own_and_about_half_calibrate() -> None:
    names = [pair.name for pair in letter_pairs(BLOCKS) + addition_pairs()]
    assert len(set(names)) == len(names) >= 12
    assert abs(np.mean([calibrates(name) for name in names]) - 0.5) < 0.1


def test_recorded_predictions_are_those_that_were_written_before_measuring() -> None:
    values = json.loads(RESULT.read_text())["values"]
    files = list(RESULT.parent.glob("*-predictions.json"))
    assert {file.name.removesuffix("-predictions.json") for file in files} == set(values["hashes"])
    for file in files:
        said, held = (
            json.loads(file.read_text()),
            values["hashes"][file.name.removesuffix("-predictions.json")],
        )
        assert fingerprint(said["predictions"]) == said["sha256"] == held["sha256"]
        assert said["written"] == held["predicted"] < held["measured"]


def test_a_threshold_is_where_most_are_right() -> None:
    threshold, right = fitted([0.1, 0.3, 0.2, 0.5, 0.6], [True, False, True, False, True])
    assert threshold == pytest.approx(0.25)
    assert right == pytest.approx(4 / 5)


def test_the_interval_of_a_slope_holds_it_in_95_of_100_draws() -> None:
    random = np.random.default_rng(0)
    block = np.repeat([4, 8, 16, 32, 64], 3)
    draws = 2 / np.sqrt(block) * np.exp(0.1 * random.standard_normal((400, 15)))
    found = [line(block, drawn) for drawn in draws]
    inside = np.mean([abs(slope + 0.5) < half for _, slope, half in found])
    assert 0.92 < inside < 0.98
    expected = 2 * np.exp(0.5 * np.log(block).mean())
    assert np.mean([constant for constant, _, _ in found]) == pytest.approx(expected, rel=0.01)


def test_a_confusion_counts_what_worked_and_what_failed_of_each_prediction() -> None:
    pairs = [
        {"said": said, "measured": measured}
        for said, measured in [("works", "works"), ("works", "fails"), ("works", "works"), ("fails", "fails")]
    ]
    assert confusion(pairs, "said") == {"works": (2, 1), "fails": (0, 1), "undecided": (0, 0)}
