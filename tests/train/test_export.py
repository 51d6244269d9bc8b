"""phasewise export, from the command line to a folder that is there whole or not at all."""

import json
import os
import signal

import pytest
import torch
from safetensors import SafetensorError

from phasewise.cli import main
from phasewise.data import windows
from phasewise.data.codec import text_codec
from phasewise.encodings import RoPEConfig
from phasewise.evaluate import measure
from phasewise.frequencies import Linear, Llama3, YaRN
from phasewise.hf import export as module
from phasewise.hf.language_model import open_language_model
from phasewise.interrupt import Interrupted
from phasewise.lens.capture import open_checkpoint
from phasewise.lens.inspect import Request, inspect
from phasewise.model import ModelConfig, Transformer, rescaled
from phasewise.model.folder import WEIGHTS, save
from phasewise.model.history import Stage, write_history
from phasewise.train.export import export
from phasewise.train.kept import write_tokenizer
from tests.hf.test_export import model_of

from .small import CPU, VOCAB, corpus

SENTENCE = "the sea was calm and grey under long low clouds ; a gull cried once -"
WHOLE = ["config.json", "generation_config.json", "model.safetensors"]
WITH_TOKENIZER = [*WHOLE, "tokenizer.json", "tokenizer_config.json"]


def kept(folder, model, *, length=64, corpus="austen"):
    """A model as a training leaves it."""
    save(model, folder / "model")
    write_history(
        folder / "model",
        (Stage(length=length, tokens=1, corpus=corpus, corpus_sha256="", encoding=model.config.encoding),),
    )
    return folder


@pytest.fixture
def run(tmp_path):
    return kept(tmp_path / "run", model_of(vocab_size=256, activation="gelu"))


def left(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_command_writes_a_checkpoint_and_says_how_near_it_is(run, tmp_path, capsys):
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert (
        "ArceeForCausalLM of 33,504 parameters in float32, for 64 tokens: its logits in float32 are" in said
    )
    assert "its tokens are bytes" in said
    assert "transformers computes activation gelu; llama.cpp, among others, passes over it" in said
    assert "Written to" in said
    assert names(tmp_path / "out") == WITH_TOKENIZER
    assert left(tmp_path) == ["out", "run"]
    assert main(["export", str(run / "model"), "--out", str(tmp_path / "second"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["difference"] < 1e-4 * found["largest"]
    assert found["tokenizer"] == "bytes"


def test_the_tokenizer_of_bytes_makes_what_training_read(run, tmp_path):
    from transformers import AutoTokenizer

    export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "".join(map(chr, range(0x250))) + "  \u20ac\r\n\U0001f600 don't "
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_the_models_own_tokenizer_goes_with_it(tmp_path):
    from transformers import AutoTokenizer

    codec = text_codec("bpe:300", lambda: [SENTENCE.encode() * 50])
    run = kept(tmp_path / "run", model_of(vocab_size=384), corpus="text:some, bpe:300")
    write_tokenizer(run / "model", codec.definition)
    assert export(run, tmp_path / "out").tokenizer == str(run / "model" / "tokenizer.json")
    assert names(tmp_path / "out") == WITH_TOKENIZER
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(SENTENCE)["input_ids"] == codec.encode_text(SENTENCE).tolist()


def test_its_tokenizer_sets_no_begin_around_texts_that_training_had_none_of(tmp_path):
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer

    codec = text_codec("bpe:300", lambda: [SENTENCE.encode() * 50])
    marking = Tokenizer.from_str(codec.definition)
    marking.add_special_tokens(["<s>"])
    marking.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", marking.token_to_id("<s>"))]
    )
    run = kept(tmp_path / "run", model_of(vocab_size=384))
    write_tokenizer(run / "model", marking.to_str())
    export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(SENTENCE)["input_ids"] == codec.encode_text(SENTENCE).tolist()
    assert tokenizer("<s>")["input_ids"] == [marking.token_to_id("<s>")]


def test_a_damaged_tokenizer_is_refused(run, tmp_path):
    (run / "model" / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        export(run, tmp_path / "out")
    assert left(tmp_path) == ["run"]


def test_loss_and_spectrum_are_those_of_the_model(tmp_path):
    run = kept(tmp_path / "run", model_of(vocab_size=VOCAB, qk_norm=True))
    export(run, tmp_path / "out")
    request = Request(tokens=400, context=64)
    own, theirs = (inspect(open_checkpoint(folder), corpus(), request) for folder in (run, tmp_path / "out"))
    for ours, other in zip(own.layers, theirs.layers, strict=True):
        assert ours.causal.share == pytest.approx(other.causal.share, rel=1e-4)
        assert ours.turns_trained == pytest.approx(other.turns_trained, rel=1e-4)
    read = windows(corpus(), "test", length=32, limit_tokens=400)
    losses = [
        measure(open_language_model(folder), read, length=32, stride=read.stride, device=CPU).loss
        for folder in (run, tmp_path / "out")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("vocab_size", "corpus"), [(256, "genome:bases"), (61, "austen")])
def test_of_what_is_no_text_no_tokenizer_is_written_and_that_is_said(tmp_path, capsys, vocab_size, corpus):
    run = kept(tmp_path / "run", model_of(vocab_size=vocab_size), corpus=corpus)
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert "no tokenizer of text is known, so none was written" in capsys.readouterr().out
    assert names(tmp_path / "out") == WHOLE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_stored_in_the_dtype_that_is_asked_for(run, tmp_path, dtype):
    found = export(run, tmp_path / "out", dtype=dtype)
    assert found.dtype == dtype
    assert found.difference < 1e-4 * found.largest
    network = open_language_model(tmp_path / "out")
    assert {str(weight.dtype) for weight in network.parameters()} == {f"torch.{dtype}"}


def test_weights_beyond_the_dtype_are_refused(tmp_path):
    model = model_of()
    with torch.no_grad():
        model.norm.weight[0] = 1e5
    run = kept(tmp_path / "run", model)
    with pytest.raises(ValueError, match=r"norm\.weight does not fit float16: give bfloat16"):
        export(run, tmp_path / "out", dtype="float16")
    assert left(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("rule", "length"),
    [
        (Linear(base=1e4, factor=4.0), 64),
        (YaRN(base=1e4, factor=4.0, original_length=64), 256),
        (YaRN(base=1e4, factor=4.01, original_length=64), 256),
    ],
)
def test_an_extended_model_is_for_the_length_of_its_rule_or_training(tmp_path, rule, length):
    run = kept(tmp_path / "run", rescaled(model_of(), rule))
    assert export(run, tmp_path / "out").length == length
    opened = open_language_model(tmp_path / "out")
    assert opened.frequencies == rule
    assert opened.config.native_length == length
    assert export(run, tmp_path / "longer", length=128).length == 128


def test_a_model_that_does_not_say_its_length_needs_it(tmp_path):
    save(model_of(), tmp_path / "model")
    with pytest.raises(ValueError, match="does not say the length it was trained at: give --length"):
        export(tmp_path / "model", tmp_path / "out")
    assert export(tmp_path / "model", tmp_path / "out", length=32).length == 32


def test_rates_changed_after_training_need_the_length_they_are_for(tmp_path):
    run = kept(tmp_path / "run", model_of())
    (run / "model" / "config.json").unlink()
    save(rescaled(model_of(), Linear(base=1e4, factor=4.0)), run / "model")
    with pytest.raises(ValueError, match=r"changed after its training at 64, .*: give --length"):
        export(run, tmp_path / "out")
    assert export(run, tmp_path / "out", length=256).length == 256


def test_a_length_that_is_none_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=r"length must be at least 1 and at most .*, but is 0"):
        export(run, tmp_path / "out", length=0)
    assert left(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("rule", "length", "span"),
    [
        (YaRN(base=1e4, factor=4.0, original_length=64), 16, "64 to 256"),
        (YaRN(base=1e4, factor=4.0, original_length=64), 257, "64 to 256"),
        (Llama3(base=1e4, factor=4.0, original_length=64), 63, "64 or more"),
    ],
)
def test_a_length_that_the_rule_is_not_for_is_one_line(tmp_path, capfd, rule, length, span):
    run = kept(tmp_path / "run", rescaled(model_of(), rule))
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--length", str(length)]) == 2
    assert capfd.readouterr().err == (
        f"phasewise: length {length} contradicts the {rule.kind} rule, which is for {span} tokens: give such a "
        "length, or a rule for this one\n"
    )
    assert left(tmp_path) == ["run"]


def test_what_cannot_be_exported_is_one_line(tmp_path, capsys, run):
    assert main(["export", str(run), "--out", str(tmp_path / "out"), "--dtype", "int8"]) == 2
    assert "unknown dtype 'int8'" in capsys.readouterr().err
    assert main(["export", str(run), "--out", str(run)]) == 2
    assert capsys.readouterr().err == f"phasewise: {run} already exists: choose another folder\n"
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert main(["export", str(tmp_path / "out"), "--out", str(tmp_path / "again")]) == 2
    assert "is a Hugging Face checkpoint already" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "again")]) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert left(tmp_path) == ["out", "run"]


def test_an_empty_folder_is_filled_where_it_is(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").mkdir(mode=0o750)
    before = (tmp_path / "out").stat()
    monkeypatch.chdir(tmp_path / "out")
    assert main(["export", str(run), "--out", "."]) == 0
    assert f"Written to .: {', '.join(WITH_TOKENIZER)}" in capsys.readouterr().out
    assert names(tmp_path / "out") == WITH_TOKENIZER
    after = (tmp_path / "out").stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert left(tmp_path) == ["out", "run"]


def test_a_loop_of_links_is_one_line(run, tmp_path, capsys):
    (tmp_path / "out").symlink_to("out")
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 1
    assert "out cannot be written to" in capsys.readouterr().err
    assert left(tmp_path) == ["out", "run"]


def test_what_a_killed_process_of_the_same_number_left_is_replaced(run, tmp_path):
    remains = f".out.{os.getpid()}"
    (tmp_path / remains).mkdir()
    (tmp_path / remains / "remains").touch()
    export(run, tmp_path / "out")
    assert names(tmp_path / "out") == WITH_TOKENIZER
    assert left(tmp_path) == ["out", "run"]


def test_folders_made_on_the_way_go_with_what_fails(run, tmp_path, monkeypatch):
    assert export(run, tmp_path / "below" / "first").length == 64
    monkeypatch.setattr(module, "HALF_THE_DIGITS", -1.0)
    for out in ("new/deep/out", "below/deep/out"):
        with pytest.raises(ValueError, match="more than rounding"):
            export(run, tmp_path / out)
    assert left(tmp_path) == ["below", "run"]
    assert left(tmp_path / "below") == ["first"]


@pytest.mark.parametrize("kind", ["new", "empty"])
def test_what_fails_leaves_an_empty_folder_empty(run, tmp_path, monkeypatch, kind):
    if kind == "empty":
        (tmp_path / "out").mkdir()
    monkeypatch.setattr(module, "HALF_THE_DIGITS", -1.0)
    with pytest.raises(ValueError, match="more than rounding"):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*out*")] == ["out"] * (kind == "empty")
    assert kind == "new" or names(tmp_path / "out") == []


def test_a_decoder_that_differs_is_not_left_behind(run, tmp_path, monkeypatch):
    own = module.weights

    def swapped(model, family):
        found = own(model, family)
        first, second = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
        return {**found, first: found[second], second: found[first]}

    monkeypatch.setattr(module, "weights", swapped)
    with pytest.raises(ValueError, match="more than rounding"):
        export(run, tmp_path / "out")
    assert left(tmp_path) == ["run"]


@pytest.mark.parametrize("asked", range(3))
def test_an_interrupted_export_leaves_nothing(run, tmp_path, asked):
    answers = iter([*[False] * asked, True])
    with pytest.raises(Interrupted, match="nothing was written"):
        export(run, tmp_path / "out", stop=lambda: next(answers))
    assert left(tmp_path) == ["run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_in_a_line(run, tmp_path, monkeypatch, capsys, number):
    own = module.write

    def signalled(*arguments, **options):
        os.kill(os.getpid(), number)
        return own(*arguments, **options)

    monkeypatch.setattr(module, "write", signalled)
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "phasewise: interrupted; nothing was written\n"
    assert left(tmp_path) == ["run"]


def test_a_full_disk_is_one_line_and_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    def full(*_arguments, **_options):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "No space left" in said
    assert "nothing is left there: make room" in said
    assert left(tmp_path) == ["run"]


def test_weights_of_every_kind_come_from_a_whole_model_alone(run, tmp_path):
    (run / "model" / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        export(run, tmp_path / "out")
    torch.manual_seed(0)
    plain = ModelConfig(vocab_size=9, width=8, layers=1, heads=2, encoding=RoPEConfig())
    save(Transformer(plain).to(torch.bfloat16), tmp_path / "half")
    assert export(tmp_path / "half", tmp_path / "out", length=8).dtype == "bfloat16"
