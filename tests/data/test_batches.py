"""Batches are pure functions; windows score every target once, the same targets at every length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.data import NOT_SCORED, Batch, Corpus, Documents, Task, batch, windows

CODES = 1000


def numbered(lengths: list[int], task: Task | None = None) -> Corpus:
    """A corpus whose every token is its own number: document * 1000 + place + 1."""
    documents = Documents.join(
        [np.arange(length) + 1 + CODES * number for number, length in enumerate(lengths)], vocab_size=2**17
    )
    return Corpus(
        name="numbered",
        source="made",
        licence="none",
        unit="token",
        vocab_size=2**17,
        sha256="",
        splits={"train": documents, "validation": documents, "test": documents},
        decode=str,
        task=task,
    )


def scored_targets(batches: list[Batch]) -> list[int]:
    return [token for each in batches for token in each.targets[each.targets != NOT_SCORED].tolist()]


document_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=6).filter(lambda sizes: max(sizes) > 1)


@st.composite
def corpora_with_lengths(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    sizes = draw(document_lengths)
    length = draw(st.integers(1, max(sizes) - 1))
    return sizes, length, draw(st.integers(1, length)), draw(st.integers(1, 4))


@settings(max_examples=200, deadline=None)
@given(corpora_with_lengths())
def test_windows_score_every_target_exactly_once(case: tuple[list[int], int, int, int]) -> None:
    sizes, length, stride, batch_size = case
    found = windows(numbered(sizes), "test", length=length, stride=stride, batch_size=batch_size)
    batches = list(found)
    expected = [CODES * number + place + 1 for number, size in enumerate(sizes) for place in range(1, size)]
    assert scored_targets(batches) == expected
    assert found.scored == len(expected)
    assert len(found) == len(batches)


@settings(max_examples=200, deadline=None)
@given(corpora_with_lengths())
def test_a_window_shows_each_target_the_tokens_before_it_and_at_least_length_minus_stride_of_them(
    case: tuple[list[int], int, int, int],
) -> None:
    sizes, length, stride, batch_size = case
    for each in windows(numbered(sizes), "test", length=length, stride=stride, batch_size=batch_size):
        for tokens, targets in zip(each.tokens, each.targets, strict=True):
            real = tokens[tokens > 0]
            assert len(real) <= length
            assert real.tolist() == list(range(int(real[0]), int(real[0]) + len(real)))
            for place in torch.nonzero(targets != NOT_SCORED)[:, 0].tolist():
                assert targets[place] == tokens[place] + 1
                context = place + 1
                position_in_document = int(targets[place]) % CODES - 1
                assert context >= min(position_in_document, length - stride + 1)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_length_and_stride_scores_the_same_targets_within_a_limit(data: st.DataObject) -> None:
    sizes = data.draw(document_lengths)
    limit = data.draw(st.integers(1, sum(sizes)))
    corpus = numbered(sizes)
    everything = scored_targets(list(windows(corpus, "test", length=1)))
    longest, left = 0, limit
    for size in sizes:
        longest, left = max(longest, min(size - 1, left)), left - min(size - 1, left)
    for length in range(1, longest + 1):
        stride = data.draw(st.integers(1, length))
        found = windows(corpus, "test", length=length, stride=stride, limit_tokens=limit)
        assert scored_targets(list(found)) == everything[:limit]
        assert found.scored == min(limit, len(everything))


def test_rows_of_windows_do_not_depend_on_the_batch_size() -> None:
    corpus = numbered([40, 3, 17, 25])
    one = list(windows(corpus, "test", length=10, stride=4))
    many = list(windows(corpus, "test", length=10, stride=4, batch_size=5))
    rows = [(each.tokens[0].tolist(), each.targets[0].tolist()) for each in one]
    padded = [pair for each in many for pair in zip(each.tokens.tolist(), each.targets.tolist(), strict=True)]
    assert len(rows) == len(padded)
    for (tokens, targets), (wide_tokens, wide_targets) in zip(rows, padded, strict=True):
        assert wide_tokens[: len(tokens)] == tokens
        assert wide_targets[: len(targets)] == targets
        assert set(wide_targets[len(targets) :]) <= {NOT_SCORED}


def test_padding_stands_in_segment_minus_one_and_full_rows_need_no_positions() -> None:
    corpus = numbered([40, 4])
    (full, *_) = windows(corpus, "test", length=13, batch_size=3)
    assert full.positions is None
    last = list(windows(corpus, "test", length=13, batch_size=2))[-1]
    assert last.positions is not None
    assert last.positions.segment.tolist() == [[0] * 13, [0] * 3 + [-1] * 10]
    assert last.positions.index[1, :3].tolist() == [0, 1, 2]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 20))
def test_a_batch_is_a_pure_function_of_seed_and_step(seed: int, step: int, context: int) -> None:
    corpus = numbered([200, 30, 21, 3])
    arguments = {"step": step, "context": context, "batch_size": 3, "seed": seed}
    first = batch(corpus, "train", **arguments)
    batch(corpus, "train", **{**arguments, "step": step + 1})
    again = batch(numbered([200, 30, 21, 3]), "train", **arguments)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.targets, again.targets)


def test_steps_seeds_and_splits_draw_different_batches() -> None:
    corpus = numbered([900, 900])
    base = {"step": 0, "context": 8, "batch_size": 16, "seed": 0}
    drawn = [
        batch(corpus, "train", **base),
        batch(corpus, "train", **{**base, "step": 1}),
        batch(corpus, "train", **{**base, "seed": 1}),
        batch(corpus, "validation", **base),
    ]
    assert len({tuple(each.tokens.flatten().tolist()) for each in drawn}) == 4


@settings(max_examples=100, deadline=None)
@given(document_lengths, st.data())
def test_a_training_row_is_a_run_of_one_document_with_its_next_tokens(
    sizes: list[int], data: st.DataObject
) -> None:
    context = data.draw(st.integers(1, max(sizes) - 1))
    drawn = batch(numbered(sizes), "train", step=0, context=context, batch_size=8, seed=3)
    assert drawn.tokens.shape == drawn.targets.shape == (8, context)
    for row in range(8):
        real = drawn.targets[row] != NOT_SCORED
        assert torch.equal(drawn.targets[row][real], drawn.tokens[row][real] + 1)
        document = int(drawn.tokens[row, 0]) // CODES
        assert int(real.sum()) == min(context, sizes[document] - 1)
        if drawn.positions is not None:
            assert torch.equal(drawn.positions.segment[row] == 0, real)
        else:
            assert bool(real.all())


def test_tokens_of_short_and_long_documents_are_drawn_about_equally_often() -> None:
    corpus = numbered([6, 801, 41])
    counts = np.zeros(3 * CODES)
    for step in range(400):
        drawn = batch(corpus, "train", step=step, context=10, batch_size=32, seed=0)
        counts += np.bincount(np.array(scored_targets([drawn])), minlength=3 * CODES)
    per_target = [counts[1:7].sum() / 5, counts[1000:1900].sum() / 800, counts[2000:].sum() / 40]
    assert np.allclose(per_target, np.mean(per_target), rtol=0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_the_ends_of_documents_are_drawn_as_well_as_their_middles(packed: bool) -> None:
    sizes = [11, 12, 16, 21, 36, 101]
    corpus = numbered(sizes)
    counts = np.zeros(len(sizes) * CODES)
    for step in range(80):
        drawn = batch(corpus, "train", step=step, context=10, batch_size=400, seed=0, packed=packed)
        counts += np.bincount(np.array(scored_targets([drawn])), minlength=len(counts))
    mean = counts.sum() / sum(size - 1 for size in sizes)
    for number, size in enumerate(sizes):
        share = counts[CODES * number + 2 :][: size - 1] / mean
        assert share.mean() == pytest.approx(1, abs=0.15)
        assert share.min() > 0.45
        assert share.max() < 1.65


def test_a_task_scores_answers_alone_and_is_never_cut() -> None:
    corpus = numbered([7, 5, 6], task=Task(row_length=8, answer_length=2))
    found = windows(corpus, "test", length=8, batch_size=2)
    assert scored_targets(list(found)) == [6, 7, 1004, 1005, 2005, 2006]
    assert found.scored == 6
    assert [each.tokens.shape for each in found] == [(2, 8), (1, 8)]
    assert windows(corpus, "test", length=8, limit_tokens=2).scored == 4
    drawn = batch(corpus, "train", step=0, context=8, batch_size=4, seed=0)
    assert drawn.scored == 8
    assert drawn.tokens.shape == (4, 8)


def test_batches_move_between_devices_with_their_positions() -> None:
    drawn = batch(numbered([30, 4, 4, 4]), "train", step=1, context=20, batch_size=8, seed=0)
    moved = drawn.to("meta")
    assert moved.tokens.is_meta
    assert moved.targets.is_meta
    assert moved.positions is not None
    assert moved.positions.segment.is_meta


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"context": 40},
            "a document of 41 tokens, but the longest one in the train split .* has 40; use at most 39",
        ),
        ({"context": 0}, "context must be at least 1, but is 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, but is 0"),
        ({"step": -1}, "count from 0, but are -1 and 0"),
        ({"seed": -2}, "count from 0, but are 0 and -2"),
        ({"split": "valid"}, "no split 'valid'; it has train, validation, test"),
    ],
)
def test_a_batch_that_cannot_be_says_what_would_work(arguments: dict, message: str) -> None:
    given = {"split": "train", "step": 0, "context": 8, "batch_size": 2, "seed": 0} | arguments
    split = given.pop("split")
    with pytest.raises(ValueError, match=message):
        batch(numbered([40, 4]), split, **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 40}, "the longest one in the test split .* has 40; use at most 39"),
        ({"length": 20, "limit_tokens": 10}, r"\(within any limit_tokens\) has 11; use at most 10"),
        ({"length": 8, "stride": 9}, "stride must be from 1 to the length 8, but is 9"),
        ({"length": 8, "stride": 0}, "stride must be from 1 to the length 8, but is 0"),
        ({"length": 0}, "length must be at least 1, but is 0"),
        ({"length": 8, "limit_tokens": 0}, "limit_tokens must be at least 1, but is 0"),
    ],
)
def test_windows_that_cannot_be_say_what_would_work(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        windows(numbered([40, 4]), "test", **arguments)


def test_a_task_has_one_length_and_no_stride() -> None:
    corpus = numbered([7, 5], task=Task(row_length=8))
    with pytest.raises(ValueError, match="rows of 8 tokens and no other length, not 16; use 8"):
        windows(corpus, "test", length=16)
    with pytest.raises(ValueError, match="rows of 8 tokens and no other length, not 4; use 8"):
        batch(corpus, "train", step=0, context=4, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="stride=4 has no meaning"):
        windows(corpus, "test", length=8, stride=4)
