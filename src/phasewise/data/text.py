"""Text: Jane Austen's novels, shipped with the package, and files and folders of one's own.

Tokens are the text's bytes, or those of a byte-level BPE, given or trained on the training split alone.
"""

from __future__ import annotations

import hashlib
import lzma
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from phasewise.data.codec import text_codec
from phasewise.data.corpus import SPLITS, Corpus, Documents, sha256_of
from phasewise.data.documents import members_of, require_small, text_documents

AUSTEN_SPLITS = {"train": slice(0, 4), "validation": slice(4, 5), "test": slice(5, 6)}
FEWEST_DOCUMENTS = 10
HELD_OUT = 0.1

Texts = Mapping[str, Sequence[bytes]]


def austen(tokenizer: str = "bytes") -> Corpus:
    """Jane Austen's six novels: four to train on, Northanger Abbey to validate, Persuasion to test.

    Whole novels are held out, so no text is shared between splits; both have over 430 000 bytes.
    """
    packed = (files("phasewise.data") / "austen.txt.xz").read_bytes()
    novels = lzma.decompress(packed).split(b"\f")
    assert len(novels) == 6
    return _tokenized(
        {split: novels[part] for split, part in AUSTEN_SPLITS.items()},
        tokenizer,
        name="austen",
        source="Jane Austen's six novels, as in the R package janeaustenr 1.0.0 (after Project Gutenberg)",
        licence="public domain",
    )


def text(path: Path, *, tokenizer: str = "bytes", separator: str | None = None) -> Corpus:
    """The text of a file, or of every file below a folder (hidden ones apart), .xz, .gz and .zst unpacked.

    A document is a file, or with `separator` a part of one. From ten documents on, a tenth of them (chosen
    by a hash of their content) is the test split and another the validation split; of fewer, each gives its
    last tenth to test and the tenth before it to validation.

    Documents with equal content count once.

    Raises ValueError for a path that is missing, empty, unreadable or binary, text too short to split, and
    more than 256 MiB of it.
    """
    documents = _read(path, separator)
    texts = (
        _split_by_document(documents) if len(documents) >= FEWEST_DOCUMENTS else _split_by_share(documents)
    )
    for split, members in texts.items():
        if max((len(member) for member in members), default=0) < 2:
            raise ValueError(
                f"{path} is too short: nothing is left for its {split} split; give a longer text"
            )
    return _tokenized(
        texts,
        tokenizer,
        name=f"text:{path}",
        source=f"local text, {len(documents)} documents",
        licence="as its owner states",
    )


def _read(path: Path, separator: str | None) -> list[bytes]:
    if separator == "":
        raise ValueError(
            "separator is empty; give the string between documents, or None for one document a file"
        )
    members = members_of(path, "text")
    found: dict[bytes, None] = {}
    size = 0
    for member in members:
        for each in text_documents(member, separator=separator):
            if each.content.strip() and each.content not in found:
                found[each.content] = None
                require_small(size := size + len(each.content), f"text:{path}")
    documents = list(found)
    if not documents:
        raise ValueError(f"{path} is empty; give a file with text")
    return documents


def _split_by_document(documents: Sequence[bytes]) -> Texts:
    shuffled = sorted(documents, key=lambda document: hashlib.sha256(document).digest())
    held_out = max(1, round(len(shuffled) * HELD_OUT))
    return {
        "train": shuffled[2 * held_out :],
        "validation": shuffled[held_out : 2 * held_out],
        "test": shuffled[:held_out],
    }


def _split_by_share(documents: Sequence[bytes]) -> Texts:
    texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    for document in documents:
        validation = _character_at(document, round(len(document) * (1 - 2 * HELD_OUT)))
        test = _character_at(document, round(len(document) * (1 - HELD_OUT)))
        texts["train"].append(document[:validation])
        texts["validation"].append(document[validation:test])
        texts["test"].append(document[test:])
    return texts


def _character_at(document: bytes, place: int) -> int:
    """The first start of a UTF-8 character at or after `place`."""
    while place < len(document) and document[place] & 0xC0 == 0x80:
        place += 1
    return place


def _tokenized(texts: Texts, tokenizer: str, *, name: str, source: str, licence: str) -> Corpus:
    codec = text_codec(tokenizer, lambda: texts["train"])
    splits = {
        split: Documents.join(codec.encode(members), vocab_size=codec.vocab_size)
        for split, members in texts.items()
    }
    return Corpus(
        name=name if tokenizer == "bytes" else f"{name}, {tokenizer}",
        source=source,
        licence=licence,
        unit=codec.unit,
        vocab_size=codec.vocab_size,
        sha256=sha256_of(splits),
        splits=splits,
        decode=codec.decode,
        bytes_per_token={
            split: sum(len(member) for member in texts[split]) / int(documents.lengths.sum())
            for split, documents in splits.items()
        },
        encode=codec.encode_text,
        tokenizer=codec.definition or None,
    )
