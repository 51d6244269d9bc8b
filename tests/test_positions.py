"""Visibility and places equal their definitions, restated here with loops."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.positions import Positions, visible

SEGMENTS = st.lists(st.integers(-1, 2), min_size=1, max_size=6)


def places(segments, data, axes):
    index = data.draw(
        st.lists(
            st.lists(st.integers(-4, 4), min_size=axes, max_size=axes),
            min_size=len(segments),
            max_size=len(segments),
        )
    )
    index = torch.tensor([index])
    return Positions(index[..., 0] if axes == 1 else index, torch.tensor([segments]))


@settings(max_examples=150, deadline=None)
@given(
    q_segments=SEGMENTS,
    k_segments=SEGMENTS,
    axes=st.integers(1, 3),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 5)),
    data=st.data(),
)
def test_a_key_is_seen_in_the_same_segment_not_after_and_within_the_window(
    q_segments, k_segments, axes, causal, window, data
):
    q_at, k_at = places(q_segments, data, axes), places(k_segments, data, axes)
    window = window if axes == 1 else None
    mask = visible(q_at, k_at, causal=causal, window=window)
    assert mask.shape == (1, len(q_segments), len(k_segments))
    for t, s in itertools.product(range(len(q_segments)), range(len(k_segments))):
        query, key = (at.index[0, place].reshape(-1).tolist() for at, place in ((q_at, t), (k_at, s)))
        expected = q_segments[t] == k_segments[s] >= 0
        if causal:
            expected = expected and key <= query
        if window is not None:
            expected = expected and abs(query[0] - key[0]) < window
        assert mask[0, t, s].item() == expected


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 3), max_size=5),
    before=st.integers(0, 2),
    after=st.integers(0, 2),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_boundaries_place_documents_as_their_lengths_do_and_the_rest_is_padding(
    lengths, before, after, dtype
):
    boundaries = torch.tensor([before, *(before + total for total in itertools.accumulate(lengths))])
    at = Positions.cu_seqlens(boundaries.to(dtype), before + sum(lengths) + after)
    packed = Positions.packed(lengths)
    padding = at.segment == -1
    assert padding[0].nonzero()[:, 0].tolist() == [
        *range(before),
        *range(before + sum(lengths), before + sum(lengths) + after),
    ]
    index = [place for length in lengths for place in range(length)]
    segment = [document for document, length in enumerate(lengths) for _ in range(length)]
    assert at.index[~padding].tolist() == packed.index[0].tolist() == index
    assert at.segment[~padding].tolist() == packed.segment[0].tolist() == segment


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4),
    length=st.integers(1, 4),
)
@settings(deadline=None)
def test_places_after_a_padded_past_go_on_from_the_last_real_token(rows, length):
    past = Positions.padded(torch.tensor(rows))
    after = Positions.after(past, length)
    for row, mask in enumerate(rows):
        assert after.index[row].tolist() == [sum(mask) + step for step in range(length)]
        assert after.segment[row].tolist() == [0] * length
        real = [index for index, is_real in zip(past.index[row].tolist(), mask, strict=True) if is_real]
        assert real == list(range(sum(mask)))
        assert [segment == 0 for segment in past.segment[row].tolist()] == mask


def test_after_goes_on_in_the_segment_of_the_last_real_token():
    after = Positions.after(Positions.packed([3, 2]), 2)
    assert after.index.tolist() == [[2, 3]]
    assert after.segment.tolist() == [[1, 1]]


def test_lengths_may_be_numpy_integers():
    assert Positions.packed(np.array([3, 2])).index.tolist() == [[0, 1, 2, 0, 1]]
    assert Positions.arange(np.int64(3)).length == 3


def test_numpy_integers_add_up_beyond_their_own_width():
    lengths = np.array([200, 100], dtype=np.uint8)
    assert Positions.packed(lengths).segment[0].bincount().tolist() == [200, 100]
    assert Positions.arange(lengths[0], start=lengths[1]).index[0, -1] == 299
    assert Positions.arange(300).narrow(lengths[0], lengths[1]).index[0, -1] == 299
    assert Positions.grid(lengths[:1].repeat(2)).length == 40_000
    assert Positions.packed(length for length in (2, 3)).length == 5


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: Positions.cu_seqlens([0, 3], 3),
            "boundaries must be a tensor, but is list; use torch.as_tensor",
        ),
        (lambda: Positions.cu_seqlens(np.array([0, 3]), 3), "boundaries must be a tensor, but is ndarray"),
        (lambda: Positions.padded([[0, 1]]), "mask must be a tensor, but is list"),
        (
            lambda: Positions.padded(torch.tensor([[float("-inf"), 0.0]])),
            r"torch.float32; .* of one that is added to scores, mask == 0",
        ),
        (
            lambda: Positions.cat(Positions.arange(2), Positions.arange(2, device="meta")),
            r"first is on cpu, but second on meta; use .to\(device\)",
        ),
        (
            lambda: Positions.packed(torch.tensor([3, 2])),
            r"lengths must be whole numbers, .* use \.tolist\(\)",
        ),
    ],
)
def test_a_list_for_a_tensor_and_a_tensor_for_a_list_are_named_with_what_to_give(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_boundaries_may_lie_apart_in_memory():
    apart = torch.stack([torch.tensor([0, 3, 5]), torch.zeros(3, dtype=torch.int64)], 1)[:, 0]
    assert Positions.cu_seqlens(apart, 5).index.tolist() == [[0, 1, 2, 0, 1]]


def test_a_window_beyond_all_positions_is_refused_rather_than_wrapped_around():
    at = Positions.arange(3)
    assert visible(at, at, window=2**62).equal(visible(at, at))
    with pytest.raises(
        ValueError, match=r"at most 4611686018427387904, but is 9223372036854775807; None sees"
    ):
        visible(at, at, window=2**63 - 1)


def test_packing_asks_no_device_how_many_places_there_are():
    assert Positions.packed([3, 0, 2], device="meta").index.shape == (1, 5)

    def packed(x):
        at = Positions.packed([3, 0, 2])
        return at.index + 10 * at.segment + x

    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1, 5, dtype=torch.int64)).tolist() == [[0, 1, 2, 20, 21]]
