import json
import math
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from phasewise.data.corpus import Corpus, Documents, Task
from phasewise.encodings import ALiBiConfig, NoPEConfig, PoPEConfig, RoPEConfig, TAPAConfig
from phasewise.lens.capture import open_checkpoint
from phasewise.lens.inspect import Inspection, Request, inspect
from phasewise.lens.show import figures, summary, table
from phasewise.model import ModelConfig, Transformer
from phasewise.model import folder as own
from phasewise.model.reading import Reader, TransformerReader
from tests.hf.folders import change_config

transformers = pytest.importorskip("transformers", reason="reading checkpoints needs transformers")
pytest.importorskip("safetensors", reason="models on disk need safetensors")


def corpus(lengths=(400, 90, 1), vocab_size=64, task=None):
    random = np.random.default_rng(0)
    documents = [random.integers(3, vocab_size, size=length) for length in lengths]
    split = Documents.join(documents, vocab_size=vocab_size)
    facts = {"source": "random", "licence": "none", "unit": "token", "sha256": "0", "decode": str}
    return Corpus(name="random", vocab_size=vocab_size, splits={"test": split}, task=task, **facts)


def model(*encodings, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "width": 32, "layers": len(encodings), "heads": 4, "kv_heads": 2, **changes}
    return Transformer(ModelConfig(encoding=encodings, **sizes)).eval()


def reader(*encodings, **changes):
    return TransformerReader(model(*encodings, **changes), trained_length=128)


def test_every_layer_with_frequencies_or_a_phase_is_measured_and_others_left_out():
    kinds = (RoPEConfig(), NoPEConfig(), PoPEConfig(), TAPAConfig(), ALiBiConfig())
    found = inspect(reader(*kinds), corpus(), Request(tokens=200, context=50))
    assert [(layer.layer, layer.kind) for layer in found.layers] == [(0, "rope"), (2, "pope"), (3, "tapa")]
    assert (found.model_layers, found.partial) == (5, None)
    assert all(len(layer.heads) == 4 and layer.kv_heads == 2 for layer in found.layers)


def test_report_of_one_reading_does_not_depend_on_how_it_is_cut_for_the_mean_form():
    whole = inspect(reader(RoPEConfig()), corpus((300,)), Request(tokens=300, context=300)).layers[0]
    parts = inspect(reader(RoPEConfig()), corpus((300,)), Request(tokens=300, context=100)).layers[0]
    # The first layer's queries and keys see no context, so cutting changes nothing in them.
    assert parts.mean == whole.mean
    assert parts.causal != whole.causal


def test_tokens_read_are_those_asked_for_and_one_token_rows_are_passed_over():
    found = inspect(reader(RoPEConfig()), corpus((402, 90, 1)), Request(tokens=10_000, context=100))
    assert found.tokens == 402 + 90
    assert inspect(reader(RoPEConfig()), corpus(), Request(tokens=150, context=100)).tokens == 150
    assert inspect(reader(RoPEConfig()), corpus((101,)), Request(context=100)).partial is None


def test_context_defaults_to_what_the_model_was_trained_on_and_documents_hold():
    assert inspect(reader(RoPEConfig()), corpus()).context == 128
    assert inspect(reader(RoPEConfig()), corpus((41,))).context == 41


def test_task_is_read_in_its_own_rows_without_padding():
    task = corpus(lengths=(9, 12, 12), task=Task(row_length=12))
    found = inspect(reader(RoPEConfig()), task, Request(tokens=36))
    assert (found.context, found.tokens) == (12, 9 + 12 + 12)


def test_interrupted_reading_is_kept_and_says_what_is_missing():
    pressed = iter([False, True])
    request = Request(tokens=400, context=100)
    found = inspect(reader(RoPEConfig()), corpus(), request, stop=lambda: next(pressed))
    assert found.partial == "interrupted after 2 of 4 rows"
    assert found.tokens == 200
    assert found.layers == inspect(reader(RoPEConfig()), corpus(), Request(tokens=200, context=100)).layers


def test_progress_counts_layers_over_all_rows():
    told = StringIO()
    console = Console(file=told, force_terminal=True, width=80)
    inspect(reader(RoPEConfig(), RoPEConfig()), corpus(), Request(tokens=100, context=50), console=console)
    assert "layers read" in told.getvalue()
    assert "4/4" in told.getvalue()


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor an operation gives."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_grows_with_the_square_of_the_context():
    def largest(length):
        with LargestTensor() as watched:
            request = Request(tokens=length, context=length, queries=2)
            inspect(reader(RoPEConfig(), PoPEConfig()), corpus((length,)), request)
        return watched.elements

    assert largest(2048) == 2 * largest(1024)
    assert largest(2048) < 2048 * 2048 / 8


@pytest.mark.parametrize(
    ("kinds", "said"), [((ALiBiConfig(),), "alibi"), ((NoPEConfig(), ALiBiConfig()), "alibi, nope")]
)
def test_model_without_frequencies_is_refused(kinds, said):
    with pytest.raises(ValueError, match=f"no frequencies and no phases \\({said}\\); give one with"):
        inspect(reader(*kinds), corpus())


def test_corpus_with_more_tokens_than_the_model_is_refused():
    with pytest.raises(ValueError, match="random has 64 tokens and the model knows 32"):
        inspect(reader(RoPEConfig(), vocab_size=32), corpus())


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"tokens": 1}, "tokens"), ({"context": 1}, "context"), ({"wanted_length": 0}, "wanted_length")],
)
def test_size_that_makes_no_sense_is_refused(changes, said):
    with pytest.raises(ValueError, match=f"{said} must be at least"):
        Request(**changes)


def test_context_that_no_document_fills_is_refused():
    with pytest.raises(
        ValueError, match=r"a context of 1000 needs a document as long, but the longest .* has 400"
    ):
        inspect(reader(RoPEConfig()), corpus(), Request(context=1000))


@pytest.mark.parametrize(
    ("windows", "trained", "told"),
    [((8, 16, None), 128, True), ((8, None, None), 128, False), ((8, 16, None), 12, False)],
)
def test_windows_within_the_trained_length_are_told(windows, trained, told):
    network = model(RoPEConfig(), PoPEConfig(), NoPEConfig(), window=windows)
    asked = Request(tokens=200, context=12, wanted_length=4096)
    said = summary(inspect(TransformerReader(network, trained_length=trained), corpus(), asked))
    assert said.get("windows", "").startswith("no layer with rates sees more than 16 tokens") == told


def test_values_survive_json():
    found = inspect(reader(RoPEConfig(), PoPEConfig(), TAPAConfig()), corpus(), Request(wanted_length=1024))
    assert Inspection.model_validate_json(found.model_dump_json()) == found


def test_figures_and_table_cover_mixed_layers_and_several_widths():
    kinds = (RoPEConfig(), RoPEConfig(fraction=0.5), PoPEConfig(), TAPAConfig())
    found = inspect(reader(*kinds), corpus(), Request(wanted_length=1024))
    names = [figure.name for figure in figures(found)]
    spectral = ["layers", "heads", "wavelength", "coherent", "turns"]
    assert names == [*spectral, "phases", "magnitudes", "distance", "arguments"]
    assert summary(found)["wanted length"] == "1,024 tokens"
    assert table(found).row_count == 4
    for figure in figures(found):
        for view in figure.views.values():
            if hasattr(view, "z"):
                assert {len(row) for row in view.z} == {len(view.columns)}
                assert {len(row) for row in view.notes} <= {len(view.columns)}


def rewrite(folder, change):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_hugging_face_folder_and_its_own_layers_are_inspected(llama):
    reader = open_checkpoint(llama)
    found = inspect(reader, corpus(), Request(wanted_length=1024))
    assert (found.family, found.trained_length, found.dtype) == ("llama", 256, "float32")
    assert [layer.kind for layer in found.layers] == ["rope", "rope"]
    assert found.layers[0].rates == pytest.approx([1e4 ** -(i / 8) for i in range(8)], rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_both_kinds_of_folder_are_read_in_any_dtype(llama, tmp_path, dtype):
    own.save(model(RoPEConfig()), tmp_path / "own")
    for folder in (llama, tmp_path / "own"):
        reader: Reader = open_checkpoint(folder, dtype=dtype)
        found = inspect(reader, corpus(), Request(tokens=200))
        assert found.dtype == dtype
        assert all(math.isfinite(share) for layer in found.layers for share in layer.mean.share)


def test_scaled_checkpoint_counts_turns_within_its_original_length(copy):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    change_config(copy, rope_parameters=rope)
    assert open_checkpoint(copy).facts.trained_length == 64


def refused(folder, said, **options):
    with pytest.raises(ValueError, match=said) as error:
        inspect(open_checkpoint(folder, **options), corpus())
    assert "\n" not in str(error.value)


def test_missing_folder_config_or_weights_is_refused(copy, tmp_path):
    refused(tmp_path / "nowhere", "no folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"has no config\.json")
    (copy / "model.safetensors").unlink()
    refused(copy, r"no weights: it needs one of model\.safetensors, pytorch_model\.bin")
    (copy / "adapter_model.safetensors").write_bytes(b"")
    refused(copy, r"no weights: it needs one of model\.safetensors, pytorch_model\.bin")


def test_broken_config_is_refused(copy):
    (copy / "config.json").write_text("{")
    refused(copy, "is not JSON")


def test_unknown_architecture_is_refused(copy):
    change_config(copy, model_type="martian")
    refused(copy, "model_type 'martian'")


def test_missing_tensor_is_refused_by_name(copy):
    rewrite(copy, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    refused(copy, r"1 tensors missing \(model\.layers\.1\.self_attn\.k_proj\.weight\); fetch it again")


def test_tensor_of_another_shape_is_refused(copy):
    rewrite(copy, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))
    refused(copy, r"1 of another shape \(model\.norm\.weight \[3\], not \[64\]\); fetch it again")


def test_weights_that_are_not_finite_are_refused_by_name(copy, tmp_path):
    rewrite(copy, lambda weights: weights["model.norm.weight"].fill_(math.nan))
    refused(copy, r"model\.norm\.weight in .* is not finite")
    broken = model(RoPEConfig())
    torch.nn.init.constant_(broken.norm.weight, math.inf)
    own.save(broken, tmp_path / "own")
    refused(tmp_path / "own", r"norm\.weight in .* is not finite")


def test_truncated_weights_are_refused(copy):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(copy, r"cannot be loaded \(.*\); fetch them again")


def test_missing_shard_is_refused(copy):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(copy, "lacks model-00002-of-00002.safetensors")


@pytest.mark.parametrize("index", ["{", "{}", "[]", '{"weight_map": []}'])
def test_broken_index_of_shards_is_refused(copy, index):
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    (copy / "model.safetensors.index.json").write_text(index)
    refused(copy, "does not say which shards there are")


def test_model_that_is_no_decoder_or_has_no_rotations_is_refused(tmp_path):
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    gpt2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    refused(tmp_path / "gpt2", "no layer of this gpt2 model is given rotary positions")
    vit = transformers.ViTConfig(hidden_size=16, intermediate_size=16, image_size=32, **sizes)
    transformers.ViTModel(vit).save_pretrained(tmp_path / "vit")
    refused(tmp_path / "vit", "holds a vit model, which is no decoder")


def test_option_that_does_not_apply_is_refused(llama):
    refused(llama, "leave trained_length out", trained_length=5)
    refused(llama, "unknown dtype 'int8'", dtype="int8")
