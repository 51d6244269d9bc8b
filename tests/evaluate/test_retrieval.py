import re

import numpy as np
import pytest
import torch
from torch import nn

from phasewise.encodings import RoPEConfig
from phasewise.evaluate import passkeys, retrieve, slices
from phasewise.model import ModelConfig, Transformer
from phasewise.model.generate import generate

CPU = torch.device("cpu")
FILLER = np.frombuffer(b"It was the best of times, it was the worst of times. " * 60, dtype=np.uint8)
SENTENCE = re.compile(r"\nThe pass key of (\w+) is (\d{5})\. Remember it\.\n")


def made(**options):
    return passkeys(
        FILLER, encode=str.encode, **{"length": 400, "depths": (0.0, 0.3, 1.0), "examples": 2, **options}
    )


def text(tokens):
    return bytes(tokens.tolist()).decode()


class Reader(nn.Module):
    """Answers by reading: after a question it spells the number told for that name, one place early or late.

    `sight` is how far back it sees; without the needle in sight it says zeros.
    """

    def __init__(self, sight=10**9):
        super().__init__()
        self.sight = sight

    def forward(self, tokens, *, at=None):
        logits = torch.zeros(*tokens.shape, 256)
        for row in range(tokens.shape[0]):
            for place in range(tokens.shape[1]):
                seen = text(tokens[row, max(0, place + 1 - self.sight) : place + 1])
                logits[row, place, self.next(seen)] = 20.0
        return logits

    def next(self, seen):
        asked = re.search(r"\nThe pass key of (\w+) is( ?\d{0,5})$", seen)
        if not asked:
            return 0
        told = dict(SENTENCE.findall(seen)).get(asked[1], "00000")
        return ord(f" {told}."[len(asked[2])])


@pytest.mark.parametrize("needles", [1, 3])
def test_row_has_its_length_the_needle_at_its_depth_and_the_question_last(needles):
    rows = made(needles=needles)
    assert [row.depth for row in rows] == [0.0, 0.0, 0.3, 0.3, 1.0, 1.0]
    for row in rows:
        said = text(row.tokens)
        told = dict(SENTENCE.findall(said))
        assert len(row.tokens) == row.length == 400
        assert len(told) == needles == len(set(told.values()))
        name = re.search(r"\nThe pass key of (\w+) is$", said)[1]
        assert text(row.answer) == f" {told[name]}"
        sentences = list(SENTENCE.finditer(said))
        place = next(match.start() for match in sentences if match[1] == name)
        filler_before = place - sum(len(match[0]) for match in sentences if match.start() < place)
        room = 400 - sum(len(match[0]) for match in sentences) - len(f"\nThe pass key of {name} is")
        assert filler_before == round(row.depth * room)
        assert SENTENCE.sub("", said).rpartition("\n")[0] in bytes(FILLER).decode()


def test_an_example_is_the_same_at_every_depth_and_rows_repeat_with_the_seed():
    rows = made(needles=2)
    for first, second in ((0, 2), (2, 4), (1, 3)):
        assert torch.equal(rows[first].answer, rows[second].answer)
        assert sorted(rows[first].tokens.tolist()) == sorted(rows[second].tokens.tolist())
    again, other = made(needles=2), made(needles=2, seed=1)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(rows, again, strict=True))
    assert not any(torch.equal(a.tokens, b.tokens) for a, b in zip(rows, other, strict=True))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_model_that_reads_finds_every_number_and_one_of_short_sight_only_the_near_ones(batch_size):
    rows = made(needles=2, length=300)
    whole = retrieve(Reader(), rows, device=CPU, batch_size=batch_size)
    assert [(cell.length, cell.depth, cell.examples) for cell in whole.cells] == [
        (300, depth, 2) for depth in (0.0, 0.3, 1.0)
    ]
    assert all(cell.exact == 1 and cell.loss < 1e-4 for cell in whole.cells)
    near = retrieve(Reader(sight=100), rows, device=CPU, batch_size=batch_size)
    assert [cell.exact for cell in near.cells] == [0, 0, 1]
    assert near.cells[0].loss > 5 > 1e-4 > near.cells[2].loss


def small(vocab_size=256):
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=vocab_size, width=16, layers=2, heads=2, encoding=RoPEConfig())
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def test_exact_and_loss_equal_greedy_decoding_and_a_loop_over_answer_tokens():
    model = small()
    rows = made(length=120, depths=(0.5,), examples=3)
    hit = generate(model, rows[1].tokens[None], length=6)[0, -6:]
    rows = (rows[0], type(rows[1])(rows[1].tokens, hit, 0.5, 120), rows[2])
    losses, right = [], []
    with torch.no_grad():
        for row in rows:
            right.append(torch.equal(generate(model, row.tokens[None], length=6)[0, -6:], row.answer))
            for place in range(6):
                seen = torch.cat([row.tokens, row.answer[:place]])
                losses.append(-model(seen[None])[0, -1].double().log_softmax(-1)[row.answer[place]].item())
    (cell,) = retrieve(model, rows, device=CPU, batch_size=2).cells
    assert right == [False, True, False]
    assert cell.exact == 1 / 3
    assert cell.loss == pytest.approx(sum(losses) / 18, rel=1e-5)


def test_answers_of_several_lengths_share_a_batch():
    model = small()
    row, *_ = made(length=120, depths=(0.5,))
    short = type(row)(row.tokens, row.answer[:2], 1.0, 120)
    together = retrieve(model, (row, short), device=CPU, batch_size=2)
    apart = [retrieve(model, (one,), device=CPU).cells[0] for one in (row, short)]
    for cell, wanted in zip(together.cells, apart, strict=True):
        assert cell.loss == pytest.approx(wanted.loss, rel=1e-5)


@pytest.mark.parametrize("first", [0, 7, 29])
def test_logits_in_slices_equal_those_given_at_once(first, monkeypatch):
    model, tokens = small(), torch.arange(60).reshape(2, 30)
    monkeypatch.setattr(slices, "SLICE_BYTES", 4 * 2 * 256 * 8)
    with torch.no_grad():
        pieces = list(slices.sliced_logits(model, tokens, at=None, first=first))
        whole = model(tokens)
    assert [places.start for _, places, _ in pieces] == list(range(first, 30, 8))
    assert torch.allclose(torch.cat([logits for *_, logits in pieces], 1), whole[:, first:], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 60}, r"length 60 does not hold 1 needles and a question, \d+ tokens"),
        ({"length": 5000}, r"length 5000 needs \d+ tokens of filler, but there are 3180"),
        ({"depths": (0.5, 1.5)}, r"depths must be different numbers from 0 to 1, but are \[0.5, 1.5\]"),
        ({"depths": (0.5, 0.5)}, "depths must be different"),
        ({"needles": 24}, "needles must be from 1 to 23, but is 24"),
        ({"examples": 0}, "examples must be at least 1, but is 0"),
        ({"encode": lambda _text: []}, "the tokenizer makes no tokens of"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(options, said):
    with pytest.raises(ValueError, match=said):
        made(**options) if "encode" not in options else passkeys(FILLER, length=99, depths=(0,), **options)
