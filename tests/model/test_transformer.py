import math

import numpy as np
import pytest
import torch

from phasewise.encodings import ALiBiConfig, NoPEConfig, PoPEConfig, RoPEConfig, TAPAConfig
from phasewise.frequencies import Geometric, YaRN
from phasewise.model import Transformer, rescaled
from phasewise.model.transformer import RMSNorm
from phasewise.positions import Positions
from tests.model.small import ENCODINGS, ORIGINAL, config_of, model_of, rules, tokens_of

LENGTH = 11


def rms(x, weight, eps=1e-6):
    return [
        w * value / math.sqrt(sum(v * v for v in x) / len(x) + eps)
        for value, w in zip(x, weight, strict=True)
    ]


def product(matrix, x):
    return [sum(m * value for m, value in zip(row, x, strict=True)) for row in matrix]


def turned(x, position, base):
    """RoPE on complex numbers: channel c and c + n are the real and imaginary part of one."""
    n = len(x) // 2
    pairs = [
        complex(x[c], x[c + n]) * complex(math.cos(a), math.sin(a))
        for c, a in ((c, position * base ** (-c / n)) for c in range(n))
    ]
    return [z.real for z in pairs] + [z.imag for z in pairs]


def restated(model, tokens, base):
    """The decoder's logits for one row in plain Python floats, token by token: no code is shared."""
    config = model.config
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    heads, groups, width = config.heads, config.heads // config.kv_heads, config.head_dim
    stream = [list(weights["embedding.weight"][token]) for token in tokens]
    for layer in range(config.layers):
        own = {
            n.removeprefix(f"blocks.{layer}."): w
            for n, w in weights.items()
            if n.startswith(f"blocks.{layer}.")
        }
        normed = [rms(x, own["attention_norm.weight"]) for x in stream]

        def split(name, x, own=own, norm=None):
            flat = product(own[f"attention.{name}.weight"], x)
            parts = [flat[start : start + width] for start in range(0, len(flat), width)]
            return parts if norm is None else [rms(part, own[f"attention.{norm}.weight"]) for part in parts]

        keys = [split("key", x, norm="key_norm") for x in normed]
        values = [split("value", x) for x in normed]
        for t, x in enumerate(normed):
            queries, mixed = split("query", x, norm="query_norm"), []
            for h in range(heads):
                query, g = turned(queries[h], t, base), h // groups
                scores = [
                    sum(a * b for a, b in zip(query, turned(keys[s][g], s, base), strict=True))
                    / math.sqrt(width)
                    for s in range(t + 1)
                ]
                total = sum(math.exp(score) for score in scores)
                shares = [math.exp(score) / total for score in scores]
                mixed += [sum(p * values[s][g][c] for s, p in enumerate(shares)) for c in range(width)]
            update = product(own["attention.output.weight"], mixed)
            stream[t] = [a + b for a, b in zip(stream[t], update, strict=True)]
        for t, x in enumerate(stream):
            x = rms(x, own["feed_forward_norm.weight"])
            gate, up = (product(own[f"feed_forward.{name}.weight"], x) for name in ("gate", "up"))
            hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            update = product(own["feed_forward.down.weight"], hidden)
            stream[t] = [a + b for a, b in zip(stream[t], update, strict=True)]
    head = weights["embedding.weight"] if config.tied else weights["head.weight"]
    return [product(head, rms(x, weights["norm.weight"])) for x in stream]


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_decoder_restated_in_plain_python(tied):
    model = model_of(RoPEConfig(frequencies=Geometric(base=100.0)), qk_norm=True, tied=tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    tokens = tokens_of(1, 6)
    expected = torch.tensor(restated(model, tokens[0].tolist(), 100.0), dtype=torch.float64)
    torch.testing.assert_close(model(tokens)[0], expected, rtol=0, atol=1e-11)


def test_a_gelu_model_is_down_gelu_up():
    model = model_of(NoPEConfig(), activation="gelu")
    x = torch.randn(3, 24, dtype=torch.float64)
    up, down = (model.blocks[0].feed_forward.get_submodule(name).weight for name in ("up", "down"))
    hidden = x @ up.T
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    torch.testing.assert_close(model.blocks[0].feed_forward(x), hidden @ down.T)


def test_later_tokens_never_change_earlier_logits(encoding):
    model, tokens = model_of(encoding), tokens_of(1, LENGTH)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 13
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().amin(-1).max() > 1e-3


def test_documents_of_a_packed_row_are_as_if_alone(encoding):
    model, tokens, lengths = model_of(encoding), tokens_of(1, LENGTH), [4, 7]
    packed = model(tokens, at=Positions.packed(lengths))
    separate = torch.cat([model(document) for document in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-12)


def test_a_document_of_a_packed_row_has_exactly_no_effect_on_another(encoding):
    model, tokens, at = model_of(encoding), tokens_of(1, LENGTH), Positions.packed([4, 7])
    embedded = []
    model.dropout.register_forward_hook(
        lambda _, __, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]
    )
    changed = tokens.clone()
    changed[:, :4] = (changed[:, :4] + 1) % 13
    before, after = model(tokens, at=at), model(changed, at=at)
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.equal(before[:, :4], after[:, :4])
    before[:, 4:].square().sum().backward()
    gradient = embedded[0].grad
    assert torch.equal(gradient[:, :4], torch.zeros_like(gradient[:, :4]))
    assert (gradient[:, 4:] != 0).any(-1).all()


def test_grouped_heads_equal_explicitly_repeated_ones(encoding):
    grouped = model_of(encoding)
    repeated = Transformer(config_of(encoding, kv_heads=4)).double().eval()
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            weights[name] = weight.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
    repeated.load_state_dict(weights)
    tokens = tokens_of(2, LENGTH)
    torch.testing.assert_close(repeated(tokens), grouped(tokens), rtol=0, atol=1e-12)


def test_a_window_hides_what_lies_outside_it_in_its_own_layer_alone():
    tokens = tokens_of(1, LENGTH)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 13

    def reach(window):
        model = model_of(RoPEConfig(), window=window)
        return int((model(tokens) != model(changed)).any(-1)[0].nonzero().max())

    assert reach(3) == 4  # two layers of reach 2
    assert reach((3, 2)) == 3
    assert reach((3, None)) == LENGTH - 1


def test_mixed_layers_use_the_encoding_given_to_each():
    model = model_of((RoPEConfig(), NoPEConfig()))
    assert [block.attention.encoding.kind for block in model.blocks] == ["rope", "nope"]
    tokens = tokens_of(1, LENGTH)
    uniform = model_of(RoPEConfig())
    uniform.load_state_dict(model.state_dict())
    assert not torch.allclose(model(tokens), uniform(tokens))


def test_what_hangs_on_the_embedding_module_acts():
    """As adapters and off-loading do."""
    model = model_of(RoPEConfig())
    tokens = tokens_of(1, 5)
    model.embedding.register_forward_hook(lambda module, given, rows: torch.zeros_like(rows))
    assert not model.hidden(tokens).any()


def test_keep_gives_the_last_logits_alone():
    model, tokens = model_of(RoPEConfig()), tokens_of(2, LENGTH)
    for keep in (2, np.uint8(2)):
        torch.testing.assert_close(model(tokens, keep=keep), model(tokens)[:, -2:], rtol=0, atol=1e-12)


def test_the_state_dict_holds_weights_and_learned_phases_and_no_frequencies(encoding):
    model = model_of(encoding)
    assert dict(model.named_buffers()) == {}
    kinds = {name.rsplit(".", 1)[1] for name in model.state_dict()}
    has_phase = any(config.kind == "pope" for config in model.config.encodings)
    assert kinds == ({"weight", "phase"} if has_phase else {"weight"})


@pytest.mark.usefixtures("nan_memory")
def test_a_model_built_without_memory_and_loaded_is_the_same(encoding):
    model, tokens = model_of(encoding), tokens_of(2, LENGTH)
    with torch.device("meta"):
        loaded = Transformer(model.config)
    loaded = loaded.double().to_empty(device="cpu").eval()
    assert loaded.embedding.weight.isnan().all()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(tokens), model(tokens))


def test_a_model_built_without_memory_draws_nothing(monkeypatch):
    """torch loads its compiler, which takes seconds, to draw normal numbers on the meta device."""
    drawn = []
    monkeypatch.setattr(torch.nn.init, "normal_", lambda *_, **options: drawn.append(options))
    with torch.device("meta"):
        Transformer(config_of(PoPEConfig(phase_init="uniform")))
    assert drawn == []
    Transformer(config_of(NoPEConfig()))
    assert len(drawn) > 1


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_built_without_memory_and_reset_starts_as_a_new_one(tied):
    encoding = PoPEConfig(phase_init="uniform")
    torch.manual_seed(3)
    new = Transformer(config_of(encoding, qk_norm=True, tied=tied))
    with torch.device("meta"):
        reset = Transformer(new.config)
    reset.to_empty(device="cpu")
    torch.manual_seed(3)
    reset.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in reset.parameters())
    phase = torch.stack([block.attention.encoding.phase for block in reset.blocks])
    assert phase.min() >= -2 * math.pi
    assert phase.max() <= 0
    assert phase.std() > 1
    assert new.state_dict().keys() == reset.state_dict().keys()


def test_weights_start_as_documented():
    torch.manual_seed(0)
    model = Transformer(config_of(NoPEConfig(), width=256, hidden=512, layers=8, vocab_size=512, head_dim=32))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
        else:
            residual = name.endswith(("output.weight", "down.weight"))
            expected = 0.02 / 4 if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 5 * expected / parameter.numel() ** 0.5


def test_parameters_are_counted_once_when_tied():
    untied, tied = (Transformer(config_of(NoPEConfig(), tied=tied)) for tied in (False, True))
    block = 24 * 32 + 2 * 24 * 16 + 32 * 24 + 3 * 24 * 32 + 2 * 24
    assert untied.parameter_count == 2 * block + 2 * 13 * 24 + 24
    assert untied.parameter_count - tied.parameter_count == 13 * 24


@pytest.mark.parametrize(
    "name", ["rope-geometric", "rope-longrope", "rope-dynamic_ntk", "pope-yarn", "tapa", "alibi"]
)
def test_casting_down_and_up_again_changes_nothing_but_the_rounding_of_weights(name):
    model, tokens = model_of(ENCODINGS[name], dtype=torch.float32), tokens_of(1, LENGTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    at = Positions.arange(LENGTH, start=100_000)
    before = model(tokens, at=at)
    assert torch.equal(model.bfloat16().float()(tokens, at=at), before)


def test_a_call_in_bfloat16_leaves_no_trace_in_later_calls():
    model, tokens = model_of(RoPEConfig(), dtype=torch.float32), tokens_of(1, LENGTH)
    before = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens).isfinite().all()
    assert torch.equal(model(tokens), before)


def test_the_norm_computes_in_float32_whatever_the_dtype():
    norm = RMSNorm(512, eps=1e-6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x = (torch.randn(4, 512) * 300).half()  # squares leave float16's range
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), exact, rtol=2**-11 + 1e-6, atol=0)  # one rounding


def test_dropout_acts_in_training_alone():
    model, tokens = model_of(NoPEConfig(), dropout=0.5), tokens_of(1, LENGTH)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(
    ("tokens", "places", "message"),
    [
        (tokens_of(5), None, r"tokens must be \[B, T\], but have shape \(5,\)"),
        (tokens_of(1, 5), Positions.arange(4), "5 tokens have 4 places"),
        (tokens_of(2, 5), Positions.arange(5).expand(3), "3"),
        ([[1, 2]], None, "tokens must be a tensor, but are list; use torch.as_tensor"),
        (torch.ones(1, 5), None, r"tokens must be int64, but are torch.float32; use .to\(torch.int64\)"),
        (tokens_of(1, 5), torch.arange(5), r"at must be Positions, but is Tensor; use Positions\("),
    ],
)
def test_tokens_and_places_that_do_not_fit_are_refused(tokens, places, message):
    with pytest.raises(ValueError, match=message):
        model_of(NoPEConfig())(tokens, at=places)


def test_an_implementation_that_cannot_serve_a_layer_is_refused():
    with pytest.raises(ValueError, match="sdpa"):
        model_of((RoPEConfig(), TAPAConfig()))(tokens_of(1, 5), impl="sdpa")


def test_one_training_step_gives_every_parameter_a_gradient(encoding):
    model, tokens = model_of(encoding, qk_norm=True).train(), tokens_of(2, LENGTH)
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


RULES = rules(4)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rescaled_model_is_the_model_built_with_that_rule(rule):
    model, tokens = model_of((RoPEConfig(), NoPEConfig())), tokens_of(1, LENGTH)
    built = model_of((RoPEConfig(frequencies=rule), NoPEConfig()))
    built.load_state_dict(model.state_dict())
    scaled = rescaled(model, rule)
    assert scaled.config == built.config
    assert torch.equal(scaled(tokens), built(tokens))


def test_a_rescaled_model_shares_its_weights_and_leaves_the_other_as_it_was():
    model, tokens = model_of(PoPEConfig(phase_init="uniform"), tied=True), tokens_of(1, LENGTH)
    model.embedding.weight.requires_grad_(False)
    before = model(tokens)
    scaled = rescaled(model, YaRN(base=100.0, factor=4.0, original_length=ORIGINAL))
    assert torch.equal(model(tokens), before)
    assert not torch.allclose(scaled(tokens), before)
    for (name, own), (same, shared) in zip(model.named_parameters(), scaled.named_parameters(), strict=True):
        assert name == same
        assert own is shared
    assert not scaled.embedding.weight.requires_grad
    assert scaled.training == model.training


def test_rescaling_keeps_the_other_settings_of_an_encoding():
    model = model_of(RoPEConfig(fraction=0.5))
    scaled = rescaled(model, Geometric(base=77.0))
    assert scaled.config.encoding == RoPEConfig(fraction=0.5, frequencies=Geometric(base=77.0))


def test_rescaling_takes_the_model_and_not_what_wraps_it():
    compiled = torch.compile(model_of(RoPEConfig()), backend="eager")
    with pytest.raises(
        ValueError, match="must be a Transformer, but is OptimizedModule; give the one that is"
    ):
        rescaled(compiled, Geometric(base=77.0))


@pytest.mark.parametrize("encoding", [NoPEConfig(), ALiBiConfig(), (TAPAConfig(), NoPEConfig())])
def test_rescaling_is_refused_where_there_are_no_frequencies(encoding):
    with pytest.raises(ValueError, match="no frequencies to change; rope and pope do"):
        rescaled(model_of(encoding), Geometric(base=100.0))


@pytest.mark.parametrize(
    "encoding", [RoPEConfig(), PoPEConfig(), TAPAConfig(), ALiBiConfig()], ids=lambda e: e.kind
)
def test_a_model_is_exported_once_for_every_length_in_a_range(encoding):
    model = model_of(
        encoding, kv_heads=4
    ).eval()  # of grouped ones torch does not prove what TAPA's products assume
    length = torch.export.Dim("length", min=1, max=1000)
    exported = torch.export.export(
        model, (tokens_of(1, 20),), dynamic_shapes={"tokens": {1: length}}
    ).module()
    for length in (3, 50):
        tokens = tokens_of(1, length)
        torch.testing.assert_close(exported(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "backend"), [(RoPEConfig(), "aot_eager"), (PoPEConfig(), "inductor")])
def test_the_forward_compiles_whole_and_once_for_all_lengths(encoding, backend):
    model = model_of(encoding, dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (7, 12, 31):
        tokens = tokens_of(2, length)
        for at in (None, Positions.packed([3, length - 3]).expand(2)):
            with (
                torch.no_grad(),
                torch._dynamo.config.patch(error_on_recompile=length > 7 and at is not None),
            ):
                got, expected = compiled(tokens, at=at, impl="sdpa"), model(tokens, at=at, impl="sdpa")
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
