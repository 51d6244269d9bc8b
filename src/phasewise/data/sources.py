"""The table from a name, as written on a command line, to a corpus."""

from __future__ import annotations

from pathlib import Path

from phasewise.data.corpus import Corpus
from phasewise.data.genome import genome
from phasewise.data.music import chorales, jsb
from phasewise.data.synthetic import indirect_indexing
from phasewise.data.text import austen, text

NAMES = ("austen", "chorales", "jsb:PATH", "text:PATH", "genome:PATH", "indirect-indexing")


def load(
    name: str, *, tokenizer: str = "bytes", separator: str | None = None, cache: Path | None = None
) -> Corpus:
    """The corpus of that name, one of `NAMES`.

    tokenizer: for text: "bytes", "bpe:SIZE" (byte-level, trained on the training split alone) or the path of
        a tokenizer.json of the tokenizers library.
    separator: for text:PATH: what stands between documents inside a file; None: a file is a document.
    cache: for chorales: the folder for parsed pieces; None: $XDG_CACHE_HOME/phasewise or ~/.cache/phasewise.

    Raises ValueError for an unknown name, an option that the corpus has no use for, a missing package, and
    whatever is wrong with the file at PATH.

    >>> corpus = load("austen")
    >>> corpus.decode(corpus.splits["train"][0][:21])
    'SENSE AND SENSIBILITY'
    """
    kind, _, path = name.partition(":")
    if kind not in {known.partition(":")[0] for known in NAMES} or bool(path) != (f"{kind}:PATH" in NAMES):
        raise ValueError(f"no corpus {name!r}; there are {', '.join(NAMES)}")
    if tokenizer != "bytes" and kind not in ("austen", "text"):
        raise ValueError(f"{kind} is not text, so tokenizer={tokenizer!r} has no meaning; leave it out")
    if separator is not None and kind != "text":
        raise ValueError(f"{kind} has documents of its own; leave separator out")
    if cache is not None and kind != "chorales":
        raise ValueError(f"{kind} caches nothing; leave cache out")
    match kind:
        case "austen":
            return austen(tokenizer)
        case "chorales":
            return chorales(cache)
        case "jsb":
            return jsb(Path(path).expanduser())
        case "genome":
            return genome(Path(path).expanduser())
        case "text":
            return text(Path(path).expanduser(), tokenizer=tokenizer, separator=separator)
        case _:
            return indirect_indexing()
