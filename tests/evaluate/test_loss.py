import math

import numpy as np
import pytest
import torch
from torch import nn

from phasewise.data import Batch, Corpus, Documents, windows
from phasewise.encodings import PoPEConfig
from phasewise.evaluate import measure, slices
from phasewise.evaluate.loss import token_losses
from phasewise.model import ModelConfig, Transformer
from phasewise.positions import Positions

CPU = torch.device("cpu")
VOCAB = 11


class Table(nn.Module):
    """Logits that depend on the token and the place alone."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(
            VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )

    def forward(self, tokens, *, at=None):
        places = torch.arange(tokens.shape[1]) if at is None else at.index
        return self.table[tokens] * (1 + places[..., None] / 10)


def made(lengths=(50, 31, 7), seed=0):
    random = np.random.default_rng(seed)
    split = Documents.join([random.integers(VOCAB, size=length) for length in lengths], vocab_size=VOCAB)
    return Corpus("made", "made", "none", "token", VOCAB, "hash", {"test": split}, decode=str)


def restated(model, batches):
    """The losses [(place, loss, right)] of all scored tokens, one by one."""
    found = []
    for batch in batches:
        for row in range(batch.tokens.shape[0]):
            for place, target in enumerate(batch.targets[row].tolist()):
                if target != -100:
                    logits = model.table[batch.tokens[row, place]] * (1 + place / 10)
                    weights = [math.exp(value) for value in logits.tolist()]
                    loss = -math.log(weights[target] / math.fsum(weights))
                    found.append((place, loss, weights[target] == max(weights)))
    return found


@pytest.mark.parametrize(("length", "stride"), [(16, 8), (16, 16), (30, 7), (2, 1)])
def test_loss_accuracy_and_positions_equal_a_loop_over_tokens(length, stride):
    model, batches = Table(), windows(made(), "test", length=length, stride=stride)
    measured = measure(model, batches, length=length, stride=stride, device=CPU)
    wanted = restated(model, batches)
    losses = [loss for _, loss, _ in wanted]
    assert measured.tokens == len(wanted) == 49 + 30 + 6
    assert measured.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert measured.perplexity == pytest.approx(math.exp(measured.loss), rel=1e-12)
    assert measured.bits == pytest.approx(measured.loss / math.log(2), rel=1e-12)
    assert measured.accuracy == sum(right for _, _, right in wanted) / len(wanted)
    assert (measured.length, measured.stride) == (length, stride)
    assert measured.windows == sum(batch.tokens.shape[0] for batch in batches)
    for band in measured.by_position:
        inside = [loss for place, loss, _ in wanted if band.first <= place <= band.last]
        assert band.tokens == len(inside)
        assert band.loss == pytest.approx(sum(inside) / len(inside), rel=1e-6)
    assert sum(band.tokens for band in measured.by_position) == measured.tokens


def test_every_length_scores_the_same_tokens():
    lengths = (8, 16, 32, 48)
    measured = [
        measure(Table(), windows(made(), "test", length=n, limit_tokens=70), length=n, stride=n, device=CPU)
        for n in lengths
    ]
    assert [m.tokens for m in measured] == [70] * 4


def test_how_rows_are_batched_changes_nothing():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=VOCAB, width=16, layers=2, heads=2, dropout=0.5, encoding=PoPEConfig())
    )
    one, *others = (
        measure(
            model,
            windows(made(), "test", length=16, stride=8, batch_size=size),
            length=16,
            stride=8,
            device=CPU,
        )
        for size in (1, 3, 100)
    )
    for other in others:
        assert other.model_dump(exclude={"loss", "perplexity", "bits", "by_position"}) == one.model_dump(
            exclude={"loss", "perplexity", "bits", "by_position"}
        )
        assert other.loss == pytest.approx(one.loss, rel=1e-6)


def test_losses_over_a_large_vocabulary_are_exact_to_a_few_roundings():
    made = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 64, 8192, generator=made)
    targets = torch.randint(8192, (4, 64), generator=made)
    targets[:, :5] = -100
    exact = (
        logits.double().logsumexp(-1) - logits.double().gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    )
    exact = exact.where(targets != -100, 0)
    off = (token_losses(logits, targets).double() - exact).abs().max()
    assert off <= 4 * torch.finfo(torch.float32).eps * exact.max()


def test_padding_is_neither_scored_nor_counted():
    tokens, targets = torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[3, 4, -100, -100, -100]])
    positions = Positions.padded(torch.tensor([[True, True, False, False, False]]))
    measured = measure(Table(), [Batch(tokens, targets, positions)], length=5, stride=5, device=CPU)
    assert measured.tokens == 2


def test_nothing_scored_is_refused():
    nothing = Batch(torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), -100), None)
    with pytest.raises(ValueError, match="no token is scored at length 4"):
        measure(Table(), [nothing], length=4, stride=4, device=CPU)


def test_exact_match_is_of_whole_answers():
    model, random = Table(), np.random.default_rng(1)
    tokens = torch.from_numpy(random.integers(VOCAB, size=(40, 6)))
    choices = (model.table[tokens] * (1 + torch.arange(6)[:, None] / 10)).argmax(-1)
    targets = torch.where(torch.rand(40, 6, generator=torch.Generator().manual_seed(0)) < 0.7, choices, 0)
    targets[:, :4] = -100
    targets[::2, 4] = -100
    wanted = [
        all(choice == target for choice, target in zip(*both, strict=True) if target != -100)
        for both in zip(choices.tolist(), targets.tolist(), strict=True)
    ]
    batches = [Batch(tokens[:25], targets[:25], None), Batch(tokens[25:], targets[25:], None)]
    measured = measure(model, batches, length=6, stride=6, device=CPU, answers=True)
    assert 0.3 < measured.exact < 0.95
    assert measured.exact == sum(wanted) / 40
    assert measure(model, batches, length=6, stride=6, device=CPU).exact is None


def test_long_rows_in_slices_are_measured_as_rows_given_at_once(monkeypatch):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=VOCAB, width=16, layers=2, heads=2, encoding=PoPEConfig()))
    batches = windows(made(), "test", length=30, stride=7, batch_size=2)
    once = measure(model, batches, length=30, stride=7, device=CPU)
    asked = []

    def logits(hidden):
        asked.append(hidden.shape[1])
        return Transformer.logits(model, hidden)

    monkeypatch.setattr(slices, "SLICE_BYTES", 4 * 2 * VOCAB * 8)
    monkeypatch.setattr(model, "logits", logits)
    sliced = measure(model, batches, length=30, stride=7, device=CPU)
    assert max(asked) == 8
    assert sum(asked) < 30 * len(batches), "places before the first scored one are not asked for"
    assert sliced.loss == pytest.approx(once.loss, rel=1e-6)
    assert [band.tokens for band in sliced.by_position] == [band.tokens for band in once.by_position]
    assert sliced.accuracy == once.accuracy


def test_many_short_rows_hold_no_more_logits_at_a_time_than_few_long_ones(monkeypatch):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=VOCAB, width=16, layers=1, heads=2, encoding=PoPEConfig()))
    tokens = torch.randint(VOCAB, (21, 3), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], None)
    once = measure(model, [batch], length=2, stride=2, device=CPU, answers=True)
    held = []

    def logits(hidden):
        held.append(hidden.shape[0] * hidden.shape[1])
        return Transformer.logits(model, hidden)

    monkeypatch.setattr(slices, "SLICE_BYTES", 4 * VOCAB * 8)
    monkeypatch.setattr(model, "logits", logits)
    sliced = measure(model, [batch], length=2, stride=2, device=CPU, answers=True)
    assert max(held) == 8
    assert sum(held) == 42
    assert sliced.loss == pytest.approx(once.loss, rel=1e-6)
    assert (sliced.accuracy, sliced.exact) == (once.accuracy, once.exact)


def test_a_loss_that_is_no_number_is_an_error_with_the_remedy():
    model = Transformer(ModelConfig(vocab_size=VOCAB, width=16, layers=1, heads=2, encoding=PoPEConfig()))
    with torch.no_grad():
        model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match=r"loss at length 5 is nan: .* try float32"):
        measure(model, windows(made(), "test", length=5), length=5, stride=5, device=CPU)
