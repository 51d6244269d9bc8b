"""Indirect Indexing: every example has the answer its question asks for, and is always the same."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from phasewise.data import NOT_SCORED, batch, load, windows

FORM = re.compile(r"([A-Za-z]{20,40}),([A-Za-z]),([+-])(\d\d),([A-Za-z])")


@pytest.fixture(scope="module")
def corpus():
    return load("indirect-indexing")


def parsed(text: str) -> tuple[str, str, int, str]:
    match = FORM.fullmatch(text)
    assert match, text
    string, letter, sign, digits, answer = match.groups()
    return string, letter, int(sign + digits), answer


def test_the_answer_is_the_letter_at_the_asked_offset(corpus) -> None:
    for split in corpus.splits.values():
        for example in split.take(np.arange(len(split) - 2000, len(split))):
            string, letter, shift, answer = parsed(corpus.decode(example))
            assert len(set(string)) == len(string)
            assert -15 <= shift <= 15
            place = string.index(letter) + shift
            assert 0 <= place < len(string)
            assert string[place] == answer


def test_lengths_letters_places_and_shifts_have_the_distribution_of_the_task(corpus) -> None:
    examples = [parsed(corpus.decode(example)) for example in corpus.splits["train"].take(np.arange(40_000))]
    lengths = np.bincount([len(string) for string, *_ in examples], minlength=41)[20:]
    assert lengths.sum() == 40_000
    assert np.abs(lengths / 40_000 - 1 / 21).max() < 0.005
    firsts = np.unique([string[0] for string, *_ in examples], return_counts=True)[1]
    assert len(firsts) == 52
    assert np.abs(firsts / 40_000 - 1 / 52).max() < 0.004

    random = np.random.default_rng(0)
    expected = np.zeros(31)
    for _ in range(40_000):
        length = random.integers(20, 41)
        place = random.integers(length)
        shift = random.integers(-15, 16)
        while not 0 <= place + shift < length:
            shift = random.integers(-15, 16)
        expected[shift + 15] += 1
    shifts = np.bincount([shift + 15 for _, _, shift, _ in examples], minlength=31)
    assert np.abs(shifts - expected).max() / 40_000 < 0.006
    relative = np.array([string.index(letter) / (len(string) - 1) for string, letter, *_ in examples])
    assert abs(relative.mean() - 0.5) < 0.01


def test_the_paper_s_sizes_and_alphabet(corpus) -> None:
    sizes = {name: len(split) for name, split in corpus.splits.items()}
    assert sizes == {"train": 1_000_000, "validation": 10_000, "test": 10_000}
    assert corpus.vocab_size == 52 + 10 + 3 + 1
    assert corpus.task.row_length == 50


def test_an_example_depends_on_its_split_and_index_alone(corpus) -> None:
    train = corpus.splits["train"]
    picked = train.take(np.array([999_999, 5, 123_456]))
    for index, example in zip((999_999, 5, 123_456), picked, strict=True):
        assert np.array_equal(train[index], example)
    assert np.array_equal(train[-1], picked[0])
    assert corpus.decode(train[0]) == "nQNKmgJfoyewUibPkhEXDVxjGRHvCrzWBMO,K,+12,P"
    with pytest.raises(IndexError, match="document 1000000 of 1000000"):
        train[1_000_000]


def test_no_string_stands_in_two_splits(corpus) -> None:
    strings = [
        {corpus.decode(example).partition(",")[0] for example in split.take(np.arange(10_000))}
        for split in corpus.splits.values()
    ]
    assert len(set.union(*strings)) == 30_000


def test_lengths_are_those_of_the_examples(corpus) -> None:
    split = corpus.splits["validation"]
    assert split.lengths.tolist() == [len(example) for example in split.take(np.arange(len(split)))]


def test_loading_makes_no_more_than_a_few_examples() -> None:
    start = time.process_time()
    load("indirect-indexing")
    assert time.process_time() - start < 2.0


def test_a_batch_is_padded_to_fifty_and_scores_the_answer_alone(corpus) -> None:
    drawn = batch(corpus, "train", step=0, context=50, batch_size=64, seed=0)
    assert drawn.tokens.shape == (64, 50)
    assert drawn.scored == 64
    assert drawn.positions is not None
    for tokens, targets, segment in zip(drawn.tokens, drawn.targets, drawn.positions.segment, strict=True):
        length = int((segment == 0).sum())
        assert segment.tolist() == [0] * length + [-1] * (50 - length)
        assert torch_equal_places(targets, length)
        question = corpus.decode(tokens[:length].numpy())
        assert question.endswith(",")
        string, letter, shift, answer = parsed(question + corpus.decode(targets[length - 1 : length].numpy()))
        assert string[string.index(letter) + shift] == answer
        assert set(tokens[length:].tolist()) <= {0}


def torch_equal_places(targets, length: int) -> bool:
    return [place for place, target in enumerate(targets.tolist()) if target != NOT_SCORED] == [length - 1]


def test_evaluation_scores_each_example_once(corpus) -> None:
    found = windows(corpus, "validation", length=50, batch_size=256)
    assert found.scored == 10_000
    assert sum(each.scored for each in found) == 10_000
    assert all(each.tokens.shape[1] == 50 for each in found)
