import errno
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from phasewise.cli import main
from phasewise.data import load, windows
from phasewise.encodings import PoPEConfig, RoPEConfig
from phasewise.evaluate import measure, passkeys, retrieve
from phasewise.evaluate.prefixed import Prefixed
from phasewise.hf.language_model import open_language_model
from phasewise.interrupt import Interrupted
from phasewise.model import ModelConfig, Transformer
from phasewise.model.folder import save
from phasewise.positions import Positions
from phasewise.train import evaluation, evaluation_plan
from phasewise.train.evaluation import EvaluateRecipe, evaluate
from phasewise.train.evaluation_report import Evaluation, Report
from phasewise.train.folder import held

CPU = torch.device("cpu")
SENTENCE = "the sea was calm and grey under long low clouds ; nobody spoke ! a gull cried once -"
WORDS = SENTENCE.split()


def transformer(encoding=None, vocab_size=256):
    torch.manual_seed(0)
    sizes = {"width": 16, "layers": 1, "heads": 2}
    model = Transformer(ModelConfig(vocab_size=vocab_size, **sizes, encoding=encoding or RoPEConfig()))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A text, and three checkpoints: two of bytes, one of the letters of Indirect Indexing."""
    folder = tmp_path_factory.mktemp("evaluation")
    random = np.random.default_rng(0)
    (folder / "prose.txt").write_text(" ".join(random.choice(WORDS, 8000)))
    save(transformer(), folder / "runs" / "rope" / "model")
    save(transformer(PoPEConfig()), folder / "runs" / "pope" / "model")
    save(transformer(vocab_size=load("indirect-indexing").vocab_size), folder / "letters")
    return folder


def recipe(place, **changes):
    given = {
        "checkpoints": (str(place / "runs" / "rope"), str(place / "runs" / "pope" / "model")),
        "data": (f"text:{place / 'prose.txt'}",),
        "lengths": (300, 150),
        "tokens": 1000,
        "needles": (1, 2),
        "depths": (0, 1),
        "examples": 2,
    }
    return EvaluateRecipe(**{**given, **changes})


def values(evaluation):
    return evaluation.model_dump(exclude={"seconds"})


def test_every_number_is_that_of_measuring_each_checkpoint_alone(place, tmp_path):
    found = evaluate(recipe(place), tmp_path / "run", figure=False)
    corpus = load(f"text:{place / 'prose.txt'}")
    assert [row.checkpoint.name for row in found.rows] == ["rope", "pope"]
    for row, model in zip(found.rows, (transformer(), transformer(PoPEConfig())), strict=True):
        assert row.checkpoint.parameters == model.parameter_count
        (loss,) = row.losses
        assert [measured.length for measured in loss.measurements] == [150, 300]
        for measured, bits in zip(loss.measurements, loss.bits_per_byte, strict=True):
            over = windows(
                corpus, "test", length=measured.length, stride=measured.length // 2, limit_tokens=1000
            )
            alone = measure(model, over, length=over.length, stride=over.stride, device=CPU)
            assert measured.tokens == 1000
            assert measured.loss == pytest.approx(alone.loss, rel=1e-5)
            assert bits == pytest.approx(alone.loss / math.log(2), rel=1e-5)
        for needles, count in zip(row.retrieval, (1, 2), strict=True):
            (filler,) = corpus.split("test")
            rows = [
                passkeys(filler, encode=str.encode, length=length, depths=(0, 1), needles=count, examples=2)
                for length in (150, 300)
            ]
            alone = retrieve(model, [needle for some in rows for needle in some], device=CPU)
            assert [(cell.length, cell.depth) for cell in needles.cells] == [
                (150, 0), (150, 1), (300, 0), (300, 1)
            ]  # fmt: skip
            for cell, wanted in zip(needles.cells, alone.cells, strict=True):
                assert cell.exact == wanted.exact
                assert cell.loss == pytest.approx(wanted.loss, rel=1e-5)


def test_how_rows_are_batched_changes_nothing_but_rounding(place, tmp_path):
    one, other = (
        evaluate(recipe(place, batch_tokens=size, needles=(1,)), tmp_path / str(size), figure=False)
        for size in (1, 2000)
    )
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a.losses[0].scores == pytest.approx(b.losses[0].scores, rel=1e-6)
        assert [c.loss for c in a.retrieval[0].cells] == pytest.approx(
            [c.loss for c in b.retrieval[0].cells], rel=1e-6
        )


def test_questions_are_measured_by_whole_answers(place, tmp_path):
    given = {"checkpoints": (str(place / "letters"),), "data": ("indirect-indexing",), "lengths": ()}
    found = evaluate(recipe(place, **given, needles=(), tokens=200), tmp_path / "run", figure=False)
    (loss,) = found.rows[0].losses
    assert (loss.task, loss.quantity, loss.bits_per_byte) == (True, "exact match", None)
    (measured,) = loss.measurements
    assert (measured.tokens, measured.windows) == (200, 200)
    assert loss.scores == (measured.exact,) == (measured.accuracy,)


def test_interrupted_run_keeps_its_parts_and_resumes_to_the_same_numbers(place, tmp_path, monkeypatch):
    whole = evaluate(recipe(place), tmp_path / "whole", figure=False)
    measured = []

    def until(name):
        def part(self, title, *rest):
            if title == name:
                raise Interrupted(title)
            measured.append(title)
            return done(self, title, *rest)

        return part

    done = evaluation._Sitting._part
    monkeypatch.setattr(evaluation._Sitting, "_part", until("1-0-300"))
    out = tmp_path / "parts"
    with pytest.raises(Interrupted, match="1-0-300"):
        evaluate(recipe(place), out, figure=False)
    kept = {path.name: path.stat().st_mtime_ns for path in (out / "parts").iterdir()}
    assert set(kept) == {f"{name}.json" for name in measured}
    assert not (out / "report.json").exists()
    monkeypatch.setattr(evaluation._Sitting, "_part", done)
    resumed = evaluate(recipe(place), out, resume=True, figure=False)
    assert values(resumed) == values(whole)
    assert {name: (out / "parts" / name).stat().st_mtime_ns for name in kept} == kept
    assert evaluate(recipe(place), out, resume=True, figure=False) == resumed


def test_resuming_on_another_text_or_with_another_recipe_is_refused(place, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((place / "prose.txt").read_text())
    given = recipe(place, data=(f"text:{text}",), needles=())
    evaluate(given, tmp_path / "run", figure=False)
    (tmp_path / "run" / "report.json").unlink()
    with pytest.raises(ValueError, match="was begun with another tokens"):
        evaluate(given.model_copy(update={"tokens": 900}), tmp_path / "run", resume=True, figure=False)
    text.write_text(text.read_text().replace("gull", "crow"))
    with pytest.raises(ValueError, match="has changed since"):
        evaluate(given, tmp_path / "run", resume=True, figure=False)


def test_figures_show_every_checkpoint_length_and_depth(place, tmp_path):
    evaluate(recipe(place), tmp_path / "run")
    drawn = (tmp_path / "run" / "figure.svg").read_text()
    for wanted in ("rope", "pope", "150", "300", "bits per byte", "place in windows of 300 tokens"):
        assert f">{wanted}</text>" in drawn
    heat = (tmp_path / "run" / "needles.svg").read_text()
    for wanted in ("rope, 1 needle", "pope, 2 needles", "depth", "share retrieved"):
        assert f">{wanted}</text>" in heat
    assert (tmp_path / "run" / "needles.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def llama(place):
    """A Hugging Face checkpoint with a tokenizer of its own, which puts a token before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator([(place / "prose.txt").read_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes, max_position_embeddings=64, bos_token_id=0))
    model.save_pretrained(place / "llama")
    tokenizer.save(str(place / "llama" / "tokenizer.json"))
    return model.eval(), tokenizer


def test_hugging_face_checkpoint_is_read_with_its_tokenizer_and_its_first_token(place, llama, tmp_path):
    model, tokenizer = llama
    given = {"checkpoints": (str(place / "llama"),), "needles": (), "lengths": (64,), "stride": 64}
    found = evaluate(recipe(place, **given, tokens=128), tmp_path / "run", figure=False)
    (row,) = found.rows
    assert (row.checkpoint.family, row.checkpoint.trained_length) == ("llama", 64)
    assert (row.checkpoint.prefix, row.losses[0].corpus.unit) == ((0,), "token")
    test = load(f"text:{place / 'prose.txt'}", tokenizer=str(place / "llama" / "tokenizer.json"))
    tokens = torch.from_numpy(test.split("test")[0][:129].astype(np.int64))
    losses = []
    for start in (0, 64):
        with torch.no_grad():
            logits = model(torch.cat([torch.zeros(1).long(), tokens[start : start + 64]])[None]).logits[0, 1:]
        after = tokens[start + 1 : start + 65]
        losses += (-logits.double().log_softmax(-1)[torch.arange(64), after]).tolist()
    (measured,) = row.losses[0].measurements
    assert measured.loss == pytest.approx(sum(losses) / 128, rel=1e-5)
    letters = len(tokenizer.decode(tokens[1:].tolist()).encode())
    assert row.losses[0].scores[0] == pytest.approx(sum(losses) / math.log(2) / letters, rel=1e-5)


@pytest.mark.parametrize(
    ("template", "prefix"),
    [("$A", ()), ("<s> $A", (0,)), ("<mask> <s> $A </s>", (1, 0)), ("$A </s>", ())],
)
def test_prefix_is_what_a_tokenizer_puts_before_text_and_not_what_it_puts_after(template, prefix, tmp_path):
    from tokenizers import Tokenizer, models, processors

    special = ["<s>", "<mask>", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate([*special, "a"])}))
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, special.index(token)) for token in special]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert evaluation_plan._prefix(str(tmp_path / "tokenizer.json")) == prefix


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [1, 106]}, None, (1, 106)),
        ({"eos_token_id": 1}, {"eos_token_id": [1, 106]}, (1, 106)),
        ({"eos_token_id": 1}, {"temperature": 1.0}, (1,)),
        ({"text_config": {"eos_token_id": 7}}, {}, (7,)),
    ],
)
def test_generation_stops_at_every_token_that_the_checkpoint_ends_with(
    config, generation, expected, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert evaluation_plan._stop(tmp_path) == expected


@pytest.mark.parametrize("written", ["2", 2.0, True, [1, "2"], {"a": 1}])
def test_what_ends_a_text_is_a_number_or_refused(tmp_path, written):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": written}))
    with pytest.raises(
        ValueError, match=r"eos_token_id in .*config\.json is .*: write a token's number there"
    ):
        evaluation_plan._stop(tmp_path)


def test_bits_per_byte_count_the_space_before_the_first_scored_word(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {f"\u2581{word}": number for number, word in enumerate(["sea", "was", "calm", "grey"])}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "words.txt").write_text(" ".join(["sea was calm grey"] * 100))
    corpus = load(f"text:{tmp_path / 'words.txt'}", tokenizer=str(tmp_path / "tokenizer.json"))
    (document,) = corpus.split("test")
    assert len(document) == 40
    over = windows(corpus, "test", length=8, limit_tokens=11)
    text = corpus.decode(document)
    assert evaluation._bytes(over) == len(" ".join(text.split()[:12])) - len(text.split()[0])


def test_prefix_is_read_before_padded_rows_and_gives_no_logits():
    model = transformer()
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    with torch.no_grad():
        padded = Prefixed(model, (7, 8))(tokens, at=Positions.padded(mask))
        plain = Prefixed(model, (7, 8))(tokens)
        short = model(torch.cat([torch.tensor([7, 8]), tokens[1, :5]])[None])[0, 2:]
    assert padded.shape == plain.shape == (2, 9, 256)
    assert torch.allclose(padded[0], plain[0], atol=1e-5)
    assert torch.allclose(padded[1, :5], short, atol=1e-5)


def run(capsys, *arguments):
    """Exit code, stdout and stderr of `phasewise evaluate`."""
    try:
        code = main(["evaluate", *map(str, arguments)])
    except SystemExit as stopped:
        code = stopped.code
    return code, *capsys.readouterr()


def test_command_prints_tables_or_json_and_resumes(capsys, place, tmp_path):
    data = ["--data", f"text:{place / 'prose.txt'}", "--lengths", 150, 300, "--tokens", 600, "--needles", 1]
    common = ["--out", tmp_path / "run", "--no-figure", "--device", "cpu"]
    code, out, err = run(capsys, place / "runs" / "rope", place / "runs" / "pope", *data, *common)
    assert code == 0
    out = " ".join(out.split())
    for wanted in (
        "rope",
        "pope",
        "150",
        "300",
        "bits per byte",
        "600 scored tokens",
        "1 needle",
        "report.json",
    ):
        assert wanted in out
    assert "at 300" in err
    code, out, _ = run(capsys, *common, "--resume", "--json")
    assert code == 0
    assert len(Report.model_validate(json.loads(out)).values.rows) == 2
    assert isinstance(Evaluation.model_validate(json.loads(out)["values"]), Evaluation)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{rope}", "--lengths", "150000"], "150000"),
        (["{rope}", "--lengths", "2000", "--tokens", "99"], "99 tokens do not fill one window of 2000"),
        (["{rope}"], "give lengths, as 1024 2048 4096"),
        (["{rope}", "--needles", "1"], "needles are hidden at each length: give lengths"),
        (["{rope}", "--lengths", "100", "--needles", "2"], "length 100 does not hold 2 needles"),
        (["{rope}", "{rope}", "--lengths", "100"], "is given twice"),
        (["{nowhere}", "--lengths", "100"], "no folder"),
        (["{letters}", "--lengths", "100"], "knows 66 tokens: give the tokenizer it was trained with"),
        (["{rope}", "--data", "indirect-indexing"], "knows 256 tokens, but indirect-indexing has only 66"),
        (["{rope}", "--lengths", "100", "--split", "last"], "has no split 'last'"),
        (["{rope}", "--lengths", "100", "--dtype", "int4"], "unknown dtype 'int4'"),
        (
            ["{rope}", "--lengths", "100", "--depths", "2"],
            "--depths: Input should be less than or equal to 1",
        ),
        (["--lengths", "100"], "give at least one checkpoint"),
        (
            ["{letters}", "--data", "indirect-indexing", "--lengths", "50", "--needles", "1"],
            "is not: give a text",
        ),
    ],
)
def test_bad_input_is_one_line_with_the_remedy_and_exit_code_2(capsys, place, tmp_path, arguments, said):
    names = {"rope": place / "runs" / "rope", "letters": place / "letters", "nowhere": place / "nowhere"}
    given = [argument.format(**names) for argument in arguments]
    if "--data" not in given:
        given += ["--data", f"text:{place / 'prose.txt'}"]
    code, out, err = run(capsys, *given, "--out", tmp_path / "run", "--device", "cpu")
    assert (code, out) == (2, "")
    assert said in err
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_line_with_the_way_on(capsys, place, tmp_path, monkeypatch):
    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluation, "replacing", no_space)
    data = ["--data", f"text:{place / 'prose.txt'}", "--lengths", 150, "--tokens", 600]
    code, out, err = run(capsys, place / "runs" / "rope", *data, "--out", tmp_path / "run", "--device", "cpu")
    assert (code, out) == (1, "")
    said = err.splitlines()[-1]
    assert "cannot be written to" in said
    assert said.endswith(f"go on with: phasewise evaluate --out {tmp_path / 'run'} --resume")


def test_resuming_on_a_disk_that_is_read_only_says_to_resume_a_copy(monkeypatch, tmp_path):
    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", refused)
    said = r"\(Read-only file system\): make it writable, or resume a copy"
    with pytest.raises(ValueError, match=said), held(tmp_path):
        pass


def test_tasks_for_a_checkpoint_that_does_not_know_the_letters_are_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_plan, "_tasks", lambda *_: None)
    letters = recipe(place, checkpoints=(str(place / "letters"),), lengths=(), needles=(), tasks=("piqa",))
    with pytest.raises(ValueError, match="has a token 122, but the checkpoint letters knows 66 tokens: give"):
        evaluate(letters, tmp_path / "run", figure=False)
    assert not (tmp_path / "run").exists()


def test_tasks_without_lm_eval_name_the_extra(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for name in ("phasewise.evaluate.tasks", "phasewise.evaluate.harness"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ValueError, match=r"tasks need lm_eval: pip install 'phasewise\[eval\]'"):
        evaluate(recipe(place, tasks=("piqa",)), tmp_path / "run", figure=False)


@pytest.mark.slow
def test_task_of_a_hugging_face_checkpoint_equals_a_loop_over_its_choices(capsys, place, llama, tmp_path):
    pytest.importorskip("lm_eval", reason="tasks need lm-eval: pip install 'phasewise[eval]'")
    model, tokenizer = llama
    rows = [
        {"goal": f"see {what}", "sol1": f"look {one}", "sol2": "the sea was calm", "label": number % 2}
        for number, (what, one) in enumerate((a, b) for a in WORDS[:4] for b in WORDS[4:8])
    ]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = 0
    for row in rows:
        scores = []
        before = tokenizer.encode(f"Question: {row['goal']}\nAnswer:").ids
        for choice in (row["sol1"], row["sol2"]):
            after = tokenizer.encode(f" {choice}", add_special_tokens=False).ids
            with torch.no_grad():
                logits = model(torch.tensor([before + after])).logits[0].double().log_softmax(-1)
            places = range(len(before) - 1, len(before) + len(after) - 1)
            scores.append(
                sum(logits[place, token].item() for place, token in zip(places, after, strict=True))
            )
        right += scores.index(max(scores)) == row["label"]
    given = ["--tasks", f"piqa:{tmp_path / 'piqa.jsonl'}", "--data", f"text:{place / 'prose.txt'}"]
    code, out, err = run(
        capsys, place / "llama", *given, "--out", tmp_path / "run", "--device", "cpu", "--json"
    )
    assert (code, err.split()) == (0, ["llama:", "piqa:", err.split()[2], "s"]), (
        "a line, and no library's noise"
    )
    (row,) = Report.model_validate(json.loads(out)).values.rows
    assert (row.losses, row.retrieval) == ((), ())
    assert row.tasks[0].examples == len(rows)
    assert row.tasks[0].metrics["acc"] == pytest.approx(right / len(rows))
    assert 0 < right < len(rows)


def test_continuing_by_a_cache_equals_asking_for_each_next_token(place, llama):
    model, _ = llama
    seen = torch.tensor([[5, 9, 200, 31]])
    for folder, reference in (
        (place / "llama", lambda tokens: model(tokens).logits),
        (place / "runs" / "pope" / "model", None),
    ):
        opened = open_language_model(folder)
        ask = reference or opened
        tokens = torch.cat([torch.tensor([[7]]), seen], 1)
        with torch.no_grad():
            for _ in range(8):
                tokens = torch.cat([tokens, ask(tokens)[:, -1:].argmax(-1)], 1)
        made = opened.continued(tokens[:, :5], length=8)
        assert made.tolist() == tokens[0, 5:].tolist()
        stop = made[3].item()
        first = made.tolist().index(stop) + 1
        assert (
            opened.continued(tokens[:, :5], length=8, stop=[stop]).tolist()[:first] == made.tolist()[:first]
        )
