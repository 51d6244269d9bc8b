import numpy as np
import pytest

from phasewise.data import Origin, load, tokenize
from phasewise.data.corpus import Corpus, Documents, sha256_of
from phasewise.lens.granularity import granularities_of, sequences

TEXT = "Naïve words, and more words: 12 of them!\n" * 20


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return load(f"text:{tmp_path / 'text.txt'}")


def corpus_of(documents, *, unit, vocab_size):
    splits = {"train": Documents.join(documents, vocab_size=vocab_size)}
    return Corpus(
        name="made", source="", licence="", unit=unit, vocab_size=vocab_size, sha256=sha256_of(splits),
        splits=splits, decode=str,
    )  # fmt: skip


def test_spans_of_all_granularities_add_up_to_the_characters(text):
    document = text.split("train")[0]
    characters = len(bytes(document.astype(np.uint8)).decode())
    for granularity in ("bytes", "bpe:300", "words"):
        found = sequences(text, granularity)
        assert found.unit == "character"
        assert len(found.classes) * found.span == pytest.approx(characters)
        assert found.lengths.sum() == len(found.classes)
    assert sequences(text, "bytes").span < 1


def test_words_are_runs_of_letters_and_digits_and_single_signs(text):
    classes = sequences(text, "words").classes
    line = ["Naïve", "words", ",", "and", "more", "words", ":", "12", "of", "them", "!"]
    assert len(classes) == pytest.approx(len(line) * 16, abs=len(line))
    assert classes[1] == classes[5] != classes[0]
    np.testing.assert_array_equal(classes[: len(line)], classes[len(line) : 2 * len(line)])


def test_tokens_of_a_small_vocabulary_keep_classes_of_their_own(text):
    np.testing.assert_array_equal(sequences(text, "bytes").classes, text.split("train")[0])


def test_large_vocabulary_is_spread_evenly_over_256_classes():
    found = sequences(corpus_of([np.arange(8192)], unit="token", vocab_size=8192), "tokens")
    assert (found.count, found.vocab_size) == (256, 8192)
    counts = np.bincount(found.classes, minlength=256)
    assert counts.min() >= 30
    assert counts.max() <= 34


def test_kmers_are_consecutive_and_do_not_overlap():
    found = sequences(corpus_of([[0, 1, 2, 3, 3], [1, 1, 0, 0]], unit="base", vocab_size=4), "kmers:2")
    assert found.classes.tolist() == [4, 14, 5, 0]
    assert found.lengths.tolist() == [2, 2]
    assert found.span == 2


def test_step_of_four_voices_is_one_token():
    found = sequences(corpus_of([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 9]], unit="note", vocab_size=90), "steps")
    assert found.lengths.tolist() == [3]
    assert found.classes[0] == found.classes[1]
    assert found.classes[0] != found.classes[2]


@pytest.mark.parametrize(
    ("unit", "granularity", "known"),
    [
        ("note", "bytes", "notes, steps"),
        ("base", "words", "bases, kmers:4, kmers:8"),
        ("base", "kmers:x", "bases, kmers:4, kmers:8"),
        ("base", "kmers:40", "bases, kmers:4, kmers:8"),
        ("byte", "notes", "bytes, bpe:1024, bpe:8192, words"),
        ("byte", "kmers:3", "bytes, bpe:1024, bpe:8192, words"),
    ],
)
def test_granularity_that_the_corpus_lacks_is_refused_with_those_it_has(unit, granularity, known):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        sequences(corpus_of([[1, 2, 3]], unit=unit, vocab_size=256), granularity)
    assert f"no granularity {granularity!r}" in str(raised.value)
    assert str(raised.value).endswith(known)


def test_misspelt_tokenizer_is_refused(text):
    with pytest.raises(ValueError, match="no tokenizer 'wrods'"):
        sequences(text, "wrods")


def test_what_no_tokenizer_can_learn_from_has_no_bpe(tmp_path):
    (tmp_path / "text.jsonl").write_text(
        "".join(f'{{"text": "{number} {TEXT[:9]}"}}\n' for number in range(99))
    )
    tokenize(Origin(data=f"jsonl:{tmp_path / 'text.jsonl'}"), tmp_path / "shards")
    for name in ("passkey:128", "igsm:1", f"shards:{tmp_path / 'shards'}"):
        corpus = load(name)
        assert granularities_of(corpus) == ("bytes", "words")
        assert sequences(corpus, "words", split="test").lengths.all()
        with pytest.raises(ValueError, match=r"no granularity 'bpe:300'.*choose from bytes, words"):
            sequences(corpus, "bpe:300")
    with pytest.raises(ValueError, match="no granularity 'gpt2'"):
        sequences(corpus, "gpt2")


def test_a_generated_corpus_is_profiled_on_its_first_examples():
    corpus = load("passkey:128")
    assert len(corpus.split("train")) == 1_000_000
    assert len(sequences(corpus, "bytes").lengths) == 10_000
    assert len(sequences(corpus, "bytes", split="test").lengths) == len(corpus.split("test"))
