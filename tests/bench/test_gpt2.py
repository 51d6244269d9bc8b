import torch

from phasewise.bench.gpt2 import GPT2, Training
from phasewise.encodings import named
from phasewise.model import ModelConfig, Transformer
from phasewise.train.objective import summed_loss

SIZES = {"layers": 2, "heads": 2, "width": 32}


def twins():
    """The single-file model, and ours with its weights."""
    training = Training(context=24, vocabulary=64, device="cpu", **SIZES)
    shape = {**SIZES, "vocab_size": 64, "activation": "gelu", "tied": True, "encoding": named("rope")}
    ours = Transformer(ModelConfig.model_validate(shape))
    weights = dict(training.model.state_dict())
    for layer in range(2):
        parts = weights.pop(f"blocks.{layer}.qkv.weight").chunk(3)
        for name, weight in zip(("query", "key", "value"), parts, strict=True):
            weights[f"blocks.{layer}.attention.{name}.weight"] = weight
        weights[f"blocks.{layer}.attention.output.weight"] = weights.pop(f"blocks.{layer}.output.weight")
        for name in ("up", "down"):
            weights[f"blocks.{layer}.feed_forward.{name}.weight"] = weights.pop(
                f"blocks.{layer}.{name}.weight"
            )
    ours.load_state_dict(weights)
    return training, ours


def test_single_file_trainer_computes_our_model_with_rope():
    training, ours = twins()
    tokens = torch.randint(64, (3, 25), generator=torch.Generator().manual_seed(0))
    loss = training.model(tokens[:, :-1], tokens[:, 1:], training.cos, training.sin)
    wanted = summed_loss(ours(tokens[:, :-1]), tokens[:, 1:]) / 72
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(
        training.model.embedding.weight.grad, ours.embedding.weight.grad, rtol=1e-4, atol=1e-6
    )


def test_single_file_trainer_starts_as_gpt2_does():
    model = GPT2(512, layers=8, heads=2, width=256)
    assert abs(model.embedding.weight.std().item() - 0.02) < 1e-3
    assert abs(model.blocks[0].down.weight.std().item() - 0.02 / 4) < 1e-3
