"""Corpora of text, music and made tasks, and the batches and evaluation windows taken from them."""

from phasewise.data.batches import NOT_SCORED, Batch, Windows, batch, windows
from phasewise.data.corpus import Corpus, Documents, Split, Task
from phasewise.data.kinds import TOKENIZERS, Origin
from phasewise.data.shards import verify
from phasewise.data.sources import (
    CORPORA,
    NAMES,
    load,
    load_for,
    own_tokenizer,
    require_tokenizer_of,
    tokenizer_of,
)
from phasewise.data.tokenization import tokenize

__all__ = [
    "CORPORA",
    "NAMES",
    "NOT_SCORED",
    "TOKENIZERS",
    "Batch",
    "Corpus",
    "Documents",
    "Origin",
    "Split",
    "Task",
    "Windows",
    "batch",
    "load",
    "load_for",
    "own_tokenizer",
    "require_tokenizer_of",
    "tokenize",
    "tokenizer_of",
    "verify",
    "windows",
]
