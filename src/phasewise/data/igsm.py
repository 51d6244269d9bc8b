"""School problems over a graph of quantities, after iGSM: known steps, known distances, arithmetic modulo 23.

Things of four kinds lie in one another: towns, buildings, rooms, furniture. An instance parameter is how many of
one thing lie in each of another; a sentence of the problem gives it as a number or from other parameters. An
abstract parameter, how many things of a kind lie in each of some thing, has no sentence: it follows from the
others. The question asks for one parameter; the solution works through what it needs, in order.

After "Physics of Language Models: Part 2.1", Ye, Xu, Li and Allen-Zhu, arXiv 2407.20311. Generator, names and
wording are our own. An operation is one addition, subtraction or multiplication, or one number copied.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phasewise.data.codec import Codec, text_codec
from phasewise.data.corpus import Corpus, Made, Task, sha256_of

MODULUS = 23
KINDS = ("Towns", "Buildings", "Rooms", "Furniture")
NAMES = (
    ("Cedar Falls", "Amber Bay", "Stone Creek", "Maple Ridge", "Silver Lake", "Fox Hollow", "Pine Valley"),
    ("Town Hall", "Art Museum", "Night School", "Grain Mill", "Fire Station", "Train Depot", "Tea House"),
    ("Reading Room", "Great Hall", "Back Office", "Map Room", "Store Room", "Guest Room", "Boiler Room"),
    ("Oak Table", "Iron Bench", "Tall Shelf", "Round Stool", "Wooden Chest", "Brass Lamp", "Writing Desk"),
)
WIDEST = 4
SIZES = {"train": 1_000_000, "validation": 1_000, "test": 1_000}
HASHED = 50
TRIES = 10_000
GENERATOR = 1
MOST_OPERATIONS = 20
MATCHED, TOKENS_AN_OPERATION, TOKENS_A_SENTENCE = 640, 18.5, 23
"""GPT-2 tokens of a problem with a fixed number of operations, and what its length is made of, on average."""


@dataclass(frozen=True)
class Difficulty:
    """edges, operations: the fewest and most of each. longest: tokens of an example, GPT-2's and bytes."""

    edges: tuple[int, int]
    operations: tuple[int, int]
    longest: tuple[int, int]


LEVELS = {
    "medium": Difficulty(edges=(7, 18), operations=(1, 15), longest=(609, 2700)),
    "hard": Difficulty(edges=(6, 24), operations=(1, 19), longest=(865, 3900)),
}


@dataclass(frozen=True)
class Parameter:
    """How many `inner` (a thing of the next layer, or a kind where abstract) lie in each `outer` of `layer`."""

    layer: int
    outer: str
    inner: str

    @property
    def words(self) -> str:
        return f"each {self.outer}'s {self.inner}"


@dataclass(frozen=True)
class Formula:
    """A sum of products of parameters (or with `minus`, a difference of two), then a number added or multiplied.

    Without products it is the number. Each addition, subtraction and multiplication is an operation, and so is
    taking over a number or another parameter as it is.
    """

    products: tuple[tuple[Parameter, ...], ...]
    minus: bool = False
    sign: str = ""
    number: int = 0

    @property
    def operations(self) -> int:
        inner = sum(len(product) for product in self.products) - 1
        return max(1, inner + bool(self.sign))

    @property
    def words(self) -> str:
        names = [product[0].words for product in self.products]
        if not names:
            return str(self.number)
        together = names[0]
        if self.minus:
            together = f"the difference of {names[0]} and {names[1]}"
        elif len(names) > 1:
            together = f"the sum of {', '.join(names[:-1])} and {names[-1]}"
        return {"": "", "+": f"{self.number} more than ", "*": f"{self.number} times "}[self.sign] + together


@dataclass(frozen=True)
class Problem:
    """A problem and its solution.

    operands: (use, definition) for each variable that a step of the solution uses: where it stands, and where
        its value does. sentences: the same for each parameter: where the solution takes it up, and where its
        sentence in the problem starts. All are places in prompt + solution, each at a space.
    """

    prompt: str
    solution: str
    answer: int
    operations: int
    operands: list[tuple[int, int]]
    sentences: list[tuple[int, int]]

    @property
    def text(self) -> str:
        return self.prompt + self.solution


def igsm(level: str, tokenizer: str = "bytes") -> Corpus:
    """Generated problems: 1 000 000 to train on, 1 000 each to validate and test; the solution is scored.

    level: "medium" (at most 15 operations) or "hard" (19), with few operations more often; or the number of
        operations, from 1 to 20, that every problem takes, in texts of about equal length.
    tokenizer: "bytes", "gpt2" or the path of a tokenizer.json.
    Raises ValueError for another level or tokenizer.

    >>> corpus = igsm("medium")
    >>> corpus.decode(corpus.split("train")[0])[-12:]
    ' Answer: 21.'
    """
    if level.isdecimal() and 1 <= int(level) <= MOST_OPERATIONS:
        difficulty, operations = _fixed(int(level)), int(level)
    elif level in LEVELS:
        difficulty, operations = LEVELS[level], None
    else:
        raise ValueError(
            f"no level {level!r} of igsm; give {', '.join(LEVELS)} or operations from 1 to {MOST_OPERATIONS}"
        )
    if tokenizer.startswith("bpe:"):
        raise ValueError(f"igsm is generated, so {tokenizer!r} has nothing to learn from; give bytes or gpt2")
    codec = text_codec(tokenizer, lambda: ())
    longest = difficulty.longest[0 if codec.unit == "token" else 1]
    splits = {
        name: Problems(stream, size, difficulty, operations, codec, longest)
        for stream, (name, size) in enumerate(SIZES.items())
    }
    question_ends = int(codec.encode_text(splits["train"].problem(0).prompt)[-1])
    return Corpus(
        name=f"igsm:{level}" + ("" if tokenizer == "bytes" else f", {tokenizer}"),
        source="generated; after iGSM, arXiv 2407.20311",
        licence="none needed",
        unit=codec.unit,
        vocab_size=codec.vocab_size,
        sha256=sha256_of(splits, examples=HASHED),
        splits=splits,
        decode=codec.decode,
        task=Task(row_length=longest - 1, answer_length=None, answer_after=question_ends),
        encode=codec.encode_text,
        tokenizer=codec.definition or None,
    )


class Problems(Made):
    """Problems as tokens, each a pure function of the stream and its index, none above the level's length."""

    def __init__(
        self, stream: int, size: int, level: Difficulty, operations: int | None, codec: Codec, longest: int
    ) -> None:
        super().__init__(stream, size)
        self._level, self._operations = level, operations
        self._codec, self._longest = codec, longest

    @property
    def lengths(self) -> np.ndarray:
        """Made by making every problem, which takes a millisecond each."""
        return np.array([len(tokens) for tokens in self.take(np.arange(self._size))])

    def take(self, indices: np.ndarray) -> list[np.ndarray]:
        return [self._codec.encode_text(self.problem(index).text) for index in indices.tolist()]

    def problem(self, index: int) -> Problem:
        """The problem behind the tokens of example `index`."""
        source = random.Random(f"igsm {GENERATOR} {self._stream} {index}")
        while True:
            made = problem(source, self._level, self._operations)
            if len(self._codec.encode_text(made.text)) <= self._longest:
                return made

    def distances(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens from each use back to what it needs, int64: of variables to their values, of parameters to
        their sentences."""
        made = self.problem(index)
        text = made.text
        places = sorted({place for pair in (*made.operands, *made.sentences) for place in pair})
        pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
        lengths = [len(tokens) for tokens in self._codec.encode([piece.encode() for piece in pieces])]
        at = dict(zip(places, np.cumsum(lengths).tolist(), strict=False))
        operands, sentences = (
            np.array([at[use] - at[definition] for use, definition in pairs], dtype=np.int64)
            for pairs in (made.operands, made.sentences)
        )
        return operands, sentences


def _fixed(operations: int) -> Difficulty:
    """The world whose problems of that many operations have about as many tokens as those of any other."""
    edges = round((MATCHED - TOKENS_AN_OPERATION * operations) / TOKENS_A_SENTENCE)
    return Difficulty((edges, edges), (operations, operations), LEVELS["hard"].longest)


def problem(source: random.Random, level: Difficulty, operations: int | None = None) -> Problem:
    """A problem whose question takes `operations` operations; None: at most the level's, few more often."""
    wanted = operations or min(source.randint(*level.operations), source.randint(*level.operations))
    for _ in range(TRIES):
        world = World(source, min(source.randint(*level.edges), source.randint(*level.edges)))
        asked = [parameter for parameter in world.formulas if world.operations(parameter) == wanted]
        if asked:
            return world.ask(source, source.choice(asked))
    raise AssertionError(f"no problem of {wanted} operations in {TRIES} worlds")


class World:
    """Things that lie in one another, and a formula for each parameter from ones before it in order."""

    def __init__(self, source: random.Random, edges: int) -> None:
        self._inside = _lay(source, edges)
        instances = [
            Parameter(layer, outer, inner)
            for layer, things in enumerate(self._inside)
            for outer, members in things.items()
            for inner in members
        ]
        source.shuffle(instances)
        self.instances = instances
        self.formulas: dict[Parameter, Formula] = {}
        waiting = list(self._abstract())
        for instance in instances:
            self.formulas[instance] = self._drawn(source)
            for parameter, formula in list(waiting):
                if all(part in self.formulas for product in formula.products for part in product):
                    self.formulas[parameter] = formula
                    waiting.remove((parameter, formula))

    def operations(self, parameter: Parameter) -> int:
        """Operations that working out `parameter` takes, each parameter worked out once."""
        return sum(self.formulas[each].operations for each in self._needed(parameter))

    def ask(self, source: random.Random, asked: Parameter) -> Problem:
        """The problem that asks for a parameter."""
        sentences = source.sample(self.instances, len(self.instances))
        prompt, places = "", {}
        for instance in sentences:
            places[instance] = max(len(prompt) - 1, 0)
            prompt += f"The number of {instance.words} is {self.formulas[instance].words}. "
        prompt += f"How many {asked.inner} does each {asked.outer} have?"
        writer = _Writer(source.sample(string.ascii_letters, len(string.ascii_letters)), len(prompt))
        needed = self._needed(asked)
        for parameter in needed:
            if parameter in places:
                writer.sentences.append((writer.place, places[parameter]))
            writer.define(parameter, self.formulas[parameter])
        answer = writer.values[asked]
        writer.text += f" Answer: {answer}."
        operations = sum(self.formulas[each].operations for each in needed)
        return Problem(prompt, writer.text, answer, operations, writer.operands, writer.sentences)

    def _needed(self, asked: Parameter) -> list[Parameter]:
        """What `asked` rests on, and itself, each after what it rests on."""
        found: dict[Parameter, None] = {}

        def visit(parameter: Parameter) -> None:
            if parameter not in found:
                for product in self.formulas[parameter].products:
                    for part in product:
                        visit(part)
                found[parameter] = None

        visit(asked)
        return list(found)

    def _abstract(self) -> Iterator[tuple[Parameter, Formula]]:
        """Each abstract parameter of two things or more, by kind: those of nearer kinds first."""
        known: dict[tuple[int, str, int], Parameter] = {}
        for depth in (1, 2, 3):
            for layer, things in enumerate(self._inside):
                kind = layer + depth
                for outer, members in things.items() if kind < len(KINDS) else ():
                    parts = [(Parameter(layer, outer, inner), (layer + 1, inner, kind)) for inner in members]
                    if depth == 1:
                        products = tuple((instance,) for instance, _ in parts)
                    else:
                        products = tuple((each, known[deep]) for each, deep in parts if deep in known)
                    if products:
                        known[layer, outer, kind] = Parameter(layer, outer, KINDS[kind])
                        yield known[layer, outer, kind], Formula(products)

    def _drawn(self, source: random.Random) -> Formula:
        """A formula of up to three parameters that have one."""
        count = min(source.choice((0, 1, 1, 2, 2, 3)), len(self.formulas))
        operands = source.sample(list(self.formulas), count)
        products = tuple((operand,) for operand in operands)
        if not products:
            return Formula((), number=source.randrange(MODULUS))
        sign = source.choice(("", "+", "*"))
        number = source.randrange(2, MODULUS) if sign else 0
        return Formula(products, minus=count == 2 and source.random() < 0.5, sign=sign, number=number)


class _Writer:
    """The solution as it is written, with where everything in it stands."""

    def __init__(self, letters: list[str], start: int) -> None:
        self._letters = iter(letters)
        self._start = start
        self._names: dict[Parameter | str, str] = {}
        self._defined: dict[str, int] = {}
        self.values: dict[Parameter, int] = {}
        self.text = ""
        self.operands: list[tuple[int, int]] = []
        self.sentences: list[tuple[int, int]] = []

    @property
    def place(self) -> int:
        return self._start + len(self.text)

    def define(self, parameter: Parameter, formula: Formula) -> None:
        """Write the steps that give `parameter` its value."""
        name = self._names[parameter] = next(self._letters)
        self.text += f" Define {parameter.words} as {name};"
        steps = self._steps(formula)
        known: list[tuple[str, int]] = []
        for number, (sign, operands) in enumerate(steps):
            terms = [known.pop(0) if operand is None else self._term(operand) for operand in operands]
            last = number == len(steps) - 1
            result = name if last else next(self._letters)
            value = _apply(sign, [value for _, value in terms])
            self._write(result, sign, terms, value)
            known.append((result, value))
        self.values[parameter] = known[-1][1]
        self.text = self.text.removesuffix(";") + "."

    def _steps(self, formula: Formula) -> list[tuple[str, tuple[int | Parameter | None, ...]]]:
        """Signs and operands; None takes the oldest result that no step has taken."""
        if not formula.products:
            return [("", (formula.number,))]
        steps: list[tuple[str, tuple[int | Parameter | None, ...]]] = []
        waiting: list[Parameter | None] = []
        for product in formula.products:
            if len(product) == 2:
                steps.append(("*", product))
            waiting.append(None if len(product) == 2 else product[0])
        total = waiting[0]
        for other in waiting[1:]:
            steps.append(("-" if formula.minus else "+", (total, other)))
            total = None
        if formula.sign:
            steps.append((formula.sign, (formula.number, total)))
        return steps or [("", (total,))]

    def _term(self, operand: int | Parameter) -> tuple[str, int]:
        if isinstance(operand, int):
            return str(operand), operand
        return self._names[operand], self.values[operand]

    def _write(self, result: str, sign: str, terms: list[tuple[str, int]], value: int) -> None:
        self.text += f" {result} ="
        for number, (name, _) in enumerate(terms):
            self.text += f" {sign}" if number else ""
            if name in self._defined:
                self.operands.append((self.place, self._defined[name]))
            self.text += f" {name}"
        if sign:
            self.text += " = " + f" {sign} ".join(str(each) for _, each in terms)
        if sign or not terms[0][0].isdecimal():
            self.text += " ="
            self._defined[result] = self.place
            self.text += f" {value};"
        else:
            self._defined[result] = self.place - len(f" {value}")
            self.text += ";"


def _apply(sign: str, values: list[int]) -> int:
    first, *rest = values
    for second in rest:
        first = {"+": first + second, "-": first - second, "*": first * second}[sign]
    return first % MODULUS


def _lay(source: random.Random, edges: int) -> list[dict[str, list[str]]]:
    """What lies in each thing of each layer but the last, `edges` in all, in layers just wide enough or wider."""
    width = max(2, min(WIDEST, 1 + edges // 4))
    while True:
        layers = [source.sample(names, source.randint(1, width)) for names in NAMES]
        free = [
            (layer, outer, inner)
            for layer in range(len(layers) - 1)
            for outer in layers[layer]
            for inner in layers[layer + 1]
        ]
        if len(free) >= edges:
            break
    inside: list[dict[str, list[str]]] = [{} for _ in layers[:-1]]
    for layer, outer, inner in source.sample(free, edges):
        inside[layer].setdefault(outer, []).append(inner)
    return inside
