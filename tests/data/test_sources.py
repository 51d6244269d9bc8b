"""The table of names: what is unknown or unused is refused, with what would work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phasewise.data import Documents, load, tokenizer_of

NAMES = "austen, chorales, jsb:PATH, text:PATH, jsonl:PATH, parquet:PATH, datasets:NAME, shards:PATH"


@pytest.mark.parametrize("name", ["wikitext", "", "text", "text:", "jsb", "jsb:", "austen:emma", "jbs:x.npz"])
def test_an_unknown_name_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(ValueError, match=f"no corpus {name!r}; there are {NAMES}"):
        load(name)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        (
            "indirect-indexing",
            {"tokenizer": "bpe:8192"},
            "is not text, so tokenizer='bpe:8192' has no meaning; leave it out, or give bytes where a recipe names it",
        ),
        ("chorales", {"tokenizer": "bpe:8192"}, "is not text"),
        ("jsb:somewhere.npz", {"tokenizer": "bpe:8192"}, "is not text"),
        ("austen", {"separator": "\f"}, "austen has documents of its own; leave separator out"),
        ("austen", {"cache": Path("somewhere")}, "austen caches nothing; leave cache out"),
    ],
)
def test_an_option_without_use_is_refused(name: str, option: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, **option)


def test_importing_the_package_loads_no_optional_library() -> None:
    code = "import sys, phasewise.data; print({'music21', 'tokenizers', 'rich', 'tyro'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_documents_read_as_a_sequence_of_arrays() -> None:
    documents = Documents.join([[1, 2], [], [70_000]], vocab_size=70_001)
    assert len(documents) == 3
    assert [document.tolist() for document in documents] == [[1, 2], [], [70_000]]
    assert [document.tolist() for document in documents[1:]] == [[], [70_000]]
    assert documents[-1].dtype == np.int32
    assert Documents.join([[1, 2]], vocab_size=65_536)[0].dtype == np.uint16


def test_the_hash_sees_tokens_document_boundaries_and_splits(tmp_path: Path) -> None:
    hashes = set()
    for number, (text, separator) in enumerate(
        [("ab" * 200, None), ("ab" * 199 + "ba", None), ("ab" * 100 + "|" + "ab" * 100 + "x", "|")]
    ):
        path = tmp_path / f"{number}.txt"
        path.write_text(text)
        hashes.add(load(f"text:{path}", separator=separator).sha256)
    assert len(hashes) == 3


@pytest.mark.parametrize("name", ["austen", "text:any", "igsm:medium", "passkey:512"])
def test_text_for_a_checkpoint_without_its_tokenizer_is_refused_unless_it_knows_bytes(name, tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 300}}')
    with pytest.raises(
        ValueError, match=r"has no tokenizer\.json, without which text cannot be made of its 300"
    ):
        tokenizer_of(tmp_path, name)
    assert tokenizer_of(tmp_path, "chorales") == "bytes"
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    assert tokenizer_of(tmp_path, name) == "bytes"
    (tmp_path / "config.json").unlink()
    (tmp_path / "small.gguf").touch()
    with pytest.raises(ValueError, match="or give --tokenizer, which is bytes where there was none"):
        tokenizer_of(tmp_path, name)
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_of(tmp_path, name) == str(tmp_path / "tokenizer.json")
