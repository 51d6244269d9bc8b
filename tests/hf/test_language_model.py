import pytest
import torch

from phasewise.encodings import NoPEConfig, PoPEConfig, RoPEConfig
from phasewise.evaluate.slices import Split
from phasewise.frequencies import (
    NTK,
    DynamicNTK,
    DynamicYaRN,
    Explicit,
    Geometric,
    Linear,
    Llama3,
    Proportional,
    YaRN,
)
from phasewise.hf.language_model import open_language_model
from phasewise.hf.settings import listed
from phasewise.model import ModelConfig, Transformer, folder, rescaled
from phasewise.positions import Positions
from tests.hf.tiny import MODELS, SIZES, tiny

transformers = pytest.importorskip("transformers", reason="Hugging Face checkpoints need transformers")

from phasewise.hf.reading import HFReader  # noqa: E402

TOKENS = torch.arange(3, 43)[None] % 64
RULES = [
    Linear(base=1e4, factor=4.0),
    NTK(base=1e4, factor=4.0),
    YaRN(base=1e4, factor=4.0, original_length=256),
    Llama3(base=1e4, factor=4.0, original_length=256),
    Explicit(values=[0.9, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001], attention=1.1),
]


def saved(name, path):
    model = tiny(name)
    model.save_pretrained(path)
    return model


def own(path, encoding):
    config = ModelConfig(vocab_size=64, width=32, layers=2, heads=2, encoding=encoding)
    torch.manual_seed(0)
    model = Transformer(config)
    folder.save(model, path)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi", "gpt_neox"])
def test_checkpoint_of_transformers_gives_the_logits_of_transformers(name, tmp_path):
    expected = saved(name, tmp_path)(TOKENS).logits
    model = open_language_model(tmp_path)
    assert torch.equal(model(TOKENS), expected)
    assert torch.allclose(model(TOKENS, keep=3), expected[:, -3:], atol=1e-5)
    assert (model.config.vocab_size, model.config.trained_length) == (64, 256)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere (interleaved)", "gpt_neox", "ours"])
def test_head_apart_from_the_body_gives_the_logits_of_the_whole(name, tmp_path):
    if name == "ours":
        own(tmp_path, PoPEConfig())
    else:
        saved(name, tmp_path)
    model = open_language_model(tmp_path)
    hidden = model.hidden(TOKENS)
    assert torch.allclose(model.logits(hidden[:, 5:20]), model(TOKENS)[:, 5:20], atol=1e-5)
    assert torch.allclose(model.logits(model.hidden(TOKENS)), model(TOKENS), atol=1e-5)
    assert isinstance(model, Split)


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "opt", "llama4_text"])
def test_head_apart_is_fed_whatever_kind_of_output_and_wherever_the_body_is(family, tmp_path):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family)
    given = {**SIZES, "num_local_experts": 2, "ffn_dim": 64, "word_embed_proj_dim": 64}
    given |= {"n_positions": 256, "intermediate_size_mlp": 64}
    config = transformers.AutoConfig.for_model(
        family, **{key: value for key, value in given.items() if hasattr(config, key)}
    )
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(tmp_path)
    model = open_language_model(tmp_path)
    expected = network(TOKENS).logits
    assert torch.allclose(model.logits(model.hidden(TOKENS)), expected, atol=1e-4)
    assert torch.allclose(model.logits(model.hidden(TOKENS)[:, 5:9]), expected[:, 5:9], atol=1e-4)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_layers_of_a_decoder_turn_at_the_rates_of_the_rule_it_is_served_with(rule, tmp_path):
    saved("llama", tmp_path)
    model = open_language_model(tmp_path, rule=rule)
    layers = []
    HFReader(model.network).read(TOKENS, lambda layer, *_: layers.append(layer))
    assert len(layers) == 2
    for layer in layers:
        served = layer.encoding.frequencies
        assert torch.allclose(served.rates(8), rule.rates(8), rtol=1e-5)
        assert served.attention_factor(8) == pytest.approx(rule.attention_factor(8), rel=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gptj")])
def test_every_family_is_served_with_a_rule_and_shares_its_weights(name, tmp_path):
    saved(name, tmp_path)
    model = open_language_model(tmp_path)
    before = model(TOKENS)
    served = model.served(Linear(base=3e4, factor=3.0))
    layers = []
    HFReader(served.network).read(TOKENS, lambda layer, *_: layers.append(layer.encoding))
    n = served.channels
    assert torch.allclose(layers[-1].frequencies.rates(n), Geometric(base=3e4).rates(n) / 3, rtol=1e-5)
    pairs = zip(model.parameters(), served.parameters(), strict=True)
    assert all(one is other for one, other in pairs)
    assert torch.equal(model(TOKENS), before)
    assert not torch.allclose(served(TOKENS), before)


def test_continuation_is_the_likeliest_whatever_the_checkpoint_says_of_sampling(tmp_path):
    network = tiny("llama")
    network.generation_config.update(repetition_penalty=1.5, no_repeat_ngram_size=2, num_beams=3)
    network.save_pretrained(tmp_path)
    model = open_language_model(tmp_path)
    tokens = TOKENS[:, :5]
    with torch.no_grad():
        for _ in range(12):
            tokens = torch.cat([tokens, network(tokens).logits[:, -1:].argmax(-1)], 1)
    assert model.continued(TOKENS[:, :5], length=12).tolist() == tokens[0, 5:].tolist()


def test_native_length_counts_a_factor_from_the_original_length(tmp_path):
    lengths = {}
    for name in ("llama", "llama, llama3 rule", "llama, yarn"):
        saved(name, tmp_path / name)
        facts = open_language_model(tmp_path / name).config
        lengths[name] = (facts.trained_length, facts.native_length)
    assert lengths == {"llama": (256, 256), "llama, llama3 rule": (64, 512), "llama, yarn": (64, 256)}


def test_windowed_layers_keep_their_rates_when_a_rule_is_served(tmp_path):
    saved("gemma3", tmp_path)
    model = open_language_model(tmp_path, rule=Linear(base=1e6, factor=16.0))
    rates = []
    HFReader(model.network).read(TOKENS, lambda layer, *_: rates.append(layer.encoding.frequencies.rates(16)))
    assert torch.allclose(rates[0], Geometric(base=1e4).rates(16), rtol=1e-5)
    assert torch.allclose(rates[1], Geometric(base=1e6).rates(16) / 16, rtol=1e-5)
    assert model.frequencies == Linear(base=1e6, factor=16.0)


@pytest.mark.parametrize(
    "rule",
    [
        YaRN(base=1e4, factor=4.0, original_length=64),
        Llama3(base=1e4, factor=4.0, original_length=64),
        DynamicNTK(base=1e4, factor=2.0, original_length=256),
    ],
    ids=lambda rule: rule.kind,
)
def test_a_config_with_an_original_length_of_its_own_does_not_change_the_rule_served(rule, tmp_path):
    saved("phi3, longrope beyond its original length", tmp_path)
    model = open_language_model(tmp_path, rule=rule)
    assert model.frequencies == rule
    layers = []
    HFReader(model.network).read(TOKENS, lambda layer, *_: layers.append(layer.encoding.frequencies))
    assert torch.allclose(layers[0].rates(8), rule.at(TOKENS.shape[1], 8).rates(8), rtol=1e-5)


@pytest.mark.parametrize("name", ["phi3, longrope beyond its original length", "llama, dynamic"])
def test_logits_of_a_row_depend_neither_on_rows_beside_it_nor_on_calls_before(name, tmp_path):
    saved(name, tmp_path)
    rows = [torch.arange(start, start + size)[None] % 64 for start, size in ((3, 20), (5, 300), (7, 280))]
    alone = [open_language_model(tmp_path)(row) for row in rows]
    model = open_language_model(tmp_path)
    for row, expected in zip(reversed(rows), reversed(alone), strict=True):
        model(torch.arange(400)[None] % 64)
        assert torch.allclose(model(row), expected, atol=2e-5)
    mask = torch.arange(300) < torch.tensor([[row.shape[1]] for row in rows])
    padded = torch.zeros(3, 300, dtype=torch.int64)
    padded[mask] = torch.cat(rows, 1)[0]
    logits = model(padded, at=Positions.padded(mask))
    hidden = model.hidden(padded, at=Positions.padded(mask))
    for row, (size, expected) in enumerate(zip((20, 300, 280), alone, strict=True)):
        assert torch.allclose(logits[row, :size], expected[0], atol=2e-5)
        assert torch.allclose(model.logits(hidden[row : row + 1, :size]), expected, atol=2e-5)


def test_layers_of_other_widths_are_served_the_rule_of_theirs(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    own = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "layer_types": kinds}
    own |= {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0}
    config = transformers.AutoConfig.for_model("gemma4_text", **SIZES, **own)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    rule = Proportional(base=1e6, fraction=0.25, factor=4.0)
    model = open_language_model(tmp_path, rule=rule)
    assert (model.head_dim, model.channels, model.frequencies) == (32, 16, rule)
    layers = []
    HFReader(model.network).read(TOKENS, lambda layer, *_: layers.append(layer.encoding.frequencies))
    assert torch.allclose(layers[0].rates(8), Geometric(base=1e4).rates(8), rtol=1e-5)
    assert torch.allclose(layers[1].rates(16), rule.rates(16), rtol=1e-5)


def test_partial_rotation_stays_partial_when_a_rule_is_served(tmp_path):
    saved("phi", tmp_path)
    model = open_language_model(tmp_path, rule=Linear(base=1e4, factor=2.0))
    layers = []
    HFReader(model.network).read(TOKENS, lambda layer, *_: layers.append(layer.encoding))
    assert [(layer.channels, layer.head_dim) for layer in layers] == [(4, 16), (4, 16)]


@pytest.mark.parametrize("encoding", [RoPEConfig(), PoPEConfig()], ids=lambda config: config.kind)
def test_model_of_ours_is_the_rescaled_model(encoding, tmp_path):
    model, rule = own(tmp_path, encoding), Linear(base=1e4, factor=4.0)
    assert torch.equal(open_language_model(tmp_path)(TOKENS), model.eval()(TOKENS))
    served = open_language_model(tmp_path, rule=rule)
    assert torch.equal(served(TOKENS), rescaled(model, rule)(TOKENS))
    assert served.frequencies == rule


@pytest.mark.parametrize("name", ["llama", "ours"])
def test_padding_on_either_side_changes_no_logits(name, tmp_path):
    if name == "ours":
        own(tmp_path, RoPEConfig())
    else:
        saved(name, tmp_path)
    model = open_language_model(tmp_path)
    alone = model(TOKENS)
    for mask in (torch.arange(50) < 40, torch.arange(50) >= 10):
        padded = torch.zeros(1, 50, dtype=torch.int64)
        padded[:, mask] = TOKENS
        logits = model(padded, at=Positions.padded(mask[None]))
        assert torch.allclose(logits[:, mask], alone, atol=2e-5)


def test_precision_is_the_one_asked_for(tmp_path):
    saved("llama", tmp_path)
    model = open_language_model(tmp_path, dtype="bfloat16")
    assert model(TOKENS).dtype == torch.bfloat16
    assert {buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name} == {torch.float32}
    served = model.served(Linear(base=1e4, factor=2.0))
    assert {buffer.dtype for name, buffer in served.named_buffers() if "inv_freq" in name} == {torch.float32}


def test_listed_rates_are_the_same_rates():
    rule = Explicit(values=[0.9, 0.5, 0.01], attention=1.2)
    assert torch.allclose(listed(rule, original_length=64).at(100, 3).rates(3), rule.rates(3), rtol=1e-12)
    assert listed(rule, original_length=64).attention_factor(3, length=9) == 1.2


@pytest.mark.parametrize("causal", [True, False])
def test_a_model_that_sees_what_it_is_to_predict_is_refused(causal, tmp_path):
    given = {
        key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    config = transformers.BertConfig(**given, num_attention_heads=4, is_decoder=causal)
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(tmp_path)
    if causal:
        assert torch.allclose(open_language_model(tmp_path)(TOKENS), network.eval()(TOKENS).logits, atol=1e-5)
        return
    with pytest.raises(ValueError, match="sees the tokens that it is to predict: give a decoder"):
        open_language_model(tmp_path)


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lambda path: None, {}, "no config.json"),
        (lambda path: saved("llama", path), {"dtype": "int8"}, "unknown dtype 'int8'"),
        (lambda path: saved("llama", path), {"device": "cuda:99"}, "cannot be used here"),
        (
            lambda path: saved("llama", path),
            {"rule": Explicit(values=[1.0, 0.5])},
            "lists 2 channels and n is 8",
        ),
        (
            lambda path: saved("llama", path),
            {"rule": DynamicYaRN(base=1e4, original_length=64)},
            "no rule for dynamic_yarn",
        ),
        (
            lambda path: saved("llama", path),
            {"rule": Explicit(values=[1.0] * 7 + [0.0])},
            "rates of 0",
        ),
        (lambda path: own(path, NoPEConfig()), {"rule": Linear(base=1e4, factor=2.0)}, "no frequencies"),
        (lambda path: (path / "a.gguf").write_bytes(b"GGUF"), {}, "a.gguf"),
        (
            lambda path: [(path / name).write_bytes(b"") for name in ("a.gguf", "b.gguf")],
            {},
            "2 .gguf files",
        ),
    ],
)
def test_what_cannot_be_opened_or_served_is_refused_in_one_sentence(make, options, said, tmp_path):
    make(tmp_path)
    with pytest.raises(ValueError, match=said):
        open_language_model(tmp_path, **options)


def test_rows_of_several_documents_are_refused_by_a_decoder_of_transformers(tmp_path):
    saved("llama", tmp_path)
    with pytest.raises(ValueError, match="several documents"):
        open_language_model(tmp_path)(TOKENS, at=Positions.packed([20, 20]))


def test_a_config_whose_sizes_do_not_fit_each_other_is_refused_where_the_model_is_opened(tmp_path):
    config = transformers.GPTJConfig(vocab_size=64, n_embd=64, n_layer=1, n_head=4, rotary_dim=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"cannot run the gptj model in .*RuntimeError: .*; correct its config"
    ):
        open_language_model(tmp_path)


def test_a_model_that_overflows_in_a_dtype_is_not_said_to_see_what_it_is_to_predict(tmp_path):
    network = tiny("llama")
    with torch.no_grad():
        network.model.layers[0].mlp.down_proj.weight.mul_(1e5)
    network.save_pretrained(tmp_path)
    assert not open_language_model(tmp_path)(TOKENS).isnan().any()
    network.model.layers[0].mlp.down_proj.weight.data.clamp_(-6e4, 6e4)
    network.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no numbers in float16; ask for another dtype"):
        open_language_model(tmp_path, dtype="float16")


@pytest.mark.parametrize(
    "name", ["llama, yarn", "llama, llama3 rule", "phi3, longrope beyond its original length"]
)
def test_a_list_of_rates_in_the_place_of_a_rule_leaves_the_trained_length(name, tmp_path):
    tiny(name).save_pretrained(tmp_path)
    before = open_language_model(tmp_path)
    served = before.served(Explicit(values=[1.0 / 2**i for i in range(8)]))
    assert served.config.trained_length == before.config.trained_length
    assert served.frequencies is not None
    assert served.frequencies.original_length == before.config.trained_length
