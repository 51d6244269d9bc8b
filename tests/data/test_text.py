"""Text keeps its bytes and its documents, and its splits share nothing."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from phasewise.data import Corpus, batch, load, windows

AUSTEN_SHA256 = "2038286bd7b7dc91eba8c550514b9834c91483923834b64d0f947dbd33501e12"
WORDS = ["It", "was", "a", "truth", "universally", "acknowledged,", "ÿ£", "that", "sets", "the", "phase."]


def prose(seed: int, words: int) -> str:
    random = np.random.default_rng(seed)
    return " ".join(random.choice(WORDS) for _ in range(words))


def everything(corpus: Corpus) -> list[str]:
    return [text for split in corpus.splits for text in whole(corpus, split)]


def whole(corpus: Corpus, split: str) -> list[str]:
    return [corpus.decode(document) for document in corpus.splits[split]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        member = tmp_path / "library" / f"shelf{number % 3}" / f"book{number}.txt"
        member.parent.mkdir(parents=True, exist_ok=True)
        member.write_text(prose(number, 60 + number))
    return tmp_path / "library"


def test_austen_is_six_whole_novels_of_known_bytes() -> None:
    corpus = load("austen")
    titles = {name: [text.splitlines()[0] for text in whole(corpus, name)] for name in corpus.splits}
    assert titles == {
        "train": ["SENSE AND SENSIBILITY", "PRIDE AND PREJUDICE", "MANSFIELD PARK", "EMMA"],
        "validation": ["NORTHANGER ABBEY"],
        "test": ["Persuasion"],
    }
    assert corpus.sha256 == AUSTEN_SHA256
    assert (corpus.unit, corpus.vocab_size, corpus.licence) == ("byte", 256, "public domain")
    assert "Gutenberg" not in "".join(everything(corpus))
    assert "It is a truth universally acknowledged" in whole(corpus, "train")[1]


def test_austen_s_held_out_novels_can_be_evaluated_far_beyond_any_trained_context() -> None:
    corpus = load("austen")
    for split in ("validation", "test"):
        assert windows(corpus, split, length=262_144).scored == corpus.splits[split].lengths[0] - 1


def test_a_folder_is_split_by_whole_documents_with_none_in_two_splits(folder: Path) -> None:
    corpus = load(f"text:{folder}")
    written = sorted(member.read_text() for member in folder.rglob("*.txt"))
    assert sorted(everything(corpus)) == written
    assert {name: len(documents) for name, documents in corpus.splits.items()} == {
        "train": 10,
        "validation": 1,
        "test": 1,
    }


def test_the_split_of_a_document_depends_on_its_content_not_its_name(folder: Path) -> None:
    before = load(f"text:{folder}")
    for number, member in enumerate(sorted(folder.rglob("*.txt"))):
        member.rename(folder / f"{97 * number % 101}.md")
    assert load(f"text:{folder}").sha256 == before.sha256


def test_a_copied_document_counts_once(folder: Path) -> None:
    before = load(f"text:{folder}")
    for member in list(folder.rglob("*.txt")):
        (folder / f"copy of {member.name}").write_bytes(member.read_bytes())
    assert load(f"text:{folder}").sha256 == before.sha256


def test_a_path_may_start_at_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert load("text:~/library").sha256 == load(f"text:{folder}").sha256


def test_hidden_files_are_left_out(folder: Path) -> None:
    before = load(f"text:{folder}")
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_bytes(b"\0\1\2")
    assert load(f"text:{folder}").sha256 == before.sha256


def test_one_file_is_cut_at_characters_into_eight_one_and_one_tenths(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("£ÿ" * 505)
    corpus = load(f"text:{path}")
    parts = {name: whole(corpus, name) for name in corpus.splits}
    assert "".join(parts["train"] + parts["validation"] + parts["test"]) == "£ÿ" * 505
    assert {name: len(members[0]) for name, members in parts.items()} == {
        "train": 808,
        "validation": 101,
        "test": 101,
    }


def test_a_separator_divides_a_file_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "books.txt"
    books = [prose(number, 30) for number in range(20)]
    path.write_text("\f".join([*books, "", "\n"]))
    corpus = load(f"text:{path}", separator="\f")
    assert sorted(everything(corpus)) == sorted(books)
    assert len(load(f"text:{path}").splits["train"]) == 1


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_compressed_text_is_the_same_text(tmp_path: Path, suffix: str, pack) -> None:
    text = prose(0, 400).encode()
    (tmp_path / "book.txt").write_bytes(text)
    (tmp_path / f"book.txt{suffix}").write_bytes(pack(text))
    plain, packed = (load(f"text:{tmp_path / name}") for name in ("book.txt", f"book.txt{suffix}"))
    assert plain.sha256 == packed.sha256


def test_bpe_is_trained_on_the_training_split_alone(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    start, end = prose(0, 4000), " zyzzyva" * 400
    path.write_text(start + end)
    corpus = load(f"text:{path}", tokenizer="bpe:400")
    path.write_text(start + " quixotry" * 355 + "12345")
    other = load(f"text:{path}", tokenizer="bpe:400")
    assert len((start + end).encode()) == path.stat().st_size
    assert np.array_equal(corpus.splits["train"][0], other.splits["train"][0])
    assert "zyz" in whole(corpus, "test")[0]
    assert corpus.splits["test"].lengths[0] > 300 * 6


def test_bpe_decodes_to_the_text_and_counts_its_bytes(folder: Path) -> None:
    corpus = load(f"text:{folder}", tokenizer="bpe:300")
    as_bytes = load(f"text:{folder}")
    assert corpus.unit == "token"
    assert 256 < corpus.vocab_size <= 300
    assert corpus.bytes_per_token is not None
    for split, documents in corpus.splits.items():
        assert whole(corpus, split) == whole(as_bytes, split)
        assert documents.lengths.sum() * corpus.bytes_per_token[split] == pytest.approx(
            as_bytes.splits[split].lengths.sum()
        )
        assert max(document.max() for document in documents) < corpus.vocab_size
    assert as_bytes.bytes_per_token == {"train": 1.0, "validation": 1.0, "test": 1.0}


def test_training_bpe_twice_gives_the_same_tokens(folder: Path) -> None:
    first, second = (load(f"text:{folder}", tokenizer="bpe:300").sha256 for _ in range(2))
    assert first == second


def test_a_saved_tokenizer_is_used_as_it_is(folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[unknown]": 7, "phase.": 70_000}, unk_token="[unknown]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    corpus = load(f"text:{folder}", tokenizer=str(tmp_path / "tokenizer.json"))
    assert corpus.vocab_size == 70_001
    assert set(np.concatenate(list(corpus.splits["train"])).tolist()) == {7, 70_000}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no file or folder at .*; text:PATH takes an existing one"),
        (b"", "is empty; give a file with text"),
        (b" \n\n", "is empty; give a file with text"),
        (b"abc\0def", "is binary .a zero byte at 3., not text; leave it out of the path"),
        ("文字".encode("utf-16"), "is text in UTF-16 or UTF-32; write it again in UTF-8"),
        ("plain".encode("utf-16"), "is text in UTF-16 or UTF-32; write it again in UTF-8"),
        (b"abc", "is too short: nothing is left for its validation split; give a longer text"),
    ],
)
def test_a_file_that_is_no_text_says_so(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "given.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(f"text:{path}")


def test_an_empty_folder_and_a_damaged_archive_say_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no files; give a folder with text files"):
        load(f"text:{tmp_path / 'empty'}")
    for suffix, packed in ((".gz", gzip.compress(b"x" * 9999)), (".xz", lzma.compress(b"x" * 9999))):
        for damaged in (packed[:-20], b"not an archive"):
            path = tmp_path / f"book{suffix}"
            path.write_bytes(damaged)
            with pytest.raises(
                ValueError, match=f"cannot read .*book{suffix}: .*; give a readable text file"
            ):
                load(f"text:{path}")


def test_text_that_is_not_utf8_serves_bytes_and_says_why_bpe_cannot(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("Brontë ".encode("latin-1") * 100)
    assert load(f"text:{path}").vocab_size == 256
    with pytest.raises(
        ValueError, match='is not UTF-8 at byte 5, as BPE needs; convert it, or use tokenizer="bytes"'
    ):
        load(f"text:{path}", tokenizer="bpe:300")


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            "bpe:255",
            "bpe:255 is no vocabulary size; give from the 256 bytes to 1,048,576 tokens, as in bpe:8192",
        ),
        ("bpe:1048577", "bpe:1048577 is no vocabulary size"),
        (f"bpe:{10**20}", "is no vocabulary size"),
        ("bpe:", "bpe: is no vocabulary size"),
        ("bpe", "bpe: is no vocabulary size"),
        ("words", 'no tokenizer .words.; give "bytes", "gpt2", "bpe:SIZE" or the path of a tokenizer.json'),
        (__file__, "is not a tokenizer.json: .*; save one with the tokenizers library"),
    ],
)
def test_a_tokenizer_that_cannot_be_says_what_would_work(tokenizer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("austen", tokenizer=tokenizer)


def test_a_corpus_shorter_than_the_context_says_how_long_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("x" * 100)
    corpus = load(f"text:{path}")
    with pytest.raises(
        ValueError, match=r"context of 128 needs a document of 129 tokens.* has 80; use at most 79"
    ):
        batch(corpus, "train", step=0, context=128, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="has 10; use at most 9"):
        windows(corpus, "test", length=64)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_encode_gives_the_tokens_that_the_corpus_is_made_of(tokenizer):
    corpus = load("austen", tokenizer=tokenizer)
    novel = corpus.split("test")[0][:200]
    assert corpus.encode is not None
    assert corpus.encode(corpus.decode(novel)).tolist()[:190] == novel[:190].tolist()
