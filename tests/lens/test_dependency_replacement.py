import numpy as np
import pytest
import torch

from phasewise.encodings import RoPEConfig
from phasewise.lens.replacement import replacement
from phasewise.lens.verdict import judge
from phasewise.lens.width import measure_width
from phasewise.model import ModelConfig, Transformer

CLASSES = 8


def documents(count=3, length=400, seed=0):
    return list(np.random.default_rng(seed).integers(0, CLASSES, (count, length)))


def looks_back(lag, *, sharpness=3.0):
    """A model that believes each token to be the one `lag` before it."""

    def logits(tokens):
        seen = torch.roll(tokens, lag - 1, dims=1)
        return sharpness * torch.nn.functional.one_hot(seen, CLASSES).double()

    return logits


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_model_that_looks_at_one_place_has_its_loss_change_there_alone(lag):
    # Of periodic text it is right, so a wrong token costs it `sharpness` nats, and 7 of 8 draws are wrong.
    text = [np.tile(np.random.default_rng(seed).permutation(CLASSES)[:lag], 200) for seed in range(4)]
    curve = replacement(looks_back(lag), text, context=32, windows=200, replaced=8)
    at = curve.distances == lag
    np.testing.assert_allclose(curve.value[~at], 0, atol=1e-12)
    assert 0 < curve.value[at][0] <= 3.0


def test_rise_has_the_expected_size():
    text = [np.arange(400) % CLASSES]
    curve = replacement(looks_back(CLASSES), text, context=64, windows=300, replaced=8, seed=1)
    at = np.flatnonzero(curve.distances == CLASSES)[0]
    assert abs(curve.value[at] - 3.0 * (CLASSES - 1) / CLASSES) < 4 * curve.error[at]
    width = measure_width(curve)
    assert (width.kind, width.width) == ("compact", CLASSES)


def test_distances_between_measured_ones_count_for_the_nearest():
    text = [np.arange(2000) % 6]
    curve = replacement(looks_back(60), text, context=256, windows=300, replaced=8)
    (only,) = np.flatnonzero(curve.value)
    at = curve.distances[only]
    low = np.sqrt(curve.distances[only - 1] * at)
    high = np.sqrt(curve.distances[only + 1] * at)
    assert low < 60 < high
    sharing = np.floor(high) - np.floor(low)
    assert sharing > 1
    assert abs(curve.value[only] - 3.0 * 5 / 6 / sharing) < 4 * curve.error[only] + 0.1


def test_every_pair_of_a_replaced_and_a_later_place_is_counted_once():
    curve = replacement(looks_back(1), documents(), context=16, windows=10, replaced=4)
    assert curve.pairs[0] == 40
    assert (np.diff(curve.pairs) <= 0).all()
    assert 40 <= curve.pairs.sum() <= 40 * 16
    np.testing.assert_allclose(curve.shares.sum(0), 1)


def test_model_of_ours_and_its_curve_are_repeatable():
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=CLASSES, width=16, layers=1, heads=2, encoding=RoPEConfig())
    ).eval()
    curves = [replacement(model, documents(), context=16, windows=4, replaced=3, seed=5) for _ in range(2)]
    np.testing.assert_array_equal(curves[0].value, curves[1].value)
    assert np.isfinite(curves[0].value).all()


def test_model_that_looks_nowhere_is_undetermined():
    curve = replacement(lambda tokens: torch.zeros(*tokens.shape, CLASSES), documents(), context=16)
    width = measure_width(curve)
    assert width.kind == "none"
    assert judge(width, None, None).kind == "undetermined"


def test_ctrl_c_keeps_the_windows_that_are_done():
    asked = iter([False, True])
    curve = replacement(looks_back(1), documents(), context=16, windows=9, stop=lambda: next(asked))
    assert len(curve.parts) == 3


@pytest.mark.parametrize("context", [400, 1])
def test_context_that_no_document_fills_is_refused(context):
    with pytest.raises(ValueError, match="choose a context from 2 to 399"):
        replacement(looks_back(1), documents(), context=context)
