"""A codec gives the tokens that the tokenizers library gives for the whole text, and the text back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from phasewise.data import load
from phasewise.data.codec import PIECE, defined_codec, text_codec

AWKWARD = (
    "word  two\n\n\nthree\t tabs \n x\x85y\u2003z 'tis don't 12,345 café\n",
    "\n" * (PIECE + 10) + "end",
    "x" * (2 * PIECE),
    " " * PIECE + "a b\n c" * PIECE,
    "日本語のテキスト。" * 999,
    "",
)


def nothing():
    raise AssertionError("no documents are needed")


@pytest.fixture(scope="module")
def austen() -> str:
    corpus = load("austen")
    return corpus.decode(corpus.split("validation")[0][:200_000])


def whole(definition: str, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(definition).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", ["gpt2", "bpe:600"])
def test_a_document_tokenised_in_pieces_has_the_tokens_of_the_whole(name: str, austen: str) -> None:
    codec = text_codec(name, lambda: [austen.encode()])
    texts = [austen, *AWKWARD]
    found = codec.encode([text.encode() for text in texts])
    for text, tokens in zip(texts, found, strict=True):
        assert tokens.tolist() == whole(codec.definition, text)
        assert codec.decode(tokens) == text


def test_gpt2_has_its_published_tokens() -> None:
    codec = text_codec("gpt2", nothing)
    assert (codec.vocab_size, codec.unit, codec.dtype) == (50_257, "token", np.dtype("<u2"))
    (tokens,) = codec.encode([b"Hello world, it's 2019!\n\n"])
    assert tokens.tolist() == [15496, 995, 11, 340, 338, 13130, 0, 628]


def test_the_end_of_text_written_out_in_a_document_is_plain_letters() -> None:
    (tokens,) = text_codec("gpt2", nothing).encode([b"<|endoftext|>"])
    assert 50_256 not in tokens


def tokenizer_file(folder: Path, **changes: object) -> str:
    definition = json.loads(text_codec("gpt2", nothing).definition) | changes
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(definition))
    return str(path)


def test_truncation_stored_in_a_tokenizer_file_cuts_no_document(tmp_path: Path, austen: str) -> None:
    cut = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    codec = text_codec(tokenizer_file(tmp_path, truncation=cut), nothing)
    assert codec.decode(codec.encode([austen.encode()])[0]) == austen


def test_a_tokenizer_that_joins_words_sees_each_document_whole(tmp_path: Path, austen: str) -> None:
    lower = {"type": "Lowercase"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    for changes in ({"normalizer": lower}, {"pre_tokenizer": metaspace}, {"pre_tokenizer": None}):
        codec = text_codec(tokenizer_file(tmp_path, **changes), nothing)
        text = austen[: 3 * PIECE]
        assert codec.encode([text.encode()])[0].tolist() == whole(codec.definition, text)


def test_a_stored_definition_makes_the_same_codec(austen: str) -> None:
    for name in ("bytes", "bpe:400"):
        first = text_codec(name, lambda: [austen.encode()])
        again = defined_codec(name, first.definition)
        assert again.sha256 == first.sha256
        assert np.array_equal(again.encode([austen.encode()])[0], first.encode([austen.encode()])[0])
    with pytest.raises(
        ValueError, match=r"the stored tokenizer gpt2 is damaged \(.*\); restore it from a copy"
    ):
        defined_codec("gpt2", "{")
