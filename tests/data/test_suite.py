"""The frequency suite: the kernels that the tasks state are those of what they generate."""

import numpy as np
import pytest
import torch

from phasewise.data import batch, load
from phasewise.data.suite import (
    LETTERS,
    NOT_SCORED,
    Addition,
    Blocks,
    Lag,
    RaisedCosine,
    Suite,
    Window,
    suite,
)

TASKS = (RaisedCosine(8), Window(4), Lag(5), Blocks(4), Blocks(6))


def drawn(task: Suite, rows: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return task.rows(torch.rand(rows, length, task.draws, generator=generator))


def coincidence(tokens: torch.Tensor, targets: torch.Tensor, lag: int) -> float:
    """How often a target is the token `lag` before it, beyond chance; counted pair by pair."""
    before, after = tokens[:, : tokens.shape[1] - lag], targets[:, lag:]
    scored = after != NOT_SCORED
    same = (before == after)[scored].double().mean().item()
    return (same - 1 / LETTERS) / (1 - 1 / LETTERS)


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_targets_coincide_with_earlier_tokens_as_the_kernel_says_and_with_none_beyond(task: Suite) -> None:
    tokens, targets = drawn(task, 400, 256)
    kernel = np.pad(task.kernel, (0, 4))
    assert task.kernel.sum() == pytest.approx(1)
    assert kernel[task.width] > 0
    assert not kernel[task.width + 1 :].any()
    found = np.array([coincidence(tokens, targets, lag) for lag in range(len(kernel))])
    assert np.abs(found / found.sum() - kernel).max() < 0.02


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_every_place_is_scored_from_which_the_whole_kernel_lies_in_the_row(task: Suite) -> None:
    _, targets = drawn(task, 3, 64)
    assert (targets[:, : task.width] == NOT_SCORED).all()
    assert (targets[:, task.width :] >= 0).all()


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_the_posterior_is_as_sure_as_it_is_right(task: Suite) -> None:
    tokens, targets = drawn(task, 200, 128)
    posterior = task.posterior(tokens, targets)
    scored = targets != NOT_SCORED
    entropy = torch.special.entr(posterior).sum(-1)[scored].mean().item()
    loss = -posterior.gather(-1, targets.clamp(min=0)[..., None])[..., 0][scored].log().mean().item()
    assert posterior.sum(-1)[scored].sub(1).abs().max() < 1e-4
    assert loss == pytest.approx(entropy, abs=0.03)


def test_the_posterior_of_blocks_is_that_of_bayes_over_all_beginnings_and_letters() -> None:
    task = Blocks(3)
    tokens, _ = drawn(task, 2, 11, seed=3)
    seen, absent = 0.5 + 0.5 / LETTERS, 0.5 / LETTERS
    for row in tokens:
        joint = np.zeros((task.block, LETTERS))
        for phase in range(task.block):
            of_block = (np.arange(11) + phase) // task.block
            likelihood = np.array(
                [
                    [
                        np.prod([seen if row[t] == letter else absent for t in np.flatnonzero(of_block == b)])
                        for letter in range(LETTERS)
                    ]
                    for b in range(of_block[-1] + 1)
                ]
            )
            asked = of_block[10 - task.block]
            others = np.delete(likelihood, asked, axis=0).mean(1).prod()
            joint[phase] = likelihood[asked] * others
        expected = joint.sum(0) / joint.sum()
        found = task.posterior(row[None], row[None])[0, 10].numpy()
        np.testing.assert_allclose(found, expected, rtol=2e-4)


@pytest.mark.parametrize("scale", [1.5, 2, 4])
def test_stretching_stretches_the_width(scale: float) -> None:
    assert Window(8).stretched(scale).width + 1 == 8 * scale
    assert Lag(8).stretched(scale).width == 8 * scale
    assert Blocks(8).stretched(scale).width + 1 == 16 * scale


@pytest.mark.parametrize(
    "task",
    [
        Addition(4, digits=4),
        Addition(5, digits=3),
        Addition(4, digits=2).stretched(2),
        Addition(4, digits=3).padded(2),
        Addition(4, digits=3).spaced(2),
    ],
    ids=repr,
)
def test_the_targets_of_an_addition_are_its_sum_and_follow_from_the_five_tokens_of_the_kernel(
    task: Addition,
) -> None:
    tokens, targets = drawn(task, 50, task.length)
    step, lags = task.spacing, np.flatnonzero(task.kernel)
    digits = 10 ** np.arange(task.digits)
    for row, wanted in zip(tokens.numpy(), targets.numpy(), strict=True):
        first = row[: step * task.digits : step]
        second = row[step * (task.block + 1) :][: step * task.digits : step]
        answer = wanted[wanted != NOT_SCORED]
        total = int(first @ digits + second @ digits)
        assert answer.tolist() == [total // 10**place % 10 for place in range(task.digits + 1)]
        for place in np.flatnonzero(wanted != NOT_SCORED)[1 : task.digits]:
            own, b, b_before, a, a_before = (int(row[place - lag]) for lag in lags)
            carry = int(own != (a_before + b_before) % 10) + (a_before + b_before) >= 10
            assert wanted[place] == (a + b + carry) % 10


def test_an_example_is_a_row_and_the_answer_after_it() -> None:
    corpus = suite("lag", 4)
    example = corpus.splits["train"][7]
    assert len(example) == 513
    assert example[-1] == example[-2 - 4]
    drawn_batch = batch(corpus, "train", step=0, context=512, batch_size=2, seed=0)
    assert drawn_batch.scored == 2
    assert drawn_batch.positions is None


def test_an_addition_is_scored_on_its_whole_sum() -> None:
    corpus = load("columns:3")
    text = corpus.decode(corpus.splits["test"][5])
    numbers, _, total = text.partition("=")
    first, _, second = numbers.partition("+")
    assert int(first[::-1]) + int(second[::-1]) == int(total[::-1])
    assert corpus.task is not None
    assert corpus.task.answer_length == len(total) == 4


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="no task 'ramp' in the suite; there are cosine"):
        suite("ramp", 4)
    with pytest.raises(ValueError, match="lag:x needs a block length in tokens, as in lag:16"):
        load("lag:x")
    with pytest.raises(ValueError, match=r"no corpus 'lag'.*lag:BLOCK"):
        load("lag")
    with pytest.raises(ValueError, match="blocks of at least 2 tokens, not 1"):
        suite("lag", 1)
    with pytest.raises(ValueError, match="5 digits do not fit a field of 4"):
        Addition(4, digits=5)
