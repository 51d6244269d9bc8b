"""Models of 33 million parameters trained on novels at 1024 tokens, and evaluated far beyond.

    python -m experiments.long_documents texts NOVELS OUT        novels and passkey documents, in three splits
    python -m experiments.long_documents run SHARDS NOVEL OUT    train, extend, evaluate, advise: on one GPU

NOVELS are files or folders of texts, each a novel. In between, `phasewise tokenize text:OUT/novels --tokenizer
bpe:8192` learns the tokens of the novels alone, and `phasewise tokenize text:OUT/mixed --tokenizer` with its
tokenizer.json makes SHARDS. NOVEL is one more text, of which the last tenth is measured. The commands of `run` are
those of users; the trainings share the GPU, and what is finished is found again by a second call.
"""

import argparse
import hashlib
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from phasewise.data.passkey import ASKED, CLOSED, LEAST, MOST, NAMES

RATE = 1.5e-3
TRAINED = {
    "rope": ("rope", RATE, ()),
    "pope": ("pope", RATE, ()),
    "alibi": ("alibi", RATE, ()),
    "tapa": ("tapa", RATE / 5, ()),
    "tapa-norm": ("tapa", RATE, ("--qk-norm",)),
}
"""Encoding, learning rate and what else differs. TAPA's gradients explode at the others' rate: its paper trains it at
a fifth of RoPE's, and normed queries and keys bound them."""
HELD_OUT = {"test": 8, "validation": 4}
NOVELS = 128
PASSKEY_DOCUMENTS = 2000
FILLER = 3800
"""Characters of a novel in a passkey document, so that no document is shorter than a row."""
TOLD_TWICE = range(8, 17)
RULES = {"rope-yarn-4x": ("yarn", 4), "rope-ntk-4x": ("ntk", 4)}
CONTINUED = {"rope-yarn-4x-trained": ("rope", "yarn"), "pope-4x-trained": ("pope", "none")}
ALIKE = 0.3
"""Share of common phrases from which two texts are one novel."""


@dataclass(frozen=True)
class Sizes:
    """What is trained and measured."""

    size: tuple[str, ...] = ("--size", "25M")
    context: int = 1024
    rows: int = 32
    steps: int = 1300
    continued: int = 60
    lengths: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Times the context."""
    tokens: int = 2**18
    examples: int = 10
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
    examples=1,
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


def run(shards: Path, novel: Path, out: Path, device: str, sizes: Sizes) -> None:
    """Train all models side by side, change RoPE's rates, continue two, evaluate everything, and ask for advice."""
    data = f"shards:{shards}"
    where = ["--device", device]
    trainings = {
        name: [
            "train", "--data", data, "--encoding", encoding, *more, *sizes.size, *sizes.fast, *where,
            *("--context", sizes.context, "--batch-size", sizes.rows, "--steps", sizes.steps),
            *("--warmup", sizes.steps // 20, "--learning-rate", rate, "--final-learning-rate", rate / 15),
            *("--beta2", 0.95, "--evaluate-every", sizes.steps // 4, "--evaluate-tokens", sizes.tokens // 4),
            *("--checkpoint-every", sizes.steps),
        ]
        for name, (encoding, rate, more) in TRAINED.items()
    }  # fmt: skip
    changed = {
        name: ["extend", out / "rope", "--rule", rule, "--length", factor * sizes.context, "--steps", 0]
        for name, (rule, factor) in RULES.items()
    }
    continued = {
        name: [
            "extend", out / first, "--rule", rule, "--length", 4 * sizes.context, "--steps", sizes.continued,
            *("--batch-size", max(1, sizes.rows // 4), "--learning-rate", 3e-4, "--warmup", 1), *sizes.fast[:2],
        ]
        for name, (first, rule) in CONTINUED.items()
    }  # fmt: skip
    shared = ["--data", data, "--evaluate-tokens", max(map(int, _lengths(sizes))), "--no-figure", *where]
    extensions = {name: [*command, *shared] for name, command in (changed | continued).items()}
    _together(trainings, out)
    _together(extensions, out)
    models = [out / name for name in (*trainings, *extensions) if (out / name / "model").is_dir()]
    wanted = 4 * sizes.context
    evaluation = [
        "evaluate", *models, "--data", data, f"text:{novel}", "--lengths", *_lengths(sizes), *where,
        *("--tokens", sizes.tokens, "--needles", 1, 4, "--depths", 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1),
        *("--examples", sizes.examples, "--batch-tokens", sizes.batch_tokens, *sizes.dtype),
    ]  # fmt: skip
    advice = [
        "advise", out / "rope", "--length", wanted, "--data", data, *sizes.dtype, *where, "--json",
        *("--tokens", min(sizes.tokens, 16 * wanted), "--examples", sizes.examples // 2),
    ]  # fmt: skip
    with ThreadPoolExecutor(1) as beside, (out / "advice.json").open("w") as answer:
        asked = [sys.executable, "-m", "phasewise", *map(str, advice)]
        beside.submit(subprocess.run, asked, stdout=answer, check=False)
        _together({"evaluated": evaluation}, out)


def _lengths(sizes: Sizes) -> list[str]:
    return [str(times * sizes.context) for times in sizes.lengths]


def _together(commands: dict[str, list], out: Path) -> None:
    """Run commands that are not done yet at the same time, each into a folder and a log of its name."""
    out.mkdir(parents=True, exist_ok=True)
    started = perf_counter()

    def finish(name: str) -> None:
        if (out / name / "report.json").exists():
            return
        words = [sys.executable, "-m", "phasewise", *map(str, commands[name]), "--out", str(out / name)]
        if (out / name / "recipe.json").exists():
            words.append("--resume")
        with (out / f"{name}.log").open("a") as log:
            ended = subprocess.run(words, stdout=log, stderr=log, check=False).returncode
        print(f"{name}: ended with {ended} after {perf_counter() - started:.1f} s", flush=True)

    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(finish, commands))


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
    for name in ("steps", "tokens", "examples"):
        running.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    running.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    options = parser.parse_args()
    if options.command == "texts":
        texts(options.sources, options.out)
    else:
        given = {name: getattr(options, name) for name in ("steps", "tokens", "examples")}
        sizes = TINY if options.tiny else replace(Sizes(), **given)
        run(options.shards, options.novel, options.out, options.device, sizes)


if __name__ == "__main__":
    main()
