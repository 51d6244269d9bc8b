"""Generated problems: solved again from their words alone, with the stated steps, lengths and distances."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phasewise.data import NOT_SCORED, batch, load, windows
from phasewise.data.codec import text_codec
from phasewise.data.igsm import LEVELS, Problem, Problems, problem

KINDS = ("Towns", "Buildings", "Rooms", "Furniture")
SENTENCE = re.compile(r"The number of each (.+?)'s (.+?) is (.+?)\. ")
QUESTION = re.compile(r"How many (.+?) does each (.+?) have\?$")


def solve(prompt: str) -> int:
    """The answer by the meaning of the words: each quantity looked up, abstract ones by walking what lies inside."""
    given = {(outer, inner): words for outer, inner, words in SENTENCE.findall(prompt)}
    inside: dict[str, list[str]] = {}
    for outer, inner in given:
        inside.setdefault(outer, []).append(inner)

    def count(outer: str, wanted: str) -> int:
        if (outer, wanted) in given:
            return meaning(given[outer, wanted])
        assert wanted in KINDS
        return sum(
            count(outer, inner) * (1 if kind(inner) == wanted else count(inner, wanted))
            for inner in inside.get(outer, ())
            if kind(inner) == wanted or reaches(inner, wanted)
        )

    def kind(thing: str) -> str:
        above = [outer for outer, members in inside.items() if thing in members]
        return KINDS[KINDS.index(kind(above[0])) + 1] if above else KINDS[top.get(thing, 0)]

    def reaches(thing: str, wanted: str) -> bool:
        return any(kind(inner) == wanted or reaches(inner, wanted) for inner in inside.get(thing, ()))

    def one(words: str) -> int:
        outer, inner = re.fullmatch(r"each (.+?)'s (.+)", words).groups()  # pyright: ignore
        return count(outer, inner)

    def meaning(words: str) -> int:
        if words.isdecimal():
            return int(words)
        if found := re.fullmatch(r"(\d+) more than (.+)", words):
            return int(found[1]) + meaning(found[2])
        if found := re.fullmatch(r"(\d+) times (.+)", words):
            return int(found[1]) * meaning(found[2])
        if found := re.fullmatch(r"the difference of (.+) and (.+)", words):
            return one(found[1]) - one(found[2])
        if found := re.fullmatch(r"the sum of (.+) and (.+)", words):
            return sum(one(each) for each in [*found[1].split(", "), found[2]])
        return one(words)

    from phasewise.data.igsm import NAMES

    top = {name: layer for layer, names in enumerate(NAMES) for name in names}
    wanted, outer = QUESTION.search(prompt).groups()  # pyright: ignore
    return count(outer, wanted) % 23


def made(level: str, count: int, operations: int | None = None) -> list[Problem]:
    return [problem(random.Random(f"{level} {each}"), LEVELS[level], operations) for each in range(count)]


@pytest.mark.parametrize("level", LEVELS)
def test_the_answer_is_what_the_words_of_the_problem_say(level: str) -> None:
    answers = set()
    for each in made(level, 300):
        assert each.answer == solve(each.prompt)
        assert each.solution.endswith(f" Answer: {each.answer}.")
        answers.add(each.answer)
    assert len(answers) == 23


def test_every_step_of_a_solution_is_right_and_counted_and_uses_what_was_defined() -> None:
    for each in made("hard", 200):
        values: dict[str, int] = {}
        steps = re.findall(r" ([A-Za-z]) = ([^;]+?)[;.](?= )", each.solution)
        for name, equation in steps:
            first, *rest = equation.split(" = ")
            for letter, value in values.items():
                first = re.sub(rf"\b{letter}\b", str(value), first)
            values[name] = eval(first) % 23
            assert all(eval(part) % 23 == values[name] for part in rest)
        assert len(steps) == each.operations
        assert values[steps[-1][0]] == each.answer


def test_operations_stay_within_the_level_and_can_be_fixed() -> None:
    for level, most in (("medium", 15), ("hard", 19)):
        assert max(each.operations for each in made(level, 400)) == most
    for wanted in (1, 7, 20):
        assert {each.operations for each in made("hard", 10, wanted)} == {wanted}


def test_uses_point_at_the_same_quantity_s_value_and_sentence() -> None:
    for each in made("medium", 100):
        text = each.text
        for use, definition in each.operands:
            assert use > definition
            letter = text[use + 1]
            assert re.search(rf" {letter} =(?: [^;.]* =)?$", text[:definition])
        for use, definition in each.sentences:
            words = re.match(r" Define (each .+?) as [A-Za-z];", text[use:])
            assert words is not None
            assert text[definition:].lstrip().startswith(f"The number of {words[1]} is")


@pytest.mark.parametrize(("level", "prompt", "solution"), [("medium", 242, 100), ("hard", 279, 132)])
def test_lengths_in_gpt2_tokens_are_near_the_original_s(level: str, prompt: int, solution: int) -> None:
    codec = text_codec("gpt2", lambda: ())
    found = made(level, 400)
    for part, expected in (("prompt", prompt), ("solution", solution)):
        texts = [getattr(each, part).encode() for each in found]
        assert np.mean([len(tokens) for tokens in codec.encode(texts)]) == pytest.approx(expected, rel=0.1)


def test_lengths_do_not_depend_on_a_fixed_number_of_operations() -> None:
    means = [
        np.mean([len(each) for each in load(f"igsm:{count}", tokenizer="gpt2").split("test")[:20]])
        for count in (2, 8, 20)
    ]
    assert means == pytest.approx([np.mean(means)] * 3, rel=0.05)


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_distances_are_those_between_tokens(tokenizer: str) -> None:
    corpus = load("igsm:medium", tokenizer=tokenizer)
    split = corpus.split("validation")
    assert isinstance(split, Problems)
    for index in range(20):
        tokens, question = split[index], split.problem(index)
        operands, sentences = split.distances(index)
        pairs: list[tuple[np.ndarray, list[tuple[int, int]]]] = [
            (operands, question.operands),
            (sentences, question.sentences),
        ]
        for distances, places in pairs:
            for distance, (use, definition) in zip(distances.tolist(), places, strict=True):
                ends = np.cumsum([len(corpus.decode(tokens[each : each + 1])) for each in range(len(tokens))])
                at = np.concatenate([[0], ends])
                assert distance == np.searchsorted(at, use) - np.searchsorted(at, definition)


def answers(corpus, batches: Callable) -> list[str]:
    return [corpus.decode(row[row != NOT_SCORED].numpy()) for each in batches for row in each.targets]


def test_the_whole_solution_is_scored_and_nothing_else() -> None:
    corpus = load("igsm:medium", tokenizer="gpt2")
    assert corpus.task is not None
    length = corpus.task.row_length
    split = corpus.split("test")
    assert isinstance(split, Problems)
    found = windows(corpus, "test", length=length, limit_tokens=12, batch_size=5)
    assert answers(corpus, found) == [split.problem(index).solution for index in range(12)]
    assert found.scored == sum(each.scored for each in found)
    drawn = batch(corpus, "train", step=0, context=length, batch_size=3, seed=0)
    assert all(text.startswith(" Define each") for text in answers(corpus, [drawn]))


def test_examples_are_pure_functions_of_their_index_and_fit_their_rows() -> None:
    first, again = load("igsm:hard"), load("igsm:hard")
    assert first.sha256 == again.sha256 != load("igsm:medium").sha256
    split = first.split("train")
    assert np.array_equal(split.take(np.array([999_999]))[0], again.split("train")[999_999])
    assert not np.array_equal(split[0], first.split("test")[0])
    assert first.task is not None
    assert max(len(each) for each in split[:100]) <= first.task.row_length + 1


def test_the_solution_is_found_with_a_tokenizer_whose_question_marks_stick_to_words(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    split = load("igsm:medium").split("train")
    assert isinstance(split, Problems)
    texts = [split.problem(index).text for index in range(40)]
    tokenizer.train_from_iterator(
        texts, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    )
    tokenizer.save(str(tmp_path / "words.json"))
    corpus = load("igsm:medium", tokenizer=str(tmp_path / "words.json"))
    assert corpus.task is not None
    for example in corpus.split("train")[:20]:
        answer = corpus.decode(example[-corpus.task.answer_of(example) :])
        assert answer.startswith("Define each")
        assert "?" not in answer


@pytest.mark.parametrize(
    ("name", "tokenizer", "message"),
    [
        ("igsm:easy", "bytes", "no level 'easy' of igsm; give medium, hard or operations from 1 to 20"),
        ("igsm:21", "bytes", "no level '21'"),
        ("igsm:hard", "bpe:500", "'bpe:500' has nothing to learn from; give bytes or gpt2"),
    ],
)
def test_what_cannot_be_generated_says_what_can(name: str, tokenizer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name, tokenizer=tokenizer)
