"""Packed rows are full, their segments are runs of one document each, and every token is drawn alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.data import NOT_SCORED, Task, batch
from tests.data.test_batches import CODES, numbered

lengths = st.lists(st.integers(1, 60), min_size=1, max_size=6).filter(lambda sizes: max(sizes) > 1)


def segments(drawn):
    """(tokens, targets, index) of each segment of each row."""
    for row in range(len(drawn.tokens)):
        segment = drawn.positions.segment[row]
        assert segment.tolist() == sorted(segment.tolist())
        for number in segment.unique().tolist():
            here = segment == number
            yield drawn.tokens[row][here], drawn.targets[row][here], drawn.positions.index[row][here]


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 80), st.integers(1, 5), st.integers(0, 2**30))
def test_a_segment_is_a_run_of_one_document_with_its_next_tokens_and_positions_from_zero(
    sizes: list[int], context: int, rows: int, seed: int
) -> None:
    drawn = batch(
        numbered(sizes), "train", step=seed, context=context, batch_size=rows, seed=seed, packed=True
    )
    assert drawn.tokens.shape == drawn.targets.shape == (rows, context)
    assert drawn.scored == rows * context
    for tokens, targets, index in segments(drawn):
        assert torch.equal(targets, tokens + 1)
        assert index.tolist() == list(range(len(index)))
        assert torch.equal(tokens, tokens[0] + index)
        assert int(targets[-1]) % CODES <= sizes[int(tokens[0]) // CODES]


def test_documents_stay_whole_where_they_fit() -> None:
    corpus = numbered([33] * 8)
    drawn = batch(corpus, "train", step=0, context=100, batch_size=8, seed=0, packed=True)
    found = [len(tokens) for tokens, _, _ in segments(drawn)]
    assert found.count(32) == 3 * 8
    windows = batch(numbered([500] * 8), "train", step=0, context=100, batch_size=8, seed=0, packed=True)
    assert windows.positions is not None
    assert bool((windows.positions.segment == 0).all())


def test_tokens_of_short_and_long_documents_are_drawn_about_equally_often() -> None:
    corpus = numbered([6, 801, 41, 77])
    counts = np.zeros(4 * CODES)
    for step in range(400):
        drawn = batch(corpus, "train", step=step, context=50, batch_size=8, seed=0, packed=True)
        counts += np.bincount(drawn.targets.flatten().numpy(), minlength=4 * CODES)
    per_target = [
        counts[1:7].sum() / 5,
        counts[1000:1900].sum() / 800,
        counts[2000:2100].sum() / 40,
        counts[3000:].sum() / 76,
    ]
    assert np.allclose(per_target, np.mean(per_target), rtol=0.1)


def test_a_packed_batch_is_a_pure_function_of_seed_and_step() -> None:
    arguments = {"step": 5, "context": 64, "batch_size": 4, "seed": 2, "packed": True}
    first, again = (batch(numbered([200, 30, 21, 3]), "train", **arguments) for _ in range(2))
    other = batch(numbered([200, 30, 21, 3]), "train", **{**arguments, "step": 6})
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.positions.segment, again.positions.segment)
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize(
    ("sizes", "task", "message"),
    [
        ([7, 5], Task(row_length=8), "numbered has whole examples of one answer each; leave packed out"),
        ([1, 1], None, "no document in the train split of numbered has two tokens; give longer ones"),
    ],
)
def test_rows_that_cannot_be_packed_say_why(sizes: list[int], task: Task | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch(numbered(sizes, task), "train", step=0, context=8, batch_size=1, seed=0, packed=True)


def test_what_is_not_scored_is_no_target_of_a_packed_row() -> None:
    drawn = batch(numbered([9, 4, 2]), "train", step=0, context=30, batch_size=2, seed=0, packed=True)
    assert not bool((drawn.targets == NOT_SCORED).any())
