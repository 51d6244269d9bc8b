"""The table from a name, as written on a command line, to a corpus."""

from __future__ import annotations

import json
from pathlib import Path

from phasewise.data.codec import BYTES
from phasewise.data.corpus import Corpus
from phasewise.data.genome import genome
from phasewise.data.igsm import igsm
from phasewise.data.kinds import Origin
from phasewise.data.music import chorales, jsb
from phasewise.data.passkey import NEEDLES, passkey
from phasewise.data.shards import TOKENIZER, shards
from phasewise.data.suite import KINDS as SUITE
from phasewise.data.suite import suite
from phasewise.data.synthetic import indirect_indexing
from phasewise.data.text import austen, text
from phasewise.data.tokenization import collect
from phasewise.record import parsed

NAMES = (
    "austen",
    "chorales",
    "jsb:PATH",
    "text:PATH",
    "jsonl:PATH",
    "parquet:PATH",
    "datasets:NAME",
    "shards:PATH",
)
NAMES += (
    "genome:PATH",
    "midi:PATH",
    "maestro:PATH",
    "asap:PATH",
    "igsm:LEVEL",
    "passkey:LENGTH",
    "needles:LENGTH",
)
NAMES += ("indirect-indexing",)
TEXT = ("austen", "text", "jsonl", "parquet", "datasets")
WRITTEN = (*TEXT, "igsm", "passkey", "needles")
TOKENIZED = (*WRITTEN, "genome")
NAMES += tuple(f"{kind}:BLOCK" for kind in SUITE)
CORPORA = " | ".join(NAMES)


def load(
    name: str, *, tokenizer: str = "bytes", separator: str | None = None, cache: Path | None = None
) -> Corpus:
    """The corpus of that name, one of `NAMES`.

    tokenizer: for text: "bytes", "gpt2", "bpe:SIZE" (byte-level, trained on the training split alone) or the
        path of a tokenizer.json of the tokenizers library; for genomes: "bytes" (a base a token) or "kmers:K".
        Shards have their own, and may be asked for by its name.
    separator: for text:PATH: what stands between documents inside a file; None: a file is a document.
    cache: for chorales: the folder for parsed pieces; None: $XDG_CACHE_HOME/phasewise or ~/.cache/phasewise.

    Raises ValueError for an unknown name, an option that the corpus has no use for, a missing package, and
    whatever is wrong with the file at PATH.

    >>> corpus = load("austen")
    >>> corpus.decode(corpus.splits["train"][0][:21])
    'SENSE AND SENSIBILITY'
    """
    kind, _, path = name.partition(":")
    takes = {known.partition(":")[0]: known.partition(":")[2] for known in NAMES}
    if kind not in takes or bool(path) != bool(takes[kind]):
        raise ValueError(f"no corpus {name!r}; there are {', '.join(NAMES)}")
    if tokenizer != "bytes" and kind not in (*TOKENIZED, "shards"):
        raise ValueError(
            f"{kind} is not text, so tokenizer={tokenizer!r} has no meaning; leave it out, or give bytes where a "
            "recipe names it"
        )
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
            return genome(Path(path).expanduser(), tokenizer)
        case "text":
            return text(Path(path).expanduser(), tokenizer=tokenizer, separator=separator)
        case "jsonl" | "parquet" | "datasets":
            return collect(Origin(data=name, tokenizer=tokenizer))
        case "midi" | "maestro" | "asap":
            from phasewise.progress import stderr

            return collect(Origin(data=name), stderr())
        case "shards":
            return shards(Path(path).expanduser(), tokenizer)
        case "igsm":
            return igsm(path, tokenizer)
        case "passkey" | "needles":
            needles = 1 if kind == "passkey" else NEEDLES
            return passkey(_whole(name, path, "length", 1024), needles=needles, tokenizer=tokenizer)
        case _ if kind in SUITE:
            return suite(kind, _whole(name, path, "block length", 16))
        case _:
            return indirect_indexing()


def tokenizer_of(folder: str | Path, name: str) -> str:
    """The tokenizer that `load` takes for corpus `name` to be read by a checkpoint: its own for text, or bytes.

    Raises ValueError for text where the checkpoint knows more tokens than bytes and has no tokenizer.json.
    """
    if name.partition(":")[0] not in WRITTEN:
        return "bytes"
    own = own_tokenizer(folder)
    if own is None:
        _require_bytes(Path(folder))
    return own or "bytes"


def load_for(folder: str | Path, name: str, *, tokenizer: str | None = None) -> Corpus:
    """Corpus `name` as a checkpoint reads it; `tokenizer`: instead of its own.

    Raises ValueError as `load`, `tokenizer_of` and `require_tokenizer_of` do.
    """
    corpus = load(name, tokenizer=tokenizer_of(folder, name) if tokenizer is None else tokenizer)
    require_tokenizer_of(folder, corpus)
    return corpus


def own_tokenizer(folder: str | Path) -> str | None:
    """The tokenizer.json beside a checkpoint, if there is one."""
    own = Path(folder) / TOKENIZER
    return str(own) if own.is_file() else None


def _require_bytes(folder: Path) -> None:
    """Raise ValueError for a checkpoint that must have had a tokenizer; one that cannot be read is for who opens it."""
    packed = next(folder.glob("*.gguf"), None)
    try:
        config = parsed((folder / "config.json").read_text(encoding="utf-8"))
        known = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        known = None
    if (isinstance(known, int) and known > BYTES) or (known is None and packed is not None):
        size = "" if known is None else f" of its {known:,} tokens"
        raise ValueError(
            f"{folder} has no {TOKENIZER}, without which text cannot be made{size}: put the one it was trained with "
            "there (AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it), or give --tokenizer, "
            "which is bytes where there was none"
        )


def require_tokenizer_of(folder: str | Path, corpus: Corpus) -> None:
    """Raise ValueError for tokens of another vocabulary than that of the tokenizer beside a checkpoint, if any."""
    own = Path(folder) / TOKENIZER
    if not own.is_file() or (corpus.tokenizer is None and not corpus.bytes_per_token):
        return
    try:
        ours = parsed(own.read_text(encoding="utf-8"))["model"].get("vocab")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{own} is not a tokenizer.json: copy it again, or remove it") from error
    if corpus.tokenizer is None or ours != json.loads(corpus.tokenizer)["model"].get("vocab"):
        raise ValueError(
            f"{corpus.name} was made by another tokenizer than {own}: give data in the checkpoint's own tokens, or "
            "text for it to make tokens of"
        )


def _whole(name: str, written: str, what: str, example: int) -> int:
    if not (written.isascii() and written.isdecimal()):
        raise ValueError(f"{name} needs a {what} in tokens, as in {name.partition(':')[0]}:{example}")
    return int(written)
