"""An evaluation of which everything was checked that can be before anything is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phasewise.data import Corpus, Windows, load, own_tokenizer, require_tokenizer_of, tokenizer_of, windows
from phasewise.data.shards import TOKENIZER
from phasewise.data.sources import TOKENIZED
from phasewise.evaluate import Needle, passkeys
from phasewise.evaluate.prefixed import Prefixed
from phasewise.hf.language_model import LanguageModel, open_language_model
from phasewise.model.folder import CONFIG, inside, read_settings
from phasewise.model.history import read_history
from phasewise.positions import is_whole
from phasewise.record import file_sha256
from phasewise.train.evaluation_recipe import EvaluateRecipe
from phasewise.train.evaluation_report import Checkpoint

if TYPE_CHECKING:
    from phasewise.evaluate.harness import Text
    from phasewise.evaluate.tasks import Tasks

UNUSED_TOKENS = 128
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Subject:
    """A checkpoint that fits its corpora, with these and the windows to measure on each."""

    facts: Checkpoint
    corpora: tuple[Corpus, ...]
    windows: tuple[tuple[Windows, ...], ...]

    @property
    def text(self) -> Corpus | None:
        """The first corpus that is text, whose tokenizer is the checkpoint's."""
        return next((corpus for corpus in self.corpora if corpus.encode is not None), None)


class Plan:
    """The checkpoints of a recipe, each found to fit what is to be measured.

    Raises ValueError for a checkpoint that is not whole, one of another vocabulary than its tokenizer, lengths
    beyond a corpus, needles or tasks without text, an unknown task, and missing packages.
    """

    def __init__(self, recipe: EvaluateRecipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self._corpora: dict[tuple[str, str], Corpus] = {}
        self._open: tuple[str, LanguageModel] | None = None
        folders = [inside(Path(given).expanduser()) for given in recipe.checkpoints]
        self.tasks = _tasks(recipe, folders)
        # Backwards, so that the first to be measured is the one that stays open.
        subjects = [
            self._subject(*both) for both in reversed(list(zip(_names(folders), folders, strict=True)))
        ]
        self.subjects = tuple(reversed(subjects))

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each corpus's tokens, by its name."""
        return {corpus.name: corpus.sha256 for corpus in self._corpora.values()}

    def model(self, subject: Subject) -> nn.Module:
        """The checkpoint, one at a time in memory, reading its prefix before every row."""
        opened = self.bare(subject.facts.folder)
        return Prefixed(opened, subject.facts.prefix) if subject.facts.prefix else opened

    def bare(self, folder: str) -> LanguageModel:
        """The checkpoint in a folder, reading what it is given and no prefix."""
        if self._open is None or self._open[0] != folder:
            self._open = None
            self._open = folder, open_language_model(folder, dtype=self.recipe.dtype, device=self.device)
        return self._open[1]

    def needles(self, subject: Subject, count: int, length: int, *, examples: int) -> tuple[Needle, ...]:
        """Passkeys of one length in the longest document of the first text corpus."""
        corpus = _text_of(subject)
        split = corpus.split(self.recipe.split)
        assert corpus.encode is not None
        return passkeys(
            split[int(split.lengths.argmax())],
            encode=lambda text: corpus.encode(text).tolist(),  # type: ignore[misc]
            length=length,
            depths=self.recipe.depths,
            needles=count,
            examples=examples,
            seed=self.recipe.seed,
        )

    def text(self, subject: Subject) -> "Text":
        """How the checkpoint's text becomes tokens and back, for tasks, its prefix included."""
        from phasewise.evaluate.harness import Text

        encode, stop = _encoder(subject), _stop(Path(subject.facts.folder))
        return Text(
            encode,
            _text_of(subject).decode,
            start=stop[0] if stop else encode("\n")[-1],
            stop=stop,
            before=subject.facts.prefix,
        )

    def _subject(self, name: str, folder: Path) -> Subject:
        recipe, model = self.recipe, self.bare(str(folder))
        tokenizers = [_tokenizer(recipe, folder, data) for data in recipe.data]
        corpora = tuple(self._corpus(*both) for both in zip(recipe.data, tokenizers, strict=True))
        tokenizer = _named(folder, corpora, tokenizers)
        measured = tuple(_windows(recipe, corpus) for corpus in corpora)
        for corpus, over in zip(corpora, measured, strict=True):
            require_tokenizer_of(folder, corpus)
            _require_vocabulary(name, model.config.vocab_size, corpus, over)
        stages = read_history(folder)
        facts = Checkpoint(
            name=name,
            folder=str(folder),
            family=model.config.family,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            vocab_size=model.config.vocab_size,
            dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
            trained_length=stages[-1].length if stages else model.config.trained_length,
            tokenizer=tokenizer,
            prefix=_prefix(tokenizer),
        )
        subject = Subject(facts, corpora, measured)
        for length in recipe.lengths if recipe.needles else ():
            self.needles(subject, max(recipe.needles), length, examples=1)
        if recipe.tasks:
            _encoder(subject)(ascii_lowercase)
        return subject

    def _corpus(self, data: str, tokenizer: str) -> Corpus:
        path = Path(tokenizer)
        # Checkpoints trained on the same tokens have equal files.
        content = file_sha256(path) if path.is_file() else tokenizer
        if (data, content) not in self._corpora:
            self._corpora[data, content] = load(data, tokenizer=tokenizer)
        return self._corpora[data, content]


def _tasks(recipe: EvaluateRecipe, folders: Sequence[Path]) -> "Tasks | None":
    """The tasks asked for, known and readable; those that are made to a length count a checkpoint's tokens."""
    if not recipe.tasks:
        return None
    try:
        from phasewise.evaluate.tasks import Tasks
    except ModuleNotFoundError as error:
        raise ValueError(f"tasks need {error.name}: pip install 'phasewise[eval]'") from error
    settings: dict[str, object] = {"max_seq_lengths": sorted(recipe.lengths)} if recipe.lengths else {}
    own = next((str(folder) for folder in folders if own_tokenizer(folder)), None)
    tasks = Tasks(**settings, **({} if own is None else {"tokenizer": own}))
    for name in recipe.tasks:
        tasks.check(name)
    return tasks


def _names(folders: list[Path]) -> list[str]:
    """Short names: the last part of each path that says something, or more of it where two would be equal."""
    short = [folder.resolve() for folder in folders]
    names = [path.parent.name if path.name == "model" else path.name for path in short]
    return [
        name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)
    ]


def _tokenizer(recipe: EvaluateRecipe, folder: Path, data: str) -> str:
    """The tokenizer of a corpus: the one asked for where it takes any, or else the checkpoint's own."""
    if recipe.tokenizer is None:
        return tokenizer_of(folder, data)
    return recipe.tokenizer if data.partition(":")[0] in TOKENIZED else "bytes"


def _named(folder: Path, corpora: Sequence[Corpus], tokenizers: Sequence[str]) -> str:
    """What makes tokens of a checkpoint's text: as asked for, or its own, of which shards may be made."""
    asked = next((each for each in tokenizers if each != "bytes"), None)
    shards = next((corpus for corpus in corpora if corpus.tokenizer is not None), None)
    if asked is not None or shards is None:
        return asked or "bytes"
    own = folder / TOKENIZER
    return str(own) if own.is_file() else shards.name


def _prefix(tokenizer: str) -> tuple[int, ...]:
    """The tokens that a tokenizer.json puts before every text; not those that it puts after one."""
    if not Path(tokenizer).is_file():
        return ()
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(tokenizer).encode("a")
    added = zip(text.ids, text.special_tokens_mask, strict=True)
    return tuple(token for token, special in takewhile(lambda each: each[1], added))


def _stop(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text: one or several, of how the checkpoint is to generate or else of its config."""
    for path in (folder / GENERATION, folder / CONFIG):
        settings = read_settings(path) if path.is_file() else {}
        for part in (settings, settings.get("text_config")):
            found = part.get("eos_token_id") if isinstance(part, dict) else None
            if found is not None:
                return _tokens(found, path)
    return ()


def _tokens(found: Any, path: Path) -> tuple[int, ...]:
    given = found if isinstance(found, list) else [found]
    if not all(map(is_whole, given)):
        raise ValueError(
            f"eos_token_id in {path} is {found!r}: write a token's number there, or a list of them"
        )
    return tuple(given)


def _windows(recipe: EvaluateRecipe, corpus: Corpus) -> tuple[Windows, ...]:
    """The windows of each length, all scoring the same tokens; of a task, its examples."""
    if corpus.task is None and not recipe.lengths and not recipe.tasks:
        raise ValueError(f"{corpus.name} can be measured at any length: give lengths, as 1024 2048 4096")
    lengths = sorted(recipe.lengths) if corpus.task is None else [corpus.task.row_length]
    if corpus.task is None and lengths and recipe.tokens < lengths[-1]:
        raise ValueError(
            f"{recipe.tokens} tokens do not fill one window of {lengths[-1]}: score more tokens, or ask for "
            "shorter lengths"
        )
    return tuple(
        windows(
            corpus,
            recipe.split,
            length=length,
            stride=None if corpus.task else min(length, recipe.stride or length // 2),
            limit_tokens=recipe.tokens,
            batch_size=max(1, recipe.batch_tokens // length),
        )
        for length in lengths
    )


def _require_vocabulary(name: str, vocab_size: int, corpus: Corpus, over: Sequence[Windows]) -> None:
    """Raise ValueError unless the tokens are the checkpoint's own, as far as counts can tell."""
    split = corpus.split(over[0].split) if over else ()
    largest = (
        max((int(split[number][: 1 + end].max()) for number, end in over[0].spans), default=0) if over else 0
    )
    if largest >= vocab_size:
        raise ValueError(
            f"{corpus.name} has a token {largest}, but the checkpoint {name} knows {vocab_size} tokens: "
            "give the tokenizer it was trained with"
        )
    # Vocabularies are padded to whole multiples, so a few more are no sign of another tokenizer.
    if vocab_size >= 2 * corpus.vocab_size and vocab_size - corpus.vocab_size >= UNUSED_TOKENS:
        raise ValueError(
            f"the checkpoint {name} knows {vocab_size} tokens, but {corpus.name} has only "
            f"{corpus.vocab_size}: give the tokenizer it was trained with"
        )


def _encoder(subject: Subject) -> Callable[[str], list[int]]:
    """What makes tokens of a task's text; it raises ValueError for one that the checkpoint does not know."""
    corpus, facts = _text_of(subject), subject.facts

    def encode(text: str) -> list[int]:
        tokens: list[int] = corpus.encode(text).tolist()  # type: ignore[misc]
        if max(tokens, default=0) >= facts.vocab_size:
            raise ValueError(
                f"the text of a task has a token {max(tokens)}, but the checkpoint {facts.name} knows "
                f"{facts.vocab_size} tokens: give the tokenizer it was trained with, or leave tasks out"
            )
        return tokens

    return encode


def _text_of(subject: Subject) -> Corpus:
    if subject.text is None:
        names = ", ".join(corpus.name for corpus in subject.corpora)
        raise ValueError(
            f"needles and tasks are text, but {names} is not: give a text corpus first, as austen"
        )
    return subject.text
