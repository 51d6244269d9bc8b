"""Models of 33 million parameters trained on novels at 1024 tokens, and evaluated far beyond.

    python -m experiments.long_documents texts NOVELS OUT        novels and passkey documents, in three splits
    python -m experiments.long_documents run SHARDS NOVEL OUT    train, extend, advise, evaluate: on one GPU

NOVELS are files or folders of texts, each a novel. In between, `phasewise tokenize text:OUT/novels --tokenizer
bpe:8192` learns the tokens of the novels alone, and `phasewise tokenize text:OUT/mixed --tokenizer` with its
tokenizer.json makes SHARDS. NOVEL is one more text, of which the last tenth is measured. The commands of `run` are
those of users; they share the GPU, each from the moment that what it needs is there, and what is finished is found
again by a second call.
"""

import argparse
import hashlib
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from time import perf_counter

from phasewise.data.passkey import ASKED, CLOSED, LEAST, MOST, NAMES
from phasewise.record import replacing

RATE = 1.5e-3
NORMED = ("--qk-norm",)
TRAINED = {
    "rope": ("rope", RATE, ()),
    "pope": ("pope", RATE, ()),
    "tapa-no-2pi-norm": ('{"kind": "tapa", "two_pi": false}', RATE, NORMED),
    "alibi": ("alibi", RATE, ()),
    "tapa": ("tapa", RATE / 5, ()),
    "rope-norm": ("rope", RATE, NORMED),
    "pope-norm": ("pope", RATE, NORMED),
    "tapa-norm": ("tapa", RATE, NORMED),
}
"""Encoding, learning rate and what else differs. TAPA's gradients explode at the others' rate: its paper trains it at
a fifth of RoPE's, and normed queries and keys bound them."""
HELD_OUT = {"test": 8, "validation": 4}
NOVELS = 128
PASSKEY_DOCUMENTS = 2000
FILLER = 3800
"""Characters of a novel in a passkey document, so that no document is shorter than a row."""
TOLD_TWICE = range(8, 17)
CONTINUED = (("rope", "yarn"), ("rope", "ntk"), ("rope", "pi"), ("pope", "none"))
FACTORS = (4, 16)
"""Times the trained length, to which models are continued."""
BEGUN, FINISHED = "recipe.json", "report.json"
ALIKE = 0.3
"""Share of common phrases from which two texts are one novel."""


@dataclass(frozen=True)
class Sizes:
    """What is trained and measured."""

    size: tuple[str, ...] = ("--size", "25M")
    context: int = 1024
    rows: int = 16
    steps: int = 640
    continued: int = 60
    lengths: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Times the context."""
    tokens: int = 2**18
    batch_tokens: int = 2**16
    fast: tuple[str, ...] = ("--precision", "bfloat16", "--compile")
    dtype: tuple[str, ...] = ("--dtype", "bfloat16")


TINY = Sizes(
    size=("--width", "32", "--layers", "1", "--heads", "2"),
    context=128,
    rows=4,
    steps=4,
    continued=2,
    lengths=(1, 4, 16),
    tokens=2048,
    batch_tokens=4096,
    fast=(),
    dtype=(),
)
"""A rehearsal."""


def texts(sources: Sequence[Path], out: Path) -> None:
    """Lay out the first novels by the hash of their content, held-out ones first, and passkey documents to train on."""
    novels = sorted(_novels(sources), key=lambda novel: hashlib.sha256(novel[1].encode()).digest())[:NOVELS]
    splits = [split for split, count in HELD_OUT.items() for _ in range(count)]
    splits += ["train"] * (len(novels) - len(splits))
    for split, (name, text) in zip(splits, novels, strict=True):
        path = out / "novels" / split / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for split in ("train", *HELD_OUT):
        (out / "mixed" / split).mkdir(parents=True)
        (out / "mixed" / split / "novels").symlink_to((out / "novels" / split).resolve())
    training = [text for split, (_, text) in zip(splits, novels, strict=True) if split == "train"]
    passkeys = out / "mixed" / "train" / "passkeys"
    passkeys.mkdir()
    for number in range(PASSKEY_DOCUMENTS):
        source = random.Random(f"passkey document {number}")
        (passkeys / f"{number:04}.txt").write_text(passkey_document(source, training), encoding="utf-8")


def _novels(sources: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Names and texts; of a novel that stands in several collections, the first."""
    seen: list[set[str]] = []
    for path in (path for source in sources for path in sorted(source.rglob("*.txt"))):
        text = path.read_text(encoding="utf-8-sig").replace("\f", "")
        phrases = _phrases(text)
        if all(len(phrases & other) < ALIKE * len(phrases) for other in seen):
            seen.append(phrases)
            yield path.stem.rpartition("__")[2], text


def _phrases(text: str) -> set[str]:
    """Every eight words that follow some rare ones: two printings of a novel share most of them."""
    words = text.split()
    anchors = (place for place, word in enumerate(words) if zlib.crc32(word.encode()) % 32 == 0)
    return {" ".join(words[place : place + 8]) for place in anchors}


def passkey_document(source: random.Random, novels: Sequence[str]) -> str:
    """A stretch of a novel in which some passkeys are told, and each is told again further on."""
    novel = source.choice(novels)
    start = source.randrange(len(novel) - FILLER)
    filler = novel[start : start + FILLER]
    told = []
    for name in source.sample(NAMES, source.choice(TOLD_TWICE)):
        sentence = f"{ASKED.format(name=name)} {source.randint(LEAST, MOST)}{CLOSED}"
        told += [(place, sentence) for place in sorted(source.randint(0, FILLER) for _ in range(2))]
    parts, before = [], 0
    for place, sentence in sorted(told):
        parts += [filler[before:place].strip(" "), sentence]
        before = place
    return "".join([*parts, filler[before:].strip(" ")])


@dataclass(frozen=True)
class Command:
    """A command of `phasewise`, in words asked for when it starts, and the names of those it waits for.

    printed: its report is taken from what it prints, and it needs no packages to draw.
    """

    words: Callable[[], Sequence]
    after: Sequence[str] = ()
    printed: bool = False


def run(shards: Path, novel: Path, out: Path, device: str, sizes: Sizes) -> None:
    """Train all models, continue two, ask for advice, and evaluate all models."""
    data, where = ["--data", f"shards:{shards}"], ["--device", device]
    lengths = [times * sizes.context for times in sizes.lengths]

    def training(encoding: str, rate: float, more: Sequence[str]) -> Sequence:
        return [
            "train", *data, *where, "--encoding", encoding, *more, *sizes.size, *sizes.fast,
            *("--context", sizes.context, "--batch-size", sizes.rows, "--steps", sizes.steps),
            *("--warmup", sizes.steps // 20, "--learning-rate", rate, "--final-learning-rate", rate / 15),
            *("--beta2", 0.95, "--evaluate-every", sizes.steps // 2, "--evaluate-tokens", sizes.tokens // 4),
            *("--checkpoint-every", sizes.steps),
        ]  # fmt: skip

    def continuation(model: str, rule: str, factor: int) -> Sequence:
        return [
            "extend", out / model, *data, *where, "--rule", rule, "--length", factor * sizes.context,
            *("--steps", sizes.continued, "--batch-size", max(1, sizes.rows // factor)),
            *("--learning-rate", 3e-4, "--warmup", 1, "--evaluate-tokens", 2 * max(lengths)),
            *("--no-figure", *sizes.fast[:2]),
        ]  # fmt: skip

    def advice() -> Sequence:
        wanted = FACTORS[0] * sizes.context
        return [
            "advise", out / "rope", *data, *where, *sizes.dtype, "--length", wanted,
            *("--tokens", min(sizes.tokens, 16 * wanted), "--examples", 0),
        ]  # fmt: skip

    def evaluation() -> Sequence:
        trained = [out / name for name in TRAINED if (out / name / FINISHED).exists()]
        return [
            "evaluate", *trained, *data, f"text:{novel}", *where, *sizes.dtype, "--lengths", *lengths,
            *("--tokens", sizes.tokens, "--batch-tokens", sizes.batch_tokens, "--no-figure"),
        ]  # fmt: skip

    commands = {name: Command(partial(training, *how)) for name, how in TRAINED.items()}
    commands |= {
        f"{model}-{rule}-{factor}x": Command(partial(continuation, model, rule, factor), [model])
        for model, rule in CONTINUED
        for factor in FACTORS
    }
    commands["advice"] = Command(advice, ["rope"], printed=True)
    commands["evaluated"] = Command(evaluation, list(TRAINED))
    together(commands, out)


def together(commands: Mapping[str, Command], out: Path) -> None:
    """Run commands that are not done yet, each into a folder and a log of its name, once those it waits for ended."""
    out.mkdir(parents=True, exist_ok=True)
    started = perf_counter()
    ended = {name: Event() for name in commands}

    def finish(name: str) -> None:
        for other in commands[name].after:
            ended[other].wait()
        try:
            if not (out / name / FINISHED).exists():
                begun = perf_counter() - started
                code = _ran(commands[name], out / name)
                now = perf_counter() - started
                print(f"{name}: ended with {code}, {begun:.1f} to {now:.1f} s", flush=True)
        finally:
            ended[name].set()

    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(finish, commands))


def _ran(command: Command, folder: Path) -> int:
    words = [sys.executable, "-m", "phasewise", *map(str, command.words())]
    with folder.with_name(f"{folder.name}.log").open("ab") as log:
        if command.printed:
            ended = subprocess.run([*words, "--json"], stdout=subprocess.PIPE, stderr=log, check=False)
            if ended.returncode == 0:
                folder.mkdir(exist_ok=True)
                with replacing(folder / FINISHED) as unfinished:
                    unfinished.write_bytes(ended.stdout)
            return ended.returncode
        resumed = ["--resume"] if (folder / BEGUN).exists() else []
        written = [*words, "--out", str(folder), *resumed]
        return subprocess.run(written, stdout=log, stderr=log, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    lay = commands.add_parser("texts")
    lay.add_argument("sources", type=Path, nargs="+")
    lay.add_argument("out", type=Path)
    running = commands.add_parser("run")
    for name in ("shards", "novel", "out"):
        running.add_argument(name, type=Path)
    running.add_argument("--device", default="cuda")
    for name in ("steps", "tokens"):
        running.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    running.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    options = parser.parse_args()
    if options.command == "texts":
        texts(options.sources, options.out)
    else:
        sizes = TINY if options.tiny else replace(Sizes(), steps=options.steps, tokens=options.tokens)
        run(options.shards, options.novel, options.out, options.device, sizes)


if __name__ == "__main__":
    main()
