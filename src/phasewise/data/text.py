"""Text: Jane Austen's novels, shipped with the package, and files and folders of one's own.

Tokens are the text's bytes, or those of a byte-level BPE, given or trained on the training split alone.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from phasewise.data.corpus import SPLITS, Corpus, Documents, sha256_of

if TYPE_CHECKING:
    import tokenizers

AUSTEN_SPLITS = {"train": slice(0, 4), "validation": slice(4, 5), "test": slice(5, 6)}
FEWEST_DOCUMENTS = 10
HELD_OUT = 0.1
BYTES = 256
OPENERS = {".xz": lzma.open, ".gz": gzip.open}

Texts = Mapping[str, Sequence[bytes]]
Codec = tuple[Callable[[bytes], np.ndarray], Callable[[np.ndarray], str], int]


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
    """The text of a file, or of every file below a folder (hidden ones apart), .xz and .gz unpacked.

    A document is a file, or with `separator` a part of one. From ten documents on, a tenth of them (chosen
    by a hash of their content) is the test split and another the validation split; of fewer, each gives its
    last tenth to test and the tenth before it to validation.

    Documents with equal content count once.

    Raises ValueError for a path that is missing, empty, unreadable or binary, and text too short to split.
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
    if path.is_dir():
        members = sorted(found for found in path.rglob("*") if found.is_file() and not _hidden(found, path))
        if not members:
            raise ValueError(f"folder {path} holds no files; give a folder with text files")
    elif path.is_file():
        members = [path]
    else:
        raise ValueError(f"no file or folder at {path}; text:PATH takes an existing one")
    documents = []
    for member in members:
        content = _content(member)
        documents += [content] if separator is None else content.split(separator.encode())
    documents = list({document: None for document in documents if document.strip()})
    if not documents:
        raise ValueError(f"{path} is empty; give a file with text")
    return documents


def _hidden(member: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in member.relative_to(folder).parts)


def _content(member: Path) -> bytes:
    try:
        with OPENERS.get(member.suffix, open)(member, "rb") as file:
            content = file.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"cannot read {member}: {error}; give a readable text file") from error
    place = content.find(b"\0")
    if place >= 0:
        raise ValueError(f"{member} is binary (a zero byte at {place}), not text; leave it out of the path")
    return content


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
    encode, decode, vocab_size = _bytes_codec() if tokenizer == "bytes" else _bpe_codec(texts, tokenizer)
    splits = {
        split: Documents.join((encode(member) for member in members), vocab_size=vocab_size)
        for split, members in texts.items()
    }
    unit: Literal["byte", "token"] = "byte" if tokenizer == "bytes" else "token"
    return Corpus(
        name=name if tokenizer == "bytes" else f"{name}, {tokenizer}",
        source=source,
        licence=licence,
        unit=unit,
        vocab_size=vocab_size,
        sha256=sha256_of(splits),
        splits=splits,
        decode=decode,
        bytes_per_token={
            split: sum(len(member) for member in texts[split]) / int(documents.lengths.sum())
            for split, documents in splits.items()
        },
        encode=lambda words: encode(words.encode()),
    )


def _bytes_codec() -> Codec:
    return _bytes_to_tokens, _tokens_to_text, BYTES


def _bytes_to_tokens(document: bytes) -> np.ndarray:
    return np.frombuffer(document, dtype=np.uint8)


def _tokens_to_text(tokens: np.ndarray) -> str:
    return np.asarray(tokens, dtype=np.uint8).tobytes().decode(errors="replace")


def _bpe_codec(texts: Texts, name: str) -> Codec:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(f"tokenizer {name!r} needs a package: pip install phasewise[train]") from error
    kind, _, size = name.partition(":")
    if kind == "bpe":
        tokenizer = _trained_bpe(texts["train"], size)
    elif Path(name).is_file():
        try:
            tokenizer = tokenizers.Tokenizer.from_file(name)
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(
                f"{name} is not a tokenizer.json: {error}; save one with the tokenizers library"
            ) from error
    else:
        raise ValueError(f'no tokenizer {name!r}; give "bytes", "bpe:SIZE" or the path of a tokenizer.json')

    def encode(document: bytes) -> np.ndarray:
        ids = tokenizer.encode(_characters(document), add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)

    def decode(tokens: np.ndarray) -> str:
        return tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    return encode, decode, max(tokenizer.get_vocab().values()) + 1


def _trained_bpe(documents: Sequence[bytes], size: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not size.isdecimal() or int(size) < BYTES:
        raise ValueError(f"bpe:{size} is no vocabulary size; give at least the {BYTES} bytes, as in bpe:8192")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=int(size), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([_characters(document) for document in documents], trainer)
    return tokenizer


def _characters(document: bytes) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the document that starts {document[:30]!r} is not UTF-8 at byte {error.start}, as BPE needs; "
            'convert it, or use tokenizer="bytes"'
        ) from error
