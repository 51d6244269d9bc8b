import gzip

import numpy as np
import pytest

from phasewise.data import load

RECORD = (
    b">one a small record\nACGTACGTAC\ngtacgtacgt\nNNNNNNNNNN\nTTTTTCCCCC\nRUUUUUGGGGG\n>two\nACGTTGCAAC\n"
)


def sequences(corpus):
    """Each document put together again from its part of every split."""
    parts = zip(*(corpus.split(name) for name in ("train", "validation", "test")), strict=True)
    return [corpus.decode(np.concatenate(part)) for part in parts]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "small.fa").write_bytes(RECORD + b">three\r\n" + b"ACGT" * 10 + b"\r\n")
    return tmp_path / "small.fa"


def test_documents_are_runs_of_known_bases_in_order_and_no_base_is_lost(path):
    assert sequences(load(f"genome:{path}")) == [
        "ACGTACGTACGTACGTACGT",
        "TTTTTCCCCC",
        "TTTTTGGGGG",
        "ACGTTGCAAC",
        "ACGT" * 10,
    ]


def test_packed_file_gives_the_same_corpus(path, tmp_path):
    packed = tmp_path / "small.fa.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load(f"genome:{packed}").sha256 == load(f"genome:{path}").sha256


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not FASTA"),
        (b"ACGT\n", "is not FASTA: it starts with b'ACGT"),
        (b">a\nAC\x00GT\n", "holds b'\\x00', which stands for no base"),
        (b">a\nACGEGT\n", "record b'a' holds b'E'"),
        (b">a\nNNNN\n", "too few known bases: none are left for train"),
        (b">a\nACGTACGTAC\n", "none are left for validation"),
    ],
)
def test_file_that_is_no_genome_is_refused_saying_why(tmp_path, content, said):
    (tmp_path / "bad.fa").write_bytes(content)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        load(f"genome:{tmp_path / 'bad.fa'}")
    assert said in str(raised.value)


def test_damaged_or_missing_file_is_refused(tmp_path, path):
    (tmp_path / "cut.fa.gz").write_bytes(gzip.compress(path.read_bytes())[:40])
    with pytest.raises(ValueError, match="cannot read"):
        load(f"genome:{tmp_path / 'cut.fa.gz'}")
    with pytest.raises(ValueError, match="no file at"):
        load(f"genome:{tmp_path / 'missing.fa'}")
