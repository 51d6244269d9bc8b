"""A trained tokenizer learns from a bounded part of the text that content alone decides, and the record says which."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from phasewise.data.kinds import Origin
from phasewise.data.sampling import drawn
from phasewise.data.tokenization import tokenize


def texts(number: int = 60) -> list[bytes]:
    random = np.random.default_rng(0)
    return [(f"{each} " + "é" * int(random.integers(1, 30))).encode() for each in range(number)]


def by_hash(documents: list[bytes]) -> list[bytes]:
    return sorted(documents, key=lambda each: hashlib.sha256(b"learn\0" + each).digest())


@pytest.mark.parametrize("most", [1, 50, 333, 1000])
def test_the_documents_of_smallest_hash_are_drawn_up_to_the_bound_and_stay_in_order(most: int) -> None:
    chosen, learned = drawn(texts(), most)
    expected, left = [], most
    for each in by_hash(texts()):
        part = each[:left].decode(errors="ignore").encode()
        expected += [part] if left > 0 else []
        left -= len(each)
    assert sorted(chosen) == sorted(expected)
    places = [
        next(place for place, each in enumerate(texts()) if each.startswith(one)) for one in chosen[:-1]
    ]
    assert places == sorted(places) or most == 1
    assert learned.text_bytes == sum(map(len, chosen)) <= most
    assert (learned.of_documents, learned.of_text_bytes) == (60, sum(map(len, texts())))


def test_another_order_of_the_documents_draws_the_same() -> None:
    assert sorted(drawn(texts(), 400)[0]) == sorted(drawn(texts()[::-1], 400)[0])


def test_text_within_the_bound_is_drawn_whole() -> None:
    size = sum(map(len, texts()))
    assert drawn(texts(), size)[0] == drawn(texts(), size + 1)[0] == texts()
    assert drawn([], 5)[0] == []


def test_index_says_what_the_vocabulary_was_trained_on(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps({"text": each.decode()}) for each in texts(200)))
    origin = Origin(data=f"jsonl:{source}", tokenizer="bpe:330", held_out=0.2, learn_from=500)
    index = tokenize(origin, tmp_path / "some")
    assert index.learned is not None
    assert index.learned.of_documents == index.splits["train"].documents > index.learned.documents
    assert index.learned.of_text_bytes == index.splits["train"].text_bytes
    assert 0 < index.learned.text_bytes <= 500
    whole = tokenize(origin.model_copy(update={"learn_from": None}), tmp_path / "whole")
    assert whole.learned is not None
    assert whole.learned.text_bytes == whole.splits["train"].text_bytes
    assert whole.tokenizer_sha256 != index.tokenizer_sha256
    assert tokenize(Origin(data=f"jsonl:{source}", held_out=0.2), tmp_path / "bytes").learned is None
