import json

import numpy as np
import pytest
import torch

from phasewise.cli import main
from phasewise.encodings import NoPEConfig, PoPEConfig, RoPEConfig, TAPAConfig
from phasewise.evaluate.loss import Measurement
from phasewise.evaluate.retrieval import Retrieval, RetrievalCell
from phasewise.frequencies import Geometric
from phasewise.lens.advise.advice import Advice, Advised, disagreements, held, judge
from phasewise.lens.advise.measured import Measured, held_out, lengths_between
from phasewise.lens.advise.options import Option
from phasewise.model import ModelConfig, Transformer
from phasewise.model import folder as own
from tests.train.small import corpus

pytest.importorskip("plotly", reason="reports need plotly")
pytest.importorskip("safetensors", reason="models on disk need safetensors")

TRAINED, WANTED = 64, 256
RULE = Geometric(base=10_000.0)


def measured(at_trained, at_wanted, found=None):
    """What a setting is made out to have done: a loss at either length, and the share of passkeys found."""
    losses = tuple(
        Measurement(
            **{"length": length, "stride": length, "windows": 1, "tokens": 100, "loss": loss},
            **{"perplexity": None, "bits": 0.0, "accuracy": 0.0, "by_position": ()},
        )
        for length, loss in ((TRAINED, at_trained), (WANTED, at_wanted))
    )
    cells = tuple(
        RetrievalCell(length=length, depth=0.5, examples=4, exact=found or 0.0, loss=1.0)
        for length in (TRAINED, WANTED)
    )
    return Measured(losses=losses, retrieval=None if found is None else Retrieval(cells=cells))


def advised(kind, rank, result, refused=None):
    option = Option(
        **{"kind": kind, "rule": RULE, "rates": (1.0,), "unseen": 0.0, "coarsened": 0.0, "rank": rank},
        **{"confidence": "medium", "reasons": ("because",), "refused": refused},
    )
    return Advised(option=option, settings=None, measured=result)


def judged(*settings, **options):
    ordered, verdict = judge(settings, TRAINED, WANTED, **options)
    return [one.option.kind for one in ordered], verdict, disagreements(ordered, WANTED)


def test_verdict_follows_the_measurement_and_says_what_it_contradicts():
    order, verdict, said = judged(
        advised("YaRN", 1, measured(2.0, 2.4)),
        advised("NTK", 2, measured(2.0, 1.9)),
        advised("leave alone", 3, measured(2.0, 5.0)),
        advised("PI", None, None, refused="it is"),
    )
    assert order == ["NTK", "YaRN", "leave alone", "PI"]
    assert (verdict.kind, verdict.measured) == ("NTK", True)
    assert "YaRN was predicted best, but loses 2.400 nats" in said[0]


@pytest.mark.parametrize(
    ("loss", "kind"), [(2.01, "NTK"), (2.4, "needs fine-tuning"), (2.6, "will not work")]
)
def test_mark_is_the_unchanged_loss_at_the_trained_length(loss, kind):
    _, verdict, _ = judged(
        advised("NTK", 1, measured(2.0, loss)), advised("leave alone", 2, measured(2.0, 9.0))
    )
    assert verdict.kind == kind
    assert verdict.option == "NTK"


def test_equal_losses_are_decided_by_passkeys_and_then_by_what_short_inputs_lose():
    settings = (
        advised("NTK", 1, measured(2.2, 1.990, found=0.25)),
        advised("YaRN", 2, measured(2.1, 1.995, found=0.75)),
        advised("PI", 3, measured(2.0, 1.985, found=0.75)),
        advised("leave alone", 4, measured(2.0, 9.0, found=0.0)),
    )
    order, _, said = judged(*settings)
    assert order == ["PI", "YaRN", "NTK", "leave alone"]
    assert said == ()


@pytest.mark.parametrize(("mark", "kind"), [(2.0, "NTK"), (1.52, "needs fine-tuning")])
def test_setting_below_a_threshold_is_not_given_up_for_an_equal_one_above_it(mark, kind):
    order, verdict, _ = judged(
        advised("NTK", 1, measured(2.1, 2.018)),
        advised("leave alone", 2, measured(mark, 2.025)),
    )
    assert order == ["NTK", "leave alone"]
    assert (verdict.kind, verdict.option) == (kind, "NTK")


def test_passkeys_that_contradict_the_loss_are_reported():
    _, verdict, said = judged(
        advised("PI", 1, measured(2.0, 1.8, found=0.0)),
        advised("NTK", 2, measured(2.0, 1.9, found=1.0)),
        advised("leave alone", 3, measured(2.0, 9.0, found=0.0)),
    )
    assert verdict.kind == "PI"
    assert "finds 0% of the passkeys at 256 tokens where NTK finds 100%" in said[0]


def test_where_nearly_all_inputs_fit_nothing_is_changed():
    _, verdict, _ = judged(
        advised("leave alone", 1, measured(2.0, 9.0)), advised("NTK", 2, measured(2.0, 1.9)), fits=True
    )
    assert (verdict.kind, verdict.option) == ("leave alone", "NTK")


def test_unmeasured_verdict_says_that_it_is_a_prediction():
    order, verdict, said = judged(
        advised("YaRN", 1, None), advised("NTK", 2, None), advised("leave alone", 3, None)
    )
    assert order == ["YaRN", "NTK", "leave alone"]
    assert (verdict.kind, verdict.measured, said) == ("YaRN", False, ())
    assert "not measured" in verdict.reasons[0]


def test_held_out_documents_are_whole_windows_of_those_long_enough():
    short = corpus()
    chosen = held_out(short, "test", wanted=150, tokens=900)
    assert chosen.split("test").lengths.tolist() == [301, 301, 301]
    assert np.array_equal(chosen.split("test")[0], short.split("test")[0][:301])
    with pytest.raises(ValueError, match="the longest one in the test split of small has 400"):
        held_out(short, "test", wanted=400, tokens=600)


def test_lengths_are_the_doubles_between_trained_and_wanted():
    assert lengths_between(100, 450) == (100, 200, 400, 450)
    assert lengths_between(100, 101) == (100, 101)


def save(folder, encoding=None, **changes):
    torch.manual_seed(0)
    config = {"vocab_size": 256, "width": 32, "layers": 2, "heads": 2, **changes}
    own.save(Transformer(ModelConfig(**config, encoding=encoding or RoPEConfig())), folder)
    return str(folder)


@pytest.fixture
def text(tmp_path):
    random = np.random.default_rng(0)
    words = ["the", "pass", "key", "of", "phase", "and", "number", "lens"]
    path = tmp_path / "text.txt"
    path.write_text(" ".join(random.choice(words, 4000).tolist()), encoding="utf-8")
    return f"text:{path}"


QUICK = ["--device", "cpu", "--tokens", "1024", "--examples", "1", "--read", "256"]
LENGTHS = ["--trained-length", "256", "--length", "1024"]


def run(capsys, *arguments):
    code = main(["advise", *map(str, arguments)])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("encoding", [RoPEConfig(), PoPEConfig()], ids=lambda config: config.kind)
def test_advice_is_measured_and_written_whole(encoding, capsys, tmp_path, text):
    out = tmp_path / "report"
    model = save(tmp_path / "model", encoding)
    code, said, _ = run(capsys, model, "--data", text, *LENGTHS, *QUICK, "--out", out)
    assert code == 0
    for wanted in ("Verdict:", "YaRN", "fitted grid", "nothing on retrieval", "report.html"):
        assert wanted in said
    advice = Advice.model_validate(json.loads((out / "report.json").read_text())["values"])
    tried = [one for one in advice.options if one.measured is not None]
    assert len(tried) == 7
    for one in tried:
        assert [loss.length for loss in one.measured.losses] == [256, 512, 1024]
        assert {loss.tokens for loss in one.measured.losses} == {1024}
        assert one.measured.found(1024) is not None
    assert sum(advice.evidence.share) == pytest.approx(1)
    page = (out / "report.html").read_text()
    assert "Loss by length" in page
    assert "Old and new rates" in page
    assert (out / "figure-grid.svg").exists()


@pytest.mark.parametrize("encoding", [NoPEConfig(), TAPAConfig()], ids=lambda config: config.kind)
def test_models_without_rates_are_measured_as_they_are(encoding, capsys, tmp_path, text):
    model = save(tmp_path / "model", encoding)
    code, said, _ = run(capsys, model, "--data", text, *LENGTHS, *QUICK, "--json")
    assert code == 0
    advice = Advice.model_validate(json.loads(said)["values"])
    assert advice.verdict.kind == "nothing to scale"
    assert advice.as_it_is.losses[-1].length == 1024


def test_without_measuring_nothing_but_the_prediction_is_said(capsys, tmp_path, text):
    code, said, _ = run(capsys, save(tmp_path / "model"), "--data", text, *LENGTHS, *QUICK, "--no-measure")
    assert code == 0
    assert "(predicted)" in said


def test_the_folder_of_a_run_is_taken_for_its_model(capsys, tmp_path, text):
    save(tmp_path / "run" / "model")
    code, said, error = run(capsys, tmp_path / "run", "--data", text, *LENGTHS, *QUICK, "--no-measure")
    assert code == 0, error
    assert "(predicted)" in said


def test_without_a_checkpoint_rates_to_pretrain_with_are_recommended(capsys, text):
    code, said, _ = run(capsys, "--data", text, "--length", "512", "--head-dim", "16")
    assert code == 0
    assert "grid for RoPE" in said
    assert "`phasewise compare` does" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["MODEL", "--length", "64", "--trained-length", "64"], "within the 64 tokens that the checkpoint"),
        (["MODEL", "--length", "32", "--trained-length", "64"], "within the 64 tokens that the checkpoint"),
        (["MODEL", "--length", "256"], "does not say its trained length; give trained_length"),
        (["MODEL", "--length", "100000", "--trained-length", "64"], "needs a document of 100001 tokens"),
        (["MODEL", "--length", "0"], "length must be at least 1"),
        (["MODEL", "--length", "256", "--head-dim", "16"], "leave --head-dim out"),
        (["SMALL", "--length", "256", "--trained-length", "64"], "the model knows 200"),
        (["NAN", "--length", "256", "--trained-length", "64"], "is not finite"),
        (["nowhere", "--length", "256"], "no folder nowhere"),
        (["--length", "256"], "give a checkpoint, or --head-dim"),
        *(
            (
                ["--length", "256", "--head-dim", width],
                f"head_dim is {width}; RoPE turns pairs, so give an even number from 4",
            )
            for width in ("1000000000", "7", "2", "-4")
        ),
        (["--length", "1000000", "--head-dim", "8"], "needs a document of 1000001 tokens"),
        (["MODEL", "--length", "256", "--data", "text:BINARY"], "is binary"),
        (["MODEL", *LENGTHS, "--data", "passkey:256"], "examples of one length: choose a corpus"),
        (["MODEL", "--length", "256", "--read", "0"], "read must be at least 2"),
        (["MODEL", "--length", "256", "--tokens", "0"], "tokens must be at least 1"),
        (["MODEL", "--length", "256", "--examples", "-1"], "examples must be at least 0"),
        (["MODEL", "--length", "256", "--seed", "-1"], "seed must be at least 0"),
        (["MODEL", "--length", "256", "--tokenizer", ""], "no tokenizer ''; give"),
        (["--length", "256", "--head-dim", "8", "--tokenizer", ""], "no tokenizer ''; give"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(arguments, said, capsys, tmp_path, text):
    (tmp_path / "binary.txt").write_bytes(b"\0" * 5000)
    broken = Transformer(ModelConfig(vocab_size=256, width=32, layers=2, heads=2, encoding=RoPEConfig()))
    with torch.no_grad():
        broken.embedding.weight[3, 4] = torch.nan
    own.save(broken, tmp_path / "nan")
    names = {
        "MODEL": save(tmp_path / "model"),
        "SMALL": save(tmp_path / "small", vocab_size=200),
        "NAN": str(tmp_path / "nan"),
        "text:BINARY": f"text:{tmp_path / 'binary.txt'}",
    }
    given = [names.get(argument, argument) for argument in arguments]
    data = [] if "--data" in given else ["--data", text]
    code, out, error = run(capsys, *QUICK, *given, *data)
    assert (code, out) == (2, "")
    assert error.count("\n") == 1
    assert said in error


def test_interruption_keeps_what_is_measured_marked_partial(tmp_path, text, monkeypatch):
    from phasewise.data import load
    from phasewise.lens.advise import advice as module
    from phasewise.lens.advise.advice import Wanted, advise
    from phasewise.lens.advise.measured import Bench, Trial

    done = []
    measure = Bench.measure

    def counted(self, rule, advance):
        done.append(rule)
        return measure(self, rule, advance)

    monkeypatch.setattr(module.Bench, "measure", counted)
    found = advise(
        save(tmp_path / "model"),
        load(text),
        Wanted(length=256, trained_length=64, measure=Trial(tokens=256, examples=0), read=256),
        stop=lambda: len(done) > 2,
    )
    assert found.partial == "interrupted: 2 of 7 settings measured"
    assert sum(one.measured is not None for one in found.options) == 2
    assert found.verdict.measured


def test_rates_that_see_no_further_than_a_window_are_left_and_the_model_measured(capsys, tmp_path, text):
    model = save(tmp_path / "model", window=64)
    code, said, _ = run(capsys, model, "--data", text, *LENGTHS, *QUICK, "--json")
    assert code == 0
    advice = Advice.model_validate(json.loads(said)["values"])
    assert (advice.verdict.kind, advice.options, advice.evidence) == ("nothing to scale", (), None)
    assert (advice.bound.window, advice.bound.layers, advice.bound.whole) == (64, 2, 0)
    assert "2 layers have rates, and a window of 64 tokens at most" in advice.verdict.reasons[0]
    assert [loss.length for loss in advice.as_it_is.losses] == [256, 512, 1024]
    assert "as it is" in advice.verdict.reasons[-1]
    longer = save(tmp_path / "longer", window=300)  # sees beyond the 256 trained
    code, said, _ = run(capsys, longer, "--data", text, *LENGTHS, *QUICK, "--no-measure", "--json")
    assert len(json.loads(said)["values"]["options"]) > 1


@pytest.mark.parametrize(("windows", "told"), [((64, None), True), ((300, None), False), (None, False)])
def test_layers_that_gain_nothing_by_a_rule_they_share_are_counted(windows, told, capsys, tmp_path, text):
    model = save(tmp_path / "model", window=windows)
    code, said, _ = run(capsys, model, "--data", text, *LENGTHS, *QUICK, "--no-measure", "--json")
    assert code == 0
    shared = "all 2 layers with rates: it also changes the 1 with windows of 64 tokens at most"
    assert any(shared in reason for reason in json.loads(said)["values"]["verdict"]["reasons"]) == told


@pytest.mark.parametrize(("name", "told"), [("gemma2", True), ("gemma3", False)])
def test_layers_with_a_rule_of_their_own_are_not_counted(name, told, tmp_path):
    pytest.importorskip("transformers", reason="Hugging Face checkpoints need transformers")
    from phasewise.lens.advise.advice import Wanted, advise
    from tests.hf.tiny import tiny

    tiny(name).save_pretrained(tmp_path)
    found = advise(tmp_path, corpus(), Wanted(length=380, measure=None, read=256))
    assert found.verdict.option != "leave alone"
    assert any("also changes the 1 with windows of 8" in said for said in found.verdict.reasons) == told


@pytest.mark.parametrize(
    ("loss", "said"), [(2.01, "serves 256"), (2.4, "fine-tune it"), (2.6, "windows of 64")]
)
def test_model_that_is_left_as_it_is_is_judged_by_what_it_loses(loss, said):
    assert said in held(measured(2.0, loss), TRAINED, WANTED)


@pytest.mark.parametrize("name", ["cohere2", "mistral"])
def test_decoder_whose_rates_are_those_of_windowed_layers_is_told_so(name, tmp_path):
    pytest.importorskip("transformers", reason="Hugging Face checkpoints need transformers")
    from phasewise.lens.advise.advice import Wanted, advise
    from phasewise.lens.advise.measured import Trial
    from tests.hf.tiny import tiny

    tiny(name).save_pretrained(tmp_path)
    found = advise(tmp_path, corpus(), Wanted(length=380, measure=Trial(tokens=380), read=256))
    assert (found.verdict.kind, found.options) == ("nothing to scale", ())
    assert "window of 8 tokens at most" in found.verdict.reasons[0]
    assert "raise max_position_embeddings alone" in found.verdict.reasons[0]
    assert found.as_it_is.losses[-1].length == 380


def test_hugging_face_decoder_is_advised_with_settings_to_paste(tmp_path):
    pytest.importorskip("transformers", reason="Hugging Face checkpoints need transformers")
    from phasewise.lens.advise.advice import Wanted, advise
    from phasewise.lens.advise.measured import Trial
    from tests.hf.tiny import tiny

    tiny("llama").save_pretrained(tmp_path)
    wanted = Wanted(length=380, measure=Trial(tokens=380), read=256)
    found = advise(tmp_path, corpus(), wanted)
    assert (found.family, found.trained) == ("llama", 256)
    losses = {one.option.kind: one.measured.loss(380) for one in found.options if one.measured}
    assert len(set(losses.values())) == len(losses) == 7
    grid = next(one for one in found.options if one.option.kind == "fitted grid")
    assert grid.settings.transformers["rope_parameters"]["rope_type"] == "longrope"
    assert grid.measured.retrieval is None
    with pytest.raises(ValueError, match="within the 256 tokens"):
        advise(tmp_path, corpus(), Wanted(length=200))
