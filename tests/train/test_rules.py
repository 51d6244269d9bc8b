"""Ways to longer contexts, each held against its formula in rates."""

import json
import math
from functools import partial

import numpy as np
import pytest
from pydantic import TypeAdapter

from phasewise.frequencies import NTK, DynamicNTK, Explicit, Geometric, Linear, Llama3, YaRN
from phasewise.model.sight import Bound
from phasewise.train.rules import AnyWay, AsIs, Grid, Present, Search
from phasewise.train.search import search

BASE, TRAINED, LENGTH, CHANNELS, OLD = 100.0, 128, 512, 8, 64
PLAIN = BASE ** (-np.arange(CHANNELS) / CHANNELS)


def way(text):
    return TypeAdapter(AnyWay).validate_python(text)


def rates(text, now, length=LENGTH):
    return way(text).at(Present(now, TRAINED), length).rates(CHANNELS).numpy()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pi", PLAIN / 4),
        ("ntk", (BASE * 4 ** (CHANNELS / (CHANNELS - 1))) ** (-np.arange(CHANNELS) / CHANNELS)),
        ("abf:5000", 5000 ** (-np.arange(CHANNELS) / CHANNELS)),
        ("yarn", YaRN(base=BASE, factor=4, original_length=TRAINED).rates(CHANNELS).numpy()),
        ("llama3", Llama3(base=BASE, factor=4, original_length=TRAINED).rates(CHANNELS).numpy()),
    ],
)
def test_formula_gives_the_rates_of_its_source(text, expected):
    np.testing.assert_allclose(rates(text, Geometric(base=BASE)), expected, rtol=1e-12)


def test_the_computed_base_turns_its_critical_channel_as_often_in_the_new_length_as_before_in_the_old():
    critical = CHANNELS * math.log(TRAINED / (2 * math.pi)) / math.log(BASE)
    new = way("abf").at(Present(Geometric(base=BASE), TRAINED), LENGTH).base
    assert BASE ** (-critical / CHANNELS) * TRAINED == pytest.approx(2 * math.pi)
    assert new ** (-critical / CHANNELS) * LENGTH == pytest.approx(2 * math.pi)


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("pi", Linear(base=BASE, factor=2), Linear(base=BASE, factor=8)),
        ("ntk", NTK(base=BASE, factor=2), NTK(base=BASE, factor=8)),
        (
            "yarn",
            YaRN(base=BASE, factor=2, original_length=OLD, truncate=False),
            YaRN(base=BASE, factor=8, original_length=OLD, truncate=False),
        ),
        ("llama3", Llama3(base=BASE, factor=2, original_length=OLD), Llama3(base=BASE, factor=8, original_length=OLD)),
    ],
)  # fmt: skip
def test_what_was_stretched_is_stretched_on_from_its_original(text, now, expected):
    assert way(text).at(Present(now, TRAINED), LENGTH) == expected


@pytest.mark.parametrize("text", ["pi", "ntk", "yarn", "llama3", "abf"])
def test_a_rule_of_another_kind_is_refused_rather_than_replaced(text):
    now = DynamicNTK(base=BASE, factor=2, original_length=OLD)
    with pytest.raises(ValueError, match=f"rule '{text}' does not start from rates of rule 'dynamic_ntk'"):
        way(text).at(Present(now, TRAINED), LENGTH)


def test_an_encoding_without_rates_takes_no_rule_but_none():
    assert way("none").at(Present(None, TRAINED), LENGTH) is None
    with pytest.raises(ValueError, match="the encoding has none; use --rule none"):
        way("pi").at(Present(None, TRAINED), LENGTH)


@pytest.mark.parametrize("text", ["pi", "ntk", "yarn", "llama3", "abf", "longrope"])
def test_rates_that_see_no_further_than_a_window_are_left(text):
    chosen, plain = way(text), Geometric(base=BASE)
    asked = chosen.start if isinstance(chosen, Search) else partial(chosen.at, length=LENGTH)
    said = f"rule '{text}' would gain nothing beyond 128 tokens .*window of 128 tokens at most"
    with pytest.raises(ValueError, match=said):
        asked(Present(plain, TRAINED, Bound(window=TRAINED, layers=2, whole=1)))
    further = Bound(window=TRAINED + 1, layers=2, whole=1)
    assert asked(Present(plain, TRAINED, further)) == asked(Present(plain, TRAINED))
    assert AsIs().at(Present(plain, TRAINED, Bound(window=8, layers=2, whole=1)), LENGTH) is None


def test_a_grid_is_read_from_its_file(tmp_path):
    rule = Explicit(values=[0.5, 0.25])
    (tmp_path / "grid.json").write_text(rule.model_dump_json())
    read = way(f"grid:{tmp_path}/grid.json")
    assert read == Grid(frequencies=rule)
    assert way(json.loads(read.model_dump_json())) == read


def test_a_grid_is_the_best_option_of_a_report_of_advise(tmp_path):
    rule = Explicit(values=[0.5, 0.25]).model_dump(mode="json")
    options = [{"settings": {"phasewise": rule}}, {"settings": None}]
    (tmp_path / "report.json").write_text(json.dumps({"values": {"options": options}}))
    assert way(f"grid:{tmp_path}/report.json").frequencies.values == (0.5, 0.25)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid:absent.json", "no file absent.json"),
        (f"grid:{__file__}", "is not a rule, nor a report of advise with one; write one as"),
        ("dynamic", "none.*pi.*ntk.*yarn.*llama3.*abf.*grid.*longrope"),
        ("abf:0.5", "greater than 1"),
    ],
)
def test_an_unreadable_way_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        way(text)


def test_a_rule_nested_too_deeply_to_read_is_none(tmp_path):
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not a rule"):
        way(f"grid:{deep}")


def searched(path, *, stop_after=None, budget=Search(population=5, generations=3, children=4)):  # noqa: B008
    """A search whose loss is the distance to known divisors."""
    wanted, calls = np.linspace(1, 3, CHANNELS), 0

    def loss_of(rule):
        nonlocal calls
        if calls == stop_after:
            raise KeyboardInterrupt
        calls += 1
        assert rule.original_length == TRAINED
        assert rule.factor == LENGTH / TRAINED
        return float(np.abs(np.array(rule.long_factor) - wanted).sum())

    found = search(
        budget, Present(Geometric(base=BASE), TRAINED), LENGTH, channels=CHANNELS, loss_of=loss_of, seed=3, path=path
    )  # fmt: skip
    return *found, calls


def test_search_keeps_its_budget_improves_on_what_is_published_and_never_falls(tmp_path):
    rule, tried, calls = searched(tmp_path / "search.json")
    assert calls == len(tried) == 5 + 3 * 4
    assert min(c.loss for c in tried) < min(c.loss for c in tried[:3])
    assert rule.long_factor == min(tried, key=lambda c: c.loss).divisors
    for candidate in tried:
        assert list(candidate.divisors) == sorted(candidate.divisors)
        assert 1 <= candidate.divisors[0] <= candidate.divisors[-1] <= 1.25 * LENGTH / TRAINED
    np.testing.assert_allclose(tried[0].divisors, 4.0)


def test_a_stopped_search_ends_as_an_unstopped_one(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "search.json", stop_after=9)
    rule, tried, calls = searched(tmp_path / "search.json")
    assert calls == 17 - 9
    assert (rule, tried) == searched(tmp_path / "whole.json")[:2]


def test_the_record_of_another_search_is_refused(tmp_path):
    searched(tmp_path / "search.json")
    record = json.loads((tmp_path / "search.json").read_text())
    record[1]["divisors"][0] += 0.5
    (tmp_path / "search.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="is of another search: delete it to search again"):
        searched(tmp_path / "search.json")


def test_the_way_that_keeps_rates_says_so():
    assert way("none") == AsIs()
