import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasewise.lens import dependency as module
from phasewise.lens.dependency import dependency, log_spaced, mutual_information
from tests.lens import sources

CHAIN = np.array(
    [[0.7, 0.1, 0.1, 0.1], [0.2, 0.5, 0.2, 0.1], [0.05, 0.15, 0.6, 0.2], [0.25, 0.25, 0.05, 0.45]]
)
# Of fifty normal deviates one in 300 runs lies beyond 4.
FEW_ERRORS = 4.0


def counted_pairs(classes, lengths, distance):
    """Every pair inside a document, one by one."""
    counts, start = {}, 0
    for length in lengths:
        for place in range(start, start + length - distance):
            pair = int(classes[place]), int(classes[place + distance])
            counts[pair] = counts.get(pair, 0) + 1
        start += length
    return counts


def information(counts):
    total = sum(counts.values())
    left, right = {}, {}
    for (a, b), count in counts.items():
        left[a] = left.get(a, 0) + count
        right[b] = right.get(b, 0) + count
    return sum(n / total * math.log(n * total / (left[a] * right[b])) for (a, b), n in counts.items())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=40), st.data())
def test_jackknifed_value_is_what_leaving_out_each_block_pair_by_pair_gives(documents, data):
    lengths = np.array([len(document) for document in documents])
    classes = np.array([token for document in documents for token in document], dtype=np.uint8)
    distance = data.draw(st.integers(1, 8))
    blocks = np.arange(33) * len(classes) // 32
    even = len(documents) < 32 or lengths.max() > len(classes) / 16
    per_block = []
    ends = np.repeat(lengths.cumsum(), lengths)
    for start, end in itertools.pairwise(blocks):
        pairs = {}
        for place in range(start, end):
            if place + distance < ends[place]:
                pair = int(classes[place]), int(classes[place + distance])
                pairs[pair] = pairs.get(pair, 0) + 1
        per_block.append(pairs)
    if not even or sum(1 for pairs in per_block if pairs) < 2:
        return
    whole = counted_pairs(classes, lengths, distance)
    total, value = sum(whole.values()), 0.0
    for pairs in per_block:
        rest = {pair: count - pairs.get(pair, 0) for pair, count in whole.items()}
        rest = {pair: count for pair, count in rest.items() if count}
        value += information(whole) - (1 - sum(pairs.values()) / total) * information(rest)
    curve = dependency(classes, lengths, distances=[distance])
    assert curve.pairs.tolist() == [total]
    np.testing.assert_allclose(curve.value + curve.baseline, [value], atol=1e-9)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=9, max_size=9))
def test_plug_in_information_is_that_of_the_counted_shares(counts):
    joint = np.array(counts).reshape(3, 3)
    expected = sources.information_of(joint / joint.sum()) if joint.sum() else 0.0
    assert mutual_information(joint) == pytest.approx(expected, abs=1e-12)


def test_independent_tokens_have_none_at_any_distance():
    tokens = sources.independent(400_000, classes=64, seed=1)
    curve = dependency(tokens, np.array([400_000]), distances=log_spaced(10_000))
    assert (np.abs(curve.value) < FEW_ERRORS * curve.error).all()
    plug_in_bias = 63**2 / (2 * 400_000)
    assert np.abs(curve.value).max() < plug_in_bias / 10


@pytest.mark.parametrize("lengths", [[600_000], [3_000] * 200, [1, 2, 299_997, 300_000]])
def test_markov_chain_has_the_information_of_its_matrix_powers(lengths):
    tokens = sources.markov(600_000, CHAIN, seed=2)
    curve = dependency(tokens, np.array(lengths), distances=log_spaced(200))
    exact = [sources.markov_information(CHAIN, distance) for distance in curve.distances]
    assert curve.value[0] == pytest.approx(exact[0], rel=0.02)
    assert (np.abs(curve.value - exact) < FEW_ERRORS * curve.error).all()


def test_repetition_does_not_raise_the_value_where_there_is_no_dependence():
    # Every token stands 32 times: pairs are far from independent, and a shuffle alone leaves 7e-3 nats.
    tokens = np.repeat(sources.independent(12_500, classes=16, seed=3), 32)
    curve = dependency(tokens, np.array([len(tokens)]), distances=[64, 128, 256, 512, 1024])
    assert (np.abs(curve.value) < FEW_ERRORS * curve.error).all()
    assert np.abs(curve.value).max() < 3e-3


def test_copy_from_lag_is_a_spike_of_the_exact_height_there_and_nothing_elsewhere():
    tokens = sources.copied(512_000, lag=32, classes=16, seed=4)
    curve = dependency(tokens, np.array([512_000]), distances=np.arange(1, 129))
    at = curve.distances == 32
    assert curve.value[at][0] == pytest.approx(sources.copied_information(16), rel=0.02)
    assert (np.abs(curve.value[~at]) < FEW_ERRORS * curve.error[~at]).all()


def test_long_memory_has_the_information_of_its_correlation():
    length = 1 << 15
    correlation = (1.0 + np.arange(length + 1)) ** -0.4
    tokens = sources.signs(length, correlation, seed=5, documents=64)
    curve = dependency(tokens, np.full(64, length), distances=log_spaced(1000), shuffle="corpus")
    exact = sources.signs_information(correlation[curve.distances])
    assert (np.abs(curve.value - exact) < FEW_ERRORS * curve.error).all()
    near = curve.distances <= 100
    assert (curve.error[near] < exact[near] / 8).all()


def test_document_shuffle_leaves_what_order_carries_and_corpus_shuffle_the_vocabulary_too():
    # Each of 64 documents has its own share of ones, and no order.
    random = np.random.default_rng(6)
    shares = np.tile([0.2, 0.8], 32)
    tokens = (random.random((64, 4000)) < shares[:, None]).astype(np.uint8).reshape(-1)
    lengths = np.full(64, 4000)
    between = sources.information_of(np.array([[0.34, 0.16], [0.16, 0.34]]))
    by_document = dependency(tokens, lengths, distances=log_spaced(1000))
    by_corpus = dependency(tokens, lengths, distances=log_spaced(1000), shuffle="corpus")
    assert by_document.blocks == "documents"
    assert (np.abs(by_document.value) < FEW_ERRORS * by_document.error).all()
    assert (np.abs(by_document.baseline - between) < FEW_ERRORS * by_corpus.error).all()
    assert (np.abs(by_corpus.value - between) < FEW_ERRORS * by_corpus.error).all()


def test_bands_hold_the_truth_about_as_often_as_they_claim():
    exact = sources.markov_information(CHAIN, 1)
    held = 0
    for seed in range(40):
        tokens = sources.markov(8_000, CHAIN, seed=seed)
        low, high = dependency(tokens, np.full(80, 100), distances=[1]).band()
        held += low[0] <= exact <= high[0]
    # Binomial(40, 0.95) is below 33 once in 400; the percentile interval of 32 blocks is somewhat narrow.
    assert held >= 33


def test_resampled_curves_use_the_same_blocks_at_all_distances():
    tokens = sources.independent(64_000, classes=2, seed=7)
    curve = dependency(np.repeat(tokens, 4), np.array([256_000]), distances=[1, 2])
    replicates = curve.replicates()
    assert replicates.shape == (200, 2)
    assert np.corrcoef(replicates.T)[0, 1] > 0.5
    np.testing.assert_array_equal(replicates, curve.replicates())


def test_ctrl_c_keeps_the_distances_that_are_done():
    tokens = sources.independent(10_000, classes=4, seed=8)
    asked = iter([False, False, False, True])
    curve = dependency(tokens, np.array([10_000]), distances=[1, 2, 4, 8], stop=lambda: next(asked))
    assert curve.distances.tolist() == [1, 2, 4]
    assert curve.value.shape == curve.error.shape == (3,)
    with pytest.raises(KeyboardInterrupt):
        dependency(tokens, np.array([10_000]), distances=[1, 2, 4, 8], stop=lambda: True)


@settings(deadline=None)
@given(st.integers(1, 100_000), st.integers(2, 60))
def test_log_spaced_distances_ascend_from_1_to_the_longest(longest, count):
    distances = log_spaced(longest, count=count)
    assert distances[0] == 1
    assert distances[-1] == longest
    assert (np.diff(distances) > 0).all()
    assert len(distances) <= max(count, 2)


def test_48_distances_are_48():
    for longest in (48, 100, 1000, 4096, 16384, 100_000):
        assert len(log_spaced(longest)) in (47, 48)


@pytest.mark.parametrize(
    ("distances", "said"),
    [
        ([10], "the longest document has 10 tokens, so no two are 10 apart; ask for distances up to 9"),
        ([9], "lie in fewer than two blocks"),
        ([0, 1], "must ascend from at least 1"),
        ([2, 2], "must ascend"),
        ([], "must ascend"),
    ],
)
def test_distances_that_the_documents_do_not_have_are_refused(distances, said):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        dependency(np.zeros(14, dtype=np.uint8), np.array([4, 10]), distances=distances)
    assert said in str(raised.value)


def test_counts_do_not_depend_on_how_they_are_chunked(monkeypatch):
    tokens, lengths = sources.markov(2000, CHAIN, seed=9), np.array([700, 1, 1299])
    whole = dependency(tokens, lengths, distances=[1, 5, 600])
    monkeypatch.setattr(module, "CHUNK", 7)
    np.testing.assert_array_equal(dependency(tokens, lengths, distances=[1, 5, 600]).parts, whole.parts)


def test_what_follows_may_be_another_sequence() -> None:
    tokens = np.random.default_rng(2).integers(0, 8, 20_000).astype(np.uint8)
    answers = np.roll(tokens, 6)
    curve = dependency(tokens, np.full(40, 500), distances=[1, 5, 6, 7], later=answers)
    assert curve.value[2] == pytest.approx(math.log(8), abs=0.01)
    assert (np.abs(curve.value[[0, 1, 3]]) < FEW_ERRORS * curve.error[[0, 1, 3]]).all()
