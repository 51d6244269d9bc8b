import math

import pytest
import torch
from pydantic import ValidationError

from phasewise.encodings import ENCODINGS, named
from phasewise.model import ModelConfig, Transformer
from phasewise.train.optimizer import build_optimizer, learning_rate, shares
from phasewise.train.recipe import SCALINGS, Budget, CompareRecipe
from phasewise.train.schedule import WarmupStableDecay

from .small import recipe


def test_learning_rate_rises_in_a_line_then_falls_along_half_a_cosine():
    budget = Budget(steps=50, warmup=10, learning_rate=2e-3, final_learning_rate=5e-4)
    for step in range(50):
        if step < 10:
            wanted = 2e-3 * (step + 1) / 10
        else:
            wanted = 5e-4 + 1.5e-3 * math.cos(math.pi / 2 * (step - 10) / 39) ** 2
        assert learning_rate(budget, step) == pytest.approx(wanted, rel=1e-12)


def test_warmup_stable_decay_stays_at_the_highest_rate_and_falls_along_a_line_at_the_end():
    schedule = WarmupStableDecay(decay=0.25)
    budget = Budget(steps=49, warmup=8, learning_rate=2e-3, final_learning_rate=5e-4, schedule=schedule)
    rates = [learning_rate(budget, step) for step in range(49)]
    assert rates[7:39] == [2e-3] * 32
    for number, rate in enumerate(rates[38:]):
        assert rate == pytest.approx(2e-3 - 1.5e-3 * number / 10, rel=1e-9)


def test_without_warmup_the_first_step_has_the_highest_rate():
    assert learning_rate(Budget(steps=1, warmup=0), 0) == Budget().learning_rate


def test_only_matrices_decay_and_phases_do_not():
    model = Transformer(recipe("pope").model)
    decayed, kept = (set(map(id, group["params"])) for group in build_optimizer(recipe(), model).param_groups)
    for name, parameter in model.named_parameters():
        wanted = not ("norm" in name or "encoding" in name)
        assert (id(parameter) in decayed, id(parameter) in kept) == (wanted, not wanted), name


def test_phases_with_a_rate_of_their_own_are_a_group_of_their_own():
    model = Transformer(recipe("pope").model)
    given = recipe(encoding_rate=10.0)
    _, _, phases = build_optimizer(given, model).param_groups
    assert {id(parameter) for parameter in phases["params"]} == {
        id(parameter) for name, parameter in model.named_parameters() if "encoding" in name
    }
    assert phases["weight_decay"] == 0
    assert shares(given) == (1, 1, 10)


def test_a_decayed_weight_without_gradient_shrinks_by_rate_times_decay_and_a_phase_stays():
    model = Transformer(recipe("pope").model)
    torch.nn.init.ones_(model.blocks[0].attention.encoding.phase)
    optimizer = build_optimizer(recipe(weight_decay=0.5, learning_rate=1e-2), model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if "norm" in name or "encoding" in name else 1 - 1e-2 * 0.5
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"encodings": ("rope", "fire")}, "unknown encoding 'fire'; choose from " + ", ".join(ENCODINGS)),
        ({"encodings": ("rope", "rope")}, "'rope' is given twice"),
        ({"encodings": ()}, "at least 1 item"),
        ({"seeds": ()}, "at least 1 item"),
        ({"heads": 3}, "width 64 does not divide into 3 heads: choose another number of heads or another"),
        ({"scalings": ("pi",)}, "unknown scaling 'pi'; choose from linear, ntk, yarn"),
        ({"seeds": (3, 3)}, "3 is given twice"),
        ({"evaluate_lengths": (1,)}, "greater than or equal to 2"),
        ({"steps": 10, "warmup": 10}, "warmup 10 leaves nothing of steps 10"),
        ({"learning_rate": 1e-4}, "final_learning_rate 0.0005 is above learning_rate 0.0001"),
        ({"learning_rate": math.inf}, "finite"),
        ({"learning_rat": 1e-4}, "Extra inputs"),
    ],
)
def test_bad_field_is_named_with_its_remedy(fields, said):
    with pytest.raises(ValidationError, match=said.replace("(", r"\(")):
        CompareRecipe(**fields)


def test_recipe_survives_json():
    given = CompareRecipe(encodings=("tapa",), seeds=(1, 2), evaluate_lengths=(64,), evaluate_stride=8)
    assert CompareRecipe.model_validate_json(given.model_dump_json()) == given
    train = recipe("pope", dropout=0.1)
    assert type(train).model_validate_json(train.model_dump_json()) == train


def test_lengths_are_one_two_four_and_eight_times_the_context():
    assert CompareRecipe(context=24).lengths(task=False) == (24, 48, 96, 192)
    assert CompareRecipe(context=24).lengths(task=True) == (24,)
    assert CompareRecipe(context=24, evaluate_lengths=(99, 7)).lengths(task=False) == (7, 99)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaling_by_one_leaves_the_rates_of_training(scaling):
    trained = named("rope").frequencies
    torch.testing.assert_close(
        SCALINGS[scaling](trained.base, 128, 1.0).rates(16), trained.rates(16), rtol=0, atol=0
    )


def test_trainings_of_a_comparison_differ_in_encoding_and_seed_alone():
    whole = CompareRecipe(width=32, heads=2, layers=1, dropout=0.1)
    one = whole.training("rope", 0, vocab_size=9)
    other = whole.training("pope", 1, vocab_size=9)
    assert one.model == ModelConfig(
        vocab_size=9, width=32, layers=1, heads=2, dropout=0.1, encoding=named("rope")
    )
    assert one.model_copy(update={"model": other.model, "seed": 1}) == other


@pytest.mark.parametrize(
    "name",
    [
        *("batch_size", "context", "steps", "warmup", "checkpoint_every", "threads"),
        *("width", "layers", "heads", "evaluate_tokens", "evaluate_stride", "evaluate_lengths", "seeds"),
    ],
)
def test_every_number_has_an_upper_bound(name):
    value = 10**23
    with pytest.raises(ValidationError) as refused:
        CompareRecipe.model_validate({name: (value,) if name in ("evaluate_lengths", "seeds") else value})
    assert [problem["type"] in ("less_than", "less_than_equal") for problem in refused.value.errors()] == [
        True
    ]


def test_negative_seed_is_one_problem():
    with pytest.raises(ValidationError) as refused:
        CompareRecipe(seeds=(-1,))
    assert [problem["loc"] for problem in refused.value.errors()] == [("seeds", 0)]


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"context_processes": 2}, 3, "3 processes do not divide into groups of context_processes 2"),
        ({"context_processes": 2, "context": 10}, 2, "context 10 does not divide .* choose a multiple of 4"),
        ({"context_processes": 2, "batch_size": 3}, 4, "batch_size 3 does not divide into 2 processes"),
    ],
)
def test_processes_that_cannot_share_rows_are_refused(changes, processes, message):
    with pytest.raises(ValueError, match=message):
        recipe(**changes).divide(processes)
