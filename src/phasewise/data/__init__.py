"""Corpora of text, music and made tasks, and the batches and evaluation windows taken from them."""

from phasewise.data.batches import NOT_SCORED, Batch, Windows, batch, windows
from phasewise.data.corpus import Corpus, Documents, Split, Task
from phasewise.data.sources import NAMES, load, tokenizer_of

__all__ = [
    "NAMES",
    "NOT_SCORED",
    "Batch",
    "Corpus",
    "Documents",
    "Split",
    "Task",
    "Windows",
    "batch",
    "load",
    "tokenizer_of",
    "windows",
]
