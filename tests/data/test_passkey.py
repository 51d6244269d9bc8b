"""Rows to learn retrieval from: the number asked for stands once before, at any depth, and is what is scored."""

from __future__ import annotations

import re

import numpy as np
import pytest

from phasewise.data import NOT_SCORED, Corpus, batch, load, windows
from phasewise.data.passkey import ASKED, CLOSED, NAMES
from phasewise.evaluate import retrieval

NEEDLE = re.compile(r"\nThe pass key of (\w+) is (\d{5})\. Remember it\.\n")
QUESTION = re.compile(r"\nThe pass key of (\w+) is (\d{5})$")


@pytest.fixture(scope="module", params=[("passkey", "bytes"), ("needles", "bytes"), ("needles", "bpe:300")])
def corpus(request: pytest.FixtureRequest) -> Corpus:
    kind, tokenizer = request.param
    return load(f"{kind}:512", tokenizer=tokenizer)


def test_the_answer_is_the_number_that_the_name_was_given(corpus: Corpus) -> None:
    depths = []
    for row in corpus.split("train")[:60]:
        text = corpus.decode(row)
        assert len(row) == 513
        given = NEEDLE.findall(text)
        question = QUESTION.search(text)
        assert question is not None
        assert len(given) == len(dict(given)) == (1 if corpus.name.startswith("passkey") else 4)
        assert dict(given)[question[1]] == question[2]
        depths.append(text.index(f"of {question[1]} is") / len(text))
    assert min(depths) < 0.2
    assert max(depths) > 0.7
    assert np.mean(depths) == pytest.approx(0.45, abs=0.15)


def test_the_number_alone_is_scored(corpus: Corpus) -> None:
    for drawn in (
        batch(corpus, "train", step=3, context=512, batch_size=8, seed=0),
        *windows(corpus, "test", length=512, limit_tokens=8),
    ):
        for tokens, targets in zip(drawn.tokens, drawn.targets, strict=True):
            answer = corpus.decode(targets[targets != NOT_SCORED].numpy())
            assert re.fullmatch(r" \d{5}", answer)
            assert answer + CLOSED in corpus.decode(tokens.numpy())


def test_the_sentences_are_those_that_retrieval_is_evaluated_with() -> None:
    assert (ASKED, CLOSED, NAMES) == (retrieval.ASKED, retrieval.CLOSED, retrieval.NAMES)


def test_the_filler_of_a_split_is_its_own_novels() -> None:
    corpus, novels = load("passkey:300"), load("austen")
    for split in corpus.splits:
        text = corpus.decode(corpus.split(split)[0])
        filler = max(NEEDLE.split(QUESTION.sub("", text)), key=len)
        assert filler in novels.decode(np.concatenate(list(novels.split(split))))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("passkey:60", "rows of 60 tokens do not hold 1 needles and a question in a novel; give from"),
        ("needles:500000", "do not hold 4 needles .* to 43"),
        ("passkey:long", "passkey:long needs a length in tokens, as in passkey:1024"),
    ],
)
def test_a_length_that_cannot_be_says_which_can(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name)
