"""Documents come out of files, JSON lines, parquet and data sets one by one, in the splits that names state."""

from __future__ import annotations

import gzip
import json
import lzma
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from phasewise.data import documents, load
from phasewise.data.documents import split_of, stated_splits, text_source
from phasewise.data.kinds import Origin
from phasewise.data.tokenization import collect, tokenize

TEXTS = [f"Document {number}: ÿ£ {'word ' * (number % 7)}" for number in range(70)]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, texts: list[str], field: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pyarrow.table({field: texts, "number": list(range(len(texts)))})
        parquet.write_table(table, path, row_group_size=20)
        return
    content = "".join(json.dumps({field: text, "number": 1}) + "\n" for text in texts).encode()
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content))


def read(name: str, **options: str) -> list[str]:
    return [
        document.content.decode() for part in text_source(name, **options).parts for document in part.read()
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet"])
def test_every_form_gives_the_documents_in_order(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, TEXTS, field="body")
    kind = "parquet" if name.endswith("parquet") else "jsonl"
    for path in (tmp_path / name, tmp_path):
        assert read(f"{kind}:{path}", field="body") == TEXTS
    (part,) = text_source(f"{kind}:{tmp_path / name}", field="body").parts
    assert [document.done for document in part.read()][-1] == part.size


def test_a_separator_divides_a_file_wherever_its_blocks_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all.txt").write_text("<doc>".join(TEXTS))
    for block in (1, 7, 1 << 20):
        monkeypatch.setattr(documents, "BLOCK", block)
        assert read(f"text:{tmp_path / 'all.txt'}", separator="<doc>") == TEXTS


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_data_set_is_read_through_the_datasets_library(tmp_path: Path, suffix: str) -> None:
    for split, texts in (("train", TEXTS[:50]), ("validation", TEXTS[50:60]), ("test", TEXTS[60:])):
        write(tmp_path / "set" / f"{split}.{suffix}", texts)
    corpus = load(f"datasets:{tmp_path / 'set'}")
    assert [corpus.decode(each) for each in corpus.split("train")] == TEXTS[:50]
    assert [corpus.decode(each) for each in corpus.split("test")] == TEXTS[60:]


def test_a_data_set_of_one_split_is_split_by_content(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.parquet", TEXTS)
    corpus = collect(Origin(data=f"datasets:{tmp_path / 'set'}", held_out=0.2))
    for split, members in corpus.splits.items():
        expected = [text for text in TEXTS if split_of(text.encode(), held_out=0.2, seed=0) == split]
        assert [corpus.decode(each) for each in members] == expected


@pytest.mark.parametrize("stated", [False, True])
def test_a_data_set_saved_to_the_disk_is_read(tmp_path: Path, stated: bool) -> None:
    texts = {"train": TEXTS[:50], "validation": TEXTS[50:60], "test": TEXTS[60:]} if stated else {"": TEXTS}
    sets = {split: datasets.Dataset.from_dict({"text": members}) for split, members in texts.items()}
    (datasets.DatasetDict(sets) if stated else sets[""]).save_to_disk(tmp_path / "set")
    corpus = collect(Origin(data=f"datasets:{tmp_path / 'set'}", held_out=0.2))
    for split, members in corpus.splits.items():
        shares = [text for text in TEXTS if split_of(text.encode(), held_out=0.2, seed=0) == split]
        assert [corpus.decode(each) for each in members] == texts.get(split, shares)


def test_names_that_cannot_be_had_say_so(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"datasets cannot load 'no/such-set' .*; check the name, NAME:CONFIG"
    ):
        load("datasets:no/such-set")
    write(tmp_path / "set" / "train.jsonl", TEXTS)
    with pytest.raises(ValueError, match="has no column 'body', only text, number; name it with --field"):
        read(f"datasets:{tmp_path / 'set'}", field="body")


@pytest.mark.parametrize(
    "names",
    [("train", "validation", "test"), ("train-00001", "valid.old", "test_2"), ("train", "dev", "test")],
)
def test_splits_that_names_state_are_kept(tmp_path: Path, names: tuple[str, str, str]) -> None:
    for name, texts in zip(names, (TEXTS[:50], TEXTS[50:60], TEXTS[60:]), strict=True):
        write(tmp_path / "in" / name / "part.jsonl", texts)
    tokenize(Origin(data=f"jsonl:{tmp_path / 'in'}"), tmp_path / "out")
    corpus = load(f"shards:{tmp_path / 'out'}")
    assert [corpus.decode(each) for each in corpus.split("validation")] == TEXTS[50:60]
    assert [len(members) for members in corpus.splits.values()] == [50, 10, 10]


def test_a_split_that_is_not_stated_does_not_exist(tmp_path: Path) -> None:
    for name, texts in (("train", TEXTS[:50]), ("validation", TEXTS[50:])):
        write(tmp_path / f"{name}.jsonl", texts)
    corpus = load(f"jsonl:{tmp_path}")
    with pytest.raises(ValueError, match="has no split 'test'; it has train, validation"):
        corpus.split("test")


def test_only_names_that_state_different_splits_count() -> None:
    assert stated_splits(["train", "train-2"]) == [None, None]
    assert stated_splits(["training", "tests", "valuable"]) == [None, None, None]
    with pytest.raises(ValueError, match=r"notes\.jsonl belongs to no split, while others are named train"):
        stated_splits(["train.jsonl", "test.jsonl", "notes.jsonl"])


def test_shares_of_a_split_by_content_are_those_asked_for_and_seeds_differ() -> None:
    texts = [f"text {number}".encode() for number in range(4000)]
    for held_out in (0.05, 0.2):
        found = [split_of(text, held_out=held_out, seed=0) for text in texts]
        assert found.count("test") / 4000 == pytest.approx(held_out, abs=0.02)
        assert found.count("validation") / 4000 == pytest.approx(held_out, abs=0.02)
    other = [split_of(text, held_out=0.2, seed=1) for text in texts]
    assert np.mean([first != second for first, second in zip(found, other, strict=True)]) > 0.3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": 5}\n',
            r"a\.jsonl, line 2 holds int in 'text', not text; name the right one with --field",
        ),
        (
            "a.jsonl",
            b'{"body": "x"}\n',
            "line 1 has no 'text', only body; name the field with --field",
        ),
        ("a.jsonl", b'["x"]\n', "line 1 has no 'text', only list"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON .*; give one object a line"),
        ("a.jsonl.zst", b"words", r"cannot read .*a\.jsonl\.zst: .*; give readable JSON lines"),
        ("a.jsonl", b"\n\nwords\n", "line 3 is not JSON .*; give one object a line"),
        ("a.jsonl", b"", "is empty; give data with text"),
        ("a.jsonl.gz", b"words", r"cannot read .*a\.jsonl\.gz: .*; give readable JSON lines"),
        ("a.parquet", b"words", r"cannot read .*a\.parquet: .*; give a readable parquet file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    kind = "parquet" if name.endswith("parquet") else "jsonl"
    with pytest.raises(ValueError, match=message):
        load(f"{kind}:{tmp_path / name}")


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_zstandard_frames_are_unpacked_and_a_cut_one_is_named(tmp_path: Path, kind: str) -> None:
    frames = []
    for texts in (TEXTS[:30], TEXTS[30:]):
        content = (
            "".join(f"{text}<doc>" for text in texts)
            if kind == "text"
            else "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content.encode())
        frames.append(sink.getvalue().to_pybytes())
    path = tmp_path / "all.zst"
    path.write_bytes(b"".join(frames))
    separator = "<doc>" if kind == "text" else None
    assert [text for text in read(f"{kind}:{path}", separator=separator) if text] == TEXTS
    path.write_bytes(b"".join(frames)[:-9])
    with pytest.raises(ValueError, match=r"cannot read .*all\.zst: Truncated"):
        read(f"{kind}:{path}", separator=separator)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_null_is_a_blank_document_and_left_out(tmp_path: Path, kind: str) -> None:
    rows = [*TEXTS[:30], None, *TEXTS[30:]]
    if kind == "jsonl":
        (tmp_path / "a").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    else:
        parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a")
    index = tokenize(Origin(data=f"{kind}:{tmp_path / 'a'}", held_out=0.2), tmp_path / "out")
    assert sum(part.documents for part in index.splits.values()) == len(TEXTS)


def test_a_byte_order_mark_belongs_to_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone|\xef\xbb\xbftwo")
    assert read(f"text:{tmp_path / 'a.txt'}", separator="|") == ["one", "\ufefftwo"]


def test_a_document_of_many_blocks_takes_time_in_proportion_to_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 4_000_000)
    monkeypatch.setattr(documents, "BLOCK", 1 << 9)
    started = time.process_time()
    assert len(read(f"text:{tmp_path / 'a.txt'}", separator="<doc>")) == 1
    assert time.process_time() - started < 1


def test_links_are_followed_but_not_in_circles_and_a_broken_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "disk" / "more").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "disk" / "more" / f"{number}.txt").write_text(TEXTS[number])
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "more" / "back").symlink_to(folder)
    assert read(f"text:{folder}") == TEXTS[:3]
    (folder / "x").symlink_to(folder / "y")
    (folder / "y").symlink_to(folder / "x")
    with pytest.raises(ValueError, match=r"in/[xy] is a link to nothing; mend or remove it"):
        read(f"text:{folder}")


def test_columns_of_parquet_that_hold_no_text_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(ValueError, match="has no column 'body', only text, number; name it with --field"):
        read(f"parquet:{tmp_path}", field="body")
    with pytest.raises(ValueError, match=r"a\.parquet, row 1 holds int in 'number', not text"):
        read(f"parquet:{tmp_path}", field="number")


def test_too_few_documents_for_the_splits_say_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TEXTS[:2])
    with pytest.raises(
        ValueError,
        match=r"none of 2 documents fell to validation.*: run .* a larger --held-out than 0\.05, or lay them",
    ):
        load(f"jsonl:{tmp_path}")


def test_data_of_no_such_kind_lists_the_kinds(tmp_path: Path) -> None:
    for data in ("austen", "text", "text:", "csv:x"):
        with pytest.raises(
            ValueError, match=f"'{data}' cannot be tokenised; give text:PATH, jsonl:PATH, parquet"
        ):
            tokenize(Origin(data=data), tmp_path / "out")
