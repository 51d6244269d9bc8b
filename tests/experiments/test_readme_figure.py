"""The README's table says what the recorded report says, and stands between its markers."""

import pytest

from experiments.readme_figure import MARKER, encodings_table, with_table


def report(*, seeds):
    def measurement(length, loss):
        return {
            "length": length,
            "stride": length // 2,
            "windows": 4,
            "tokens": 500,
            "loss": loss,
            "perplexity": None,
            "bits": loss,
            "accuracy": 0.5,
            "by_position": [],
        }

    def run(seed, first):
        return {
            "seed": seed,
            "parameters": 10,
            "frozen_phases": None,
            "train_loss": 1.0,
            "train_seconds": 1.0,
            "evaluate_seconds": 1.0,
            "measurements": [measurement(8, first), measurement(16, first + 1)],
        }

    def row(encoding, scaling, first):
        runs = [run(seed, first + 0.2 * place) for place, seed in enumerate(seeds)]
        return {"encoding": encoding, "scaling": scaling, "runs": runs}

    corpus = {
        "name": "letters",
        "source": "us",
        "licence": "none",
        "unit": "byte",
        "vocab_size": 3,
        "sha256": "0",
        "bytes_per_token": 1.0,
    }
    values = {
        "corpus": corpus,
        "split": "test",
        "context": 8,
        "trained_tokens": 1234,
        "answers_only": False,
        "seconds": 12.0,
        "rows": [row("rope", None, 2.0), row("rope", "yarn", 2.5), row("pope", None, 1.5)],
    }
    recipe = {"seeds": list(seeds)}
    return {"values": values, "recipe": recipe, "commit": "abcdef0123456", "device": "a CPU"}


def test_table_has_each_rows_losses_by_length():
    lines = encodings_table(report(seeds=[0])).splitlines()
    assert "8 (1x) | 16 (2x)" in lines[0]
    assert [line.split("|")[1].strip() for line in lines[2:5]] == ["rope", "rope + yarn", "pope"]
    assert [line.split("|")[-3:-1] for line in lines[2:5]] == [
        [" 2.000 ", " 3.000 "],
        [" 2.500 ", " 3.500 "],
        [" 1.500 ", " 2.500 "],
    ]
    assert "1,234 tokens of training at length 8, seed 0" in lines[-1]
    assert "abcdef0123" in lines[-1]


def test_table_of_several_seeds_gives_mean_and_spread():
    table = encodings_table(report(seeds=[0, 1]))
    assert "2.100 ± 0.141" in table
    assert "seeds 0, 1 (mean ± standard deviation)" in table


def test_table_replaces_the_one_between_the_markers():
    start, end = f"<!-- table:{MARKER} -->", f"<!-- /table:{MARKER} -->"
    page = f"before\n{start}\nold\n{end}\nafter\n"
    assert with_table(page, "new", MARKER) == f"before\n{start}\nnew\n{end}\nafter\n"
    with pytest.raises(ValueError, match="no <!-- table:encodings -->"):
        with_table("no markers", "new", MARKER)
