import gzip

import numpy as np
import pytest

from phasewise.data import load
from phasewise.data.kinds import Origin
from phasewise.data.tokenization import tokenize

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


def test_kmers_read_the_bases_of_a_run_left_to_right_and_lose_none(path):
    corpus, bases = load(f"genome:{path}", tokenizer="kmers:3"), load(f"genome:{path}")
    assert (corpus.unit, corpus.vocab_size) == ("k-mer", 4**3 + 4)
    for split in corpus.splits:
        for words, letters in zip(corpus.split(split), bases.split(split), strict=True):
            assert corpus.decode(words) == bases.decode(letters)
            assert len(words) == len(letters) // 3 + len(letters) % 3
    first = corpus.decode(corpus.split("train")[0][:1])
    word = corpus.split("train")[0][0]
    assert first == "ACG"
    assert word == 0 * 16 + 1 * 4 + 2


def test_six_letter_words_have_the_papers_4096_and_four_single_bases(path):
    assert load(f"genome:{path}", tokenizer="kmers:6").vocab_size == 4100


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for name, contigs in (("first.fa", ("20", "X")), ("second.fasta.gz", ("21",))):
        content = b"".join(
            b">"
            + contig.encode()
            + b" a contig\n"
            + bytes(random.choice(list(b"ACGTacgtN"), 500).tolist())
            + b"\n"
            for contig in contigs
        )
        whole = tmp_path / "genome" / name
        whole.parent.mkdir(exist_ok=True)
        whole.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return tmp_path / "genome"


def contig(folder, name):
    for path in folder.glob("*.fa*"):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for record in content.decode().split(">")[1:]:
            header, letters = record.splitlines()[:2]
            if header.split()[0] == name:
                return letters.upper()
    raise AssertionError(name)


def known_runs(letters):
    return [run for run in letters.split("N") if run]


def test_ranges_of_a_bed_file_are_the_splits_and_nothing_else_is_read(folder):
    (folder / "splits.bed").write_text(
        "# a comment\n20\t100\t400\ttrain\n21 0 500 train\n20 0 50 test\nX 7 90 validation\n"
    )
    corpus = load(f"genome:{folder}")
    expected = {
        "train": known_runs(contig(folder, "20")[100:400]) + known_runs(contig(folder, "21")),
        "validation": known_runs(contig(folder, "X")[7:90]),
        "test": known_runs(contig(folder, "20")[:50]),
    }
    for split, runs in expected.items():
        assert [corpus.decode(document) for document in corpus.split(split)] == runs


def test_files_named_for_splits_are_the_splits(folder):
    (folder / "first.fa").rename(folder / "train.fa")
    (folder / "second.fasta.gz").rename(folder / "test-21.fasta.gz")
    (folder / "val.fa").write_text(">1\nACGT\n")
    corpus = load(f"genome:{folder}")
    assert corpus.decode(corpus.split("validation")[0]) == "ACGT"
    runs = [corpus.decode(document) for document in corpus.split("test")]
    assert "N".join(runs) in contig(folder, "21").replace("NN", "N").replace("NN", "N")


@pytest.mark.parametrize(
    ("bed", "said"),
    [
        ("20 0 50 train\n20 49 60 test\n", "line 2 overlaps 20 0 to 50; splits must not overlap"),
        ("20 0 50\n", "line 1 is not a range; give NAME START END SPLIT"),
        (b"\x1f\x8b\xff", "splits.bed, line 1 is not a range; give NAME START END SPLIT"),
        ("20 0 50 dev\n", "has the split 'dev' for 0 to 50; give one of train, validation, test"),
        ("20 50 50 test\n", "a range that is not empty"),
        ("22 0 50 test\n", "names 22, but the FASTA files have 20, 21, X"),
    ],
)
def test_ranges_that_cannot_be_are_named(folder, bed, said):
    (folder / "splits.bed").write_bytes(bed if isinstance(bed, bytes) else bed.encode())
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        load(f"genome:{folder}")
    assert said in str(raised.value)


def test_a_genome_in_shards_is_the_genome_in_memory(folder, tmp_path):
    (folder / "splits.bed").write_text("20 100 400 train\n21 0 500 train\n20 0 50 test\nX 7 90 validation\n")
    tokenize(Origin(data=f"genome:{folder}", tokenizer="kmers:4"), tmp_path / "out")
    mapped = load(f"shards:{tmp_path / 'out'}")
    in_memory = load(f"genome:{folder}", tokenizer="kmers:4")
    assert (mapped.unit, mapped.vocab_size, mapped.bytes_per_token) == ("k-mer", 260, None)
    for split in in_memory.splits:
        for first, second in zip(mapped.split(split), in_memory.split(split), strict=True):
            assert np.array_equal(first, second)
            assert mapped.decode(first) == in_memory.decode(second)


@pytest.mark.parametrize("tokenizer", ["bpe:300", "kmers:0", "kmers:10", "kmers:x"])
def test_a_tokenizer_that_genomes_have_not_lists_theirs(path, tokenizer):
    with pytest.raises(
        ValueError, match=f"genomes have no tokenizer '{tokenizer}'; give bytes .* or kmers:K"
    ):
        load(f"genome:{path}", tokenizer=tokenizer)


def test_a_range_beyond_the_end_of_its_record_is_named(tmp_path):
    (tmp_path / "a.fa").write_bytes(b">one\n" + b"ACGT" * 30 + b"\n")
    (tmp_path / "a.bed").write_text("one 0 60 train\none 60 80 validation\none 80 121 test\n")
    with pytest.raises(ValueError, match=r"names one 80 to 121, but .*a\.fa has 120 letters of it"):
        load(f"genome:{tmp_path}")
