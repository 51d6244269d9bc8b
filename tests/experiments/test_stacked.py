"""A stack of models is its models, side by side."""

import torch

from experiments.stacked import Stack, losses, train
from phasewise.data.suite import Lag
from phasewise.encodings import RoPEConfig
from phasewise.frequencies import Linear
from phasewise.model import ModelConfig, Transformer, rescaled

CONFIG = ModelConfig(vocab_size=16, width=32, layers=2, heads=2, encoding=RoPEConfig())
LEARNING = {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup": 2, "block": 3}


def test_a_stack_gives_each_models_own_logits_with_its_own_rates_and_with_others() -> None:
    stack = Stack(CONFIG, [4, 5])
    tokens = torch.randint(16, (2, 3, 20), generator=torch.Generator().manual_seed(0))
    for frequencies in (None, Linear(base=1e4, factor=2.0)):
        together = stack(tokens, frequencies=frequencies)
        for index, seed in enumerate((4, 5)):
            torch.manual_seed(seed)
            alone = Transformer(CONFIG)
            assert all(
                map(torch.equal, alone.state_dict().values(), stack.model(index).state_dict().values())
            )
            served = alone if frequencies is None else rescaled(alone, frequencies)
            torch.testing.assert_close(together[index], served(tokens[index]))


def test_models_in_a_stack_do_not_touch_each_other_while_they_learn() -> None:
    def taught(seeds: list[int], tasks: list[Lag]) -> Stack:
        stack = Stack(CONFIG, seeds)
        generators = [torch.Generator().manual_seed(task.block) for task in tasks]

        def draw(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
            parts = [
                task.rows(torch.rand(steps * 2, 24, 2, generator=generator))
                for task, generator in zip(tasks, generators, strict=True)
            ]
            tokens, targets = (
                torch.stack([part[i].unflatten(0, (steps, 2)) for part in parts], 1) for i in (0, 1)
            )
            return tokens, targets

        train(stack, draw, steps=6, say=lambda _done, _loss: None, **LEARNING)
        return stack

    both, alone = taught([0, 1], [Lag(3), Lag(5)]), taught([1], [Lag(5)])
    for name, together, single in zip(both.names, both.weights, alone.weights, strict=True):
        torch.testing.assert_close(together[1], single[0], msg=name)


def test_a_stacks_losses_are_means_over_what_is_scored() -> None:
    logits = torch.randn(2, 1, 4, 16, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[[1, -100, 3, 4]], [[-100, -100, 2, -100]]])
    scored = logits[0, 0, [0, 2, 3]].log_softmax(-1)[range(3), [1, 3, 4]]
    expected = torch.stack([-scored.mean(), -logits[1, 0, 2].log_softmax(-1)[2]])
    torch.testing.assert_close(losses(logits, targets), expected)
