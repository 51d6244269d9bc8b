"""A Hugging Face folder with other rates: transformers serves what the rule says, from the same weights."""

import json
import os
import signal

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from phasewise.cli import main
from phasewise.frequencies import DynamicNTK, YaRN
from phasewise.hf.language_model import open_language_model
from phasewise.train import extend_hf as module
from phasewise.train.continuation import ExtendRecipe
from phasewise.train.extend_hf import rewrite
from tests.hf.tiny import tiny


def asked(folder, rule, *, length=(1024,), steps=(0,)):
    return ExtendRecipe(checkpoint=str(folder), rule=rule, length=length, steps=steps)


@pytest.fixture
def llama(tmp_path):
    return saved(tmp_path, "llama")


def saved(tmp_path, name):
    tiny(name).save_pretrained(tmp_path / "first")
    return tmp_path / "first"


def forms(folder):
    """The rates in a config.json as they are read there, and by programs that know no rope_parameters."""
    content = json.loads((folder / "config.json").read_text())
    scaling = content["rope_scaling"] or {"rope_type": "default"}
    assert scaling.pop("type", "default") == scaling["rope_type"]
    shares = {key: content[key] for key in ("rope_theta", "partial_rotary_factor") if key in content}
    return content["rope_parameters"], {**scaling, **shares}


@pytest.mark.parametrize(
    ("name", "rule", "length"),
    [
        ("llama", "pi", 1024),
        ("llama", "yarn", 1024),
        ("llama", "llama3", 1024),
        ("llama", "abf", 1024),
        ("llama", "ntk", 1024),
        ("phi3, partial", "ntk", 1024),
        ("llama, llama3 rule", "llama3", 2048),
        ("llama, yarn", "yarn", 1024),
    ],
)
def test_transformers_serves_the_rule_from_linked_weights(tmp_path, name, rule, length):
    folder, out = saved(tmp_path, name), tmp_path / "out"
    (folder / "tokenizer.json").write_text("{}")
    written = rewrite(asked(folder, rule, length=(length,)), out)
    tokens = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(out)
    expected = open_language_model(folder, rule=written)
    torch.testing.assert_close(model(tokens).logits, expected(tokens), rtol=1e-4, atol=1e-4)
    assert model.config.max_position_embeddings == length
    new, older = forms(out)
    assert new == older
    assert os.path.samefile(out / "model.safetensors", folder / "model.safetensors")
    (out / "tokenizer.json").write_text("changed")
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_every_chat_template_comes_along_whole_and_no_state_of_a_training(llama, tmp_path):
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, chat_template=templates).save_pretrained(llama)
    elsewhere = tmp_path / "blob"
    (llama / "additional_chat_templates" / "rag.jinja").rename(elsewhere)
    (llama / "additional_chat_templates" / "rag.jinja").symlink_to(elsewhere)
    for folder in ("checkpoint-5", "additional_chat_templates"):
        (llama / folder).mkdir(exist_ok=True)
        (llama / folder / "optimizer.pt").write_bytes(b"moments")
    rewrite(asked(llama, "yarn"), tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates
    written = tmp_path / "out" / "additional_chat_templates"
    assert sorted(path.name for path in written.iterdir()) == ["rag.jinja", "tool_use.jinja"]
    assert not any(path.is_symlink() or path.stat().st_nlink > 1 for path in written.iterdir())
    assert not (tmp_path / "out" / "checkpoint-5").exists()


@pytest.mark.parametrize(
    ("rule", "changes", "message"),
    [
        ("yarn", {"steps": (5,)}, "is not trained or searched here: give one --length, --steps 0"),
        ("longrope", {}, "is not trained or searched here"),
        ("yarn", {"length": (256,)}, "length 256 is not above 256, which .* serves"),
    ],
)
def test_what_is_not_done_for_hugging_face_is_said(llama, tmp_path, rule, changes, message):
    with pytest.raises(ValueError, match=message):
        rewrite(asked(llama, rule, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda shard: shard.unlink(), "lacks model-00002-of-0000"),
        (
            lambda shard: shard.write_bytes(shard.read_bytes()[:-10]),
            r"model-00002-of-0000\d.* cannot be loaded",
        ),
    ],
)
def test_weights_that_are_not_whole_are_not_passed_on(tmp_path, damage, message):
    tiny("llama").save_pretrained(tmp_path / "first", max_shard_size="50KB")
    damage(next((tmp_path / "first").glob("model-00002-*.safetensors")))
    with pytest.raises(ValueError, match=message):
        rewrite(asked(tmp_path / "first", "yarn"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["cohere2", "mistral"])
@pytest.mark.parametrize("rule", ["yarn", "grid"])
def test_rates_that_see_no_further_than_a_window_are_left(tmp_path, name, rule):
    (tmp_path / "rates.json").write_text(
        '{"kind": "explicit", "values": [1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001]}'
    )
    rule = f"grid:{tmp_path / 'rates.json'}" if rule == "grid" else rule
    said = "would gain nothing beyond 256 tokens .* a window of 8 tokens at most.* another max_position_embeddings"
    with pytest.raises(ValueError, match=said):
        rewrite(asked(saved(tmp_path, name), rule), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_whose_rates_do_not_follow_its_config_is_left(tmp_path):
    folder = saved(tmp_path, "gptj (interleaved, partial, sin before cos)")
    with pytest.raises(ValueError, match=r"has no rates and length to change; give a model with rotary"):
        rewrite(asked(folder, "yarn"), tmp_path / "out")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (YaRN(base=1e4, factor=2.0, original_length=256), "yarn rule, which is for 256 to 512 tokens"),
        (
            DynamicNTK(base=1e4, factor=2.0, original_length=64),
            "dynamic_ntk rule, which is for 64 to 64 tokens",
        ),
    ],
)
def test_a_rule_for_another_length_is_refused(llama, tmp_path, rule, said):
    (tmp_path / "rule.json").write_text(rule.model_dump_json())
    with pytest.raises(ValueError, match=f"length 1024 contradicts the {said}"):
        rewrite(asked(llama, f"grid:{tmp_path / 'rule.json'}"), tmp_path / "out")


def test_native_scaling_is_never_replaced_by_another_rule(tmp_path):
    said = "rule 'pi' does not start from rates of rule 'llama3'.*; use --rule grid:FILE to replace them or, with"
    with pytest.raises(ValueError, match=said):
        rewrite(asked(saved(tmp_path, "llama, llama3 rule"), "pi"), tmp_path / "out")


def test_a_list_of_rates_takes_the_place_of_any_rule(tmp_path):
    (tmp_path / "rates.json").write_text(
        json.dumps({"kind": "explicit", "values": [0.5**i for i in range(8)]})
    )
    folder = saved(tmp_path, "phi3, longrope beyond its original length")
    written = rewrite(asked(folder, f"grid:{tmp_path / 'rates.json'}"), tmp_path / "out")
    tokens = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = open_language_model(folder, rule=written)
    torch.testing.assert_close(model(tokens).logits, expected(tokens), rtol=1e-4, atol=1e-4)
    assert open_language_model(tmp_path / "out").config.trained_length == 32


def test_a_folder_that_cannot_be_written_whole_is_not_there(llama, tmp_path, monkeypatch, capsys):
    def full(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("phasewise.train.extend_hf.shutil.copy2", full)
    (llama / "tokenizer.json").write_text("{}")
    arguments = ["extend", str(llama), "--rule", "yarn", "--length", "1024", "--steps", "0"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert "No space left on device" in (said := capsys.readouterr().err)
    assert "nothing is left there: make room" in said
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_files_leaves_nothing(llama, tmp_path, monkeypatch, capsys, number):
    (llama / "tokenizer.json").write_text("{}")
    own = module.shutil.copy2

    def signalled(*arguments, **options):
        os.kill(os.getpid(), number)
        return own(*arguments, **options)

    monkeypatch.setattr(module.shutil, "copy2", signalled)
    arguments = ["extend", str(llama), "--rule", "yarn", "--length", "1024", "--steps", "0"]
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "phasewise: interrupted; nothing was written\n"
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
