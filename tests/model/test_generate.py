import numpy as np
import pytest
import torch

from phasewise.encodings import NoPEConfig, RoPEConfig, TAPAConfig
from phasewise.model import Transformer, generate
from phasewise.model.generate import choose
from tests.model.small import config_of, model_of, tokens_of


@torch.no_grad()
def greedy(model, tokens, length):
    """Generation by its definition: a full pass for every token."""
    for _ in range(length):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


def test_greedy_takes_the_likeliest_token_of_a_full_pass_each_time(encoding):
    model, prompt = model_of(encoding), tokens_of(2, 4)
    assert torch.equal(generate(model, prompt, length=7), greedy(model, prompt, 7))


@pytest.mark.parametrize("encoding", [RoPEConfig(), TAPAConfig()])
def test_a_left_padded_prompt_is_continued_as_if_alone(encoding):
    model, prompts = model_of(encoding), tokens_of(3, 6)
    lengths = [6, 2, 4]
    mask = torch.arange(6)[None] >= 6 - torch.tensor(lengths)[:, None]
    together = generate(model, prompts, length=5, mask=mask)
    assert torch.equal(together[:, :6], prompts)
    for row, length in enumerate(lengths):
        alone = greedy(model, prompts[row : row + 1, 6 - length :], 5)
        assert torch.equal(together[row, 6 - length :], alone[0])


@pytest.mark.parametrize("length", [0, 1, 5])
def test_the_token_budget_is_exact_and_no_pass_is_wasted(length):
    model, passes = model_of(NoPEConfig()), []
    model.register_forward_hook(lambda *_: passes.append(1))
    assert generate(model, tokens_of(2, 3), length=length).shape == (2, 3 + length)
    assert len(passes) == length


def test_a_stopped_row_holds_only_the_stop_token_and_the_end_comes_when_all_have_stopped():
    model, prompt = model_of(RoPEConfig()), tokens_of(4, 3)
    free = generate(model, prompt, length=12)[:, 3:]
    stop = int(free[0, 2])
    stopped = generate(model, prompt, length=12, stop=stop)[:, 3:]
    ends = [(row == stop).nonzero().flatten().tolist() for row in free]
    for row, end in enumerate(ends):
        last = end[0] if end else 12
        assert torch.equal(stopped[row, :last], free[row, : stopped.shape[1]][:last])
        assert (stopped[row, last:] == stop).all()
    assert stopped.shape[1] == (max(end[0] for end in ends) + 1 if all(ends) else 12)
    other = int(free[1, 4])
    several = generate(model, prompt, length=12, stop=(stop, other))[:, 3:]
    for row, made in zip(free, several, strict=True):
        (ends_at,) = torch.isin(row, torch.tensor([stop, other])).nonzero()[:1].flatten().tolist() or [11]
        assert torch.equal(made[: ends_at + 1], row[: several.shape[1]][: ends_at + 1])
        assert (made[ends_at:] == row[ends_at]).all()
    for same in (np.array([stop])[0], torch.tensor(stop), torch.tensor([stop])):
        assert torch.equal(generate(model, prompt, length=12, stop=same)[:, 3:], stopped)
    alone = generate(model, prompt[:1], length=12, stop=stop)
    assert alone.shape[1] == 3 + ends[0][0] + 1


def test_a_seeded_generator_gives_the_same_draw_and_another_seed_another():
    model, prompt = model_of(NoPEConfig()), tokens_of(2, 3)

    def draw(seed):
        torch.rand(7)  # the global state has no say
        seeded = torch.Generator().manual_seed(seed)
        return generate(model, prompt, length=20, temperature=2.0, generator=seeded)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


LOGITS = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()


def shares(**options):
    draws = 20_000
    chosen = choose(LOGITS.expand(draws, 4), generator=torch.Generator().manual_seed(0), **options)
    return torch.bincount(chosen, minlength=4) / draws


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, [0.5, 0.1, 0.25, 0.15]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.01 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345]),
        ({"temperature": 1.0, "top_k": 2}, [2 / 3, 0.0, 1 / 3, 0.0]),
        ({"temperature": 1.0, "top_k": 9}, [0.5, 0.1, 0.25, 0.15]),
        ({"temperature": 1.0, "top_p": 0.4}, [1.0, 0.0, 0.0, 0.0]),
        ({"temperature": 1.0, "top_p": 0.6}, [2 / 3, 0.0, 1 / 3, 0.0]),
        ({"temperature": 1.0, "top_p": 1.0}, [0.5, 0.1, 0.25, 0.15]),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.8}, [2 / 3, 0.0, 1 / 3, 0.0]),
    ],
)
def test_draws_follow_the_distribution_asked_for(options, expected):
    expected = torch.tensor(expected)
    got = shares(**options)
    assert torch.equal(got == 0, expected == 0)
    deviation = (expected * (1 - expected) / 20_000).sqrt()
    assert ((got - expected).abs() <= 4 * deviation + 1e-6).all()


def test_top_k_keeps_exactly_k_of_equal_logits():
    chosen = choose(
        torch.zeros(2000, 5), temperature=1.0, top_k=2, generator=torch.Generator().manual_seed(0)
    )
    assert len(set(chosen.tolist())) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": -1}, "must not be negative, but is -1"),
        ({"length": 1, "temperature": -0.5}, "temperature must be 0 .* but is -0.5"),
        ({"length": 1, "top_k": 2}, "only apply to sampling; give a temperature above 0"),
        ({"length": 1, "generator": torch.Generator()}, "only apply to sampling"),
        ({"length": 1, "temperature": 1.0, "top_k": 0}, "top_k must be at least 1, but is 0"),
        ({"length": 1, "temperature": 1.0, "top_p": 0.0}, "top_p must be above 0 and at most 1, but is 0.0"),
        (
            {"length": 1, "mask": torch.ones(2, 4).bool()},
            r"mask \(2, 4\) must have the shape of tokens \(2, 3\)",
        ),
        ({"length": 1, "mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}, "pad prompts on the left"),
        ({"length": 1, "mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, "pad prompts on the left"),
        ({"length": 2.5}, "length is a number of tokens to add .* but is 2.5"),
        ({"length": 1, "temperature": "hot"}, "temperature must be 0 .* but is 'hot'"),
        (
            {"length": 1, "temperature": 1.0, "top_k": 2.5},
            "top_k must be at least 1, but is 2.5; give a number",
        ),
        ({"length": 1, "temperature": 1.0, "top_p": "most"}, "top_p must be above 0 .* but is 'most'"),
        ({"length": 1, "mask": [[1, 1, 1]] * 2}, "mask must be a tensor, but is list; use torch.as_tensor"),
        ({"length": 1, "mask": torch.zeros(2, 3)}, "of one that is added to scores, mask == 0"),
        ({"length": 1, "temperature": 1e-40}, "temperature must be 0 .* but is 1e-40"),
        (
            {"length": 1, "temperature": 1.0, "generator": 3},
            r"generator must be a torch.Generator, but is 3; use torch.Generator\(device\).manual_seed\(3\)",
        ),
        ({"length": 1, "stop": 2.0}, "stop must be a token's number, or several, but is 2.0"),
        ({"length": 1, "stop": ["2"]}, "stop must be a token's number, or several"),
    ],
)
def test_options_that_do_not_apply_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        generate(model_of(NoPEConfig()), tokens_of(2, 3), **options)


def test_a_model_that_would_drop_out_is_refused():
    model = Transformer(config_of(NoPEConfig(), dropout=0.1))
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        generate(model, tokens_of(1, 3), length=1)
    assert generate(model.eval(), tokens_of(1, 3), length=1).shape == (1, 4)


def test_a_prompt_that_is_no_tensor_of_tokens_is_refused():
    with pytest.raises(ValueError, match=r"tokens must be a tensor, but are list; use torch.as_tensor"):
        generate(model_of(NoPEConfig()), [[1, 2]], length=1)


@pytest.mark.parametrize("token", [-1, 11])
def test_a_prompt_with_a_token_that_the_model_does_not_know_is_refused(token):
    with pytest.raises(ValueError, match=f"tokens hold {token}, but the model knows 0 to 10; .* tokenizer"):
        generate(model_of(NoPEConfig(), vocab_size=11), torch.tensor([[1, token]]), length=1)


@pytest.mark.parametrize("model", [None, config_of(NoPEConfig()), torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match=r"model must be a Transformer, but is \w+; .* the one within"):
        generate(model, tokens_of(1, 3), length=1)


def test_a_compiled_model_goes_on_as_it_does_itself():
    model, tokens = model_of(NoPEConfig()), tokens_of(1, 3)
    assert generate(torch.compile(model, backend="eager"), tokens, length=2).equal(
        generate(model, tokens, length=2)
    )


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"T at least 1, but have shape \(1, 0\)"):
        generate(model_of(NoPEConfig()), tokens_of(1, 0), length=1)
