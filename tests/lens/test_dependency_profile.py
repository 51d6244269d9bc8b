import json
import os
import signal
import sys

import numpy as np
import pytest
import torch

from phasewise.cli import main
from phasewise.encodings import RoPEConfig
from phasewise.interrupt import interruptible
from phasewise.lens import dependency as counting
from phasewise.lens import profile as module
from phasewise.lens import report
from phasewise.lens.dependency import dependency
from phasewise.lens.dilation import Dilation
from phasewise.lens.profile import Profile, profile, read
from phasewise.lens.profile_report import figures, label, summary
from phasewise.lens.thresholds import FEWEST_PAIRS
from phasewise.lens.verdict import Verdict, judge, together
from phasewise.lens.width import measure_width
from phasewise.model import ModelConfig, Transformer
from phasewise.model.folder import save
from tests.lens import sources

FAR = sources.FAR


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A text of one document whose lines are drawn from few words."""
    random = np.random.default_rng(0)
    known = ["one", "three", "fourteen", "ninety"]
    text = "\n".join(" ".join(random.choice(known, 8)) for _ in range(1500))
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def genome(tmp_path_factory):
    path = tmp_path_factory.mktemp("genome") / "small.fa"
    bases = np.array(list("ACGT"))[np.random.default_rng(1).integers(0, 4, 60_000)]
    path.write_text(">small\n" + "".join(bases[:40_000]) + "\nNNNN\n" + "".join(bases[40_000:]) + "\n")
    return path


def run(capsys, *arguments):
    try:
        code = main(["profile", *(str(argument) for argument in arguments)])
    except SystemExit as stopped:
        code = stopped.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("value", "error", "kind"),
    [
        (FAR**-0.5, 1e-6, "self-similar"),
        (np.exp(-FAR / 40), 1e-9, "resolution-bound"),
        (np.where(FAR <= 100, 1e-2, 0), 1e-6, "resolution-bound"),
        (FAR**-1.0, 1e-7, "mixed"),
        (FAR**-1.0, 3e-3, "undetermined"),
        (0 * FAR, 1e-6, "undetermined"),
    ],
)
def test_verdict_on_sources_with_known_kernels(value, error, kind):
    verdict = read(sources.curve_of(FAR, value, error=error)).verdict
    assert verdict.kind == kind
    assert verdict.reasons


def test_comb_that_stretches_with_the_window_is_mixed_since_it_needs_its_resolution():
    distances = module.spread(16_384)
    kinds = {}
    for height in (1.0, 1.5):
        comb = np.where(distances % 4 == 0, height, 1.0) * distances**-0.3
        verdict = read(sources.curve_of(distances, comb)).verdict
        kinds[height] = verdict.kind
    assert kinds == {1.0: "self-similar", 1.5: "mixed"}
    assert any("that needs resolution" in reason for reason in verdict.reasons)


def test_reasons_give_each_number_beside_its_threshold():
    reasons = " ".join(read(sources.curve_of(FAR, FAR**-0.5)).verdict.reasons)
    for wanted in ("W90 = ", "(threshold 0.1)", "slope -0.50", "dilates the kernel by 3.9", "from 0.7"):
        assert wanted in reasons


@pytest.mark.parametrize("phrase", ["ab", "abc", "the cat sat. ", "It is a truth, universally. "])
@pytest.mark.parametrize("size", [30, 300, 3000, 30_000])
def test_text_that_repeats_itself_is_undetermined_however_long_and_says_why(phrase, size):
    text = np.frombuffer((phrase * size)[:size].encode(), dtype=np.uint8)
    curve = dependency(text, np.array([size]), distances=module.spread(size // 3))
    verdict = read(curve).verdict
    assert verdict.kind == "undetermined"
    wanted = "too little data" if size < FEWEST_PAIRS else "the dependence does not fall with distance"
    assert verdict.reasons[0].startswith(wanted)


def test_hidden_kernel_is_not_called_resolution_bound():
    width = measure_width(sources.curve_of(FAR, FAR**-1.0, error=3e-3))
    assert width.kind == "hidden"
    stays = Dilation(factor=1, interval=(1, 1), misfit=0, stretch=4, relative=0)
    assert judge(width, None, stays).kind == "undetermined"


def test_granularities_that_disagree_are_mixed_and_undetermined_ones_have_no_say():
    def of(*kinds):
        return together([(kind, Verdict(kind=kind, reasons=())) for kind in kinds]).kind

    assert of("self-similar", "self-similar", "undetermined") == "self-similar"
    assert of("self-similar", "resolution-bound") == "mixed"
    assert of("undetermined") == "undetermined"


def test_profile_of_words_written_at_random_ends_at_the_longest_word(words):
    (corpus,) = profile([f"text:{words}"], granularities=["bytes", "words"], longest=400).corpora
    characters, tokens = corpus.granularities
    assert (corpus.unit, corpus.longest) == ("character", 400)
    assert characters.information.width.seen < 60
    assert characters.span == 1
    assert tokens.span > 5
    assert tokens.information.distances[-1] == int(400 / tokens.span)
    assert characters.information.blocks == "pieces"
    assert characters.information.complete


def test_distances_go_by_default_as_far_as_half_of_the_pairs(genome):
    (corpus,) = profile([f"genome:{genome}"], granularities=["bases"]).corpora
    pairs = corpus.granularities[0].information.pairs
    assert corpus.longest == corpus.granularities[0].information.distances[-1]
    assert 1 <= pairs[-1] / (pairs[0] / 2) < 1.05
    assert corpus.verdict.kind == "undetermined"


def test_values_survive_json(genome):
    found = profile([f"genome:{genome}"], granularities=["bases", "kmers:4"], longest=100)
    assert Profile.model_validate_json(found.model_dump_json()) == found


def test_report_shows_corpora_side_by_side_and_each_by_itself(words, genome):
    names = [f"text:{words}", f"genome:{genome}"]
    found = Profile(
        corpora=tuple(
            profile([name], granularities=[finest], longest=50).corpora[0]
            for name, finest in zip(names, ("bytes", "bases"), strict=True)
        ),
        shuffle="document",
        seed=0,
        partial=None,
    )
    assert [label(corpus) for corpus in found.corpora] == ["text:words.txt", "genome:small.fa"]
    dependency, reach = figures(found)
    assert list(dependency.views) == ["side by side", "text:words.txt", "genome:small.fa"]
    assert [line.name for line in dependency.views["side by side"].lines] == [
        "text:words.txt",
        "genome:small.fa",
    ]
    for line in dependency.views["text:words.txt"].lines:
        assert min(*line.low, *line.high) > 0
    assert reach.views["text:words.txt"].lines[0].y[-1] == pytest.approx(1)
    assert "resampled pieces" in summary(found)["bands"]


def test_model_is_measured_on_held_out_text_beside_the_data(words, tmp_path):
    torch.manual_seed(0)
    save(
        Transformer(ModelConfig(vocab_size=256, width=16, layers=1, heads=2, encoding=RoPEConfig())),
        tmp_path / "m",
    )
    view = module.ModelView(str(tmp_path / "m"), context=32, windows=3)
    (corpus,) = profile([f"text:{words}"], granularities=["words"], longest=50, model=view).corpora
    assert corpus.model.blocks == "windows"
    assert corpus.model.distances[-1] <= 32
    small = Transformer(ModelConfig(vocab_size=99, width=16, layers=1, heads=2, encoding=RoPEConfig()))
    save(small, tmp_path / "small")
    view = module.ModelView(str(tmp_path / "small"), context=32, windows=3)
    with pytest.raises(ValueError, match="the model knows 99"):
        profile([f"text:{words}"], granularities=["words"], longest=50, model=view)


def test_command_prints_the_table_and_writes_the_report(capsys, tmp_path, words):
    out, granularities = tmp_path / "report", ("bytes", "words", "bpe:300")
    code, said, _ = run(
        capsys, f"text:{words}", "--granularities", *granularities, "--longest", 200, "--out", out
    )
    assert code == 0
    for wanted in ("text:words.txt", "bytes", "words", "bpe:300", "verdict", ", as "):
        assert wanted in said
    files = {path.name for path in out.iterdir()}
    assert files >= {"report.json", "report.html", "figure-dependency.svg", "figure-reach.png"}
    document = json.loads((out / "report.json").read_text())
    assert Profile.model_validate(document["values"]).partial is None
    assert document["recipe"]["longest"] == 200


def test_json_is_the_one_thing_on_stdout(capsys, tmp_path, genome):
    code, said, _ = run(capsys, f"genome:{genome}", "--longest", 50, "--out", tmp_path / "report", "--json")
    assert code == 0
    assert json.loads(said)["values"]["corpora"][0]["unit"] == "base"


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (b"", [], "is empty; give a file with text"),
        (b"some\0text" * 9, [], "is binary"),
        (b"a few words only" * 3, ["--longest", "100"], "so no two are 100 apart; ask for distances up to"),
        (b"a few words only" * 3, ["--granularities", "steps"], "no granularity 'steps'"),
        (b"a few words only" * 3, ["--split", "dev"], "has no split 'dev'"),
        (
            b"a few words only" * 3,
            ["--longest", "0"],
            "longest must be at least 1 and at most 1000000000000, but is 0",
        ),
        (b"a few words only" * 3, ["--longest", str(10**30)], "longest must be at least 1 and at most"),
        (b"a few words only" * 3, ["--seed", "-1"], "seed must be at least 0, but is -1"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys, tmp_path, content, arguments, said):
    (tmp_path / "given.txt").write_bytes(content)
    code, out, err = run(capsys, f"text:{tmp_path / 'given.txt'}", *arguments, "--out", tmp_path / "report")
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert not (tmp_path / "report").exists()


def test_no_corpus_is_refused(capsys, tmp_path):
    code, _, err = run(capsys, "--out", tmp_path / "report")
    assert code == 2
    assert "give at least one corpus" in err
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--checkpoint", "nope"], "no folder nope"),
        (["--checkpoint", "MODEL", "--context", "1"], "choose a context from 2 to"),
        (["--checkpoint", "MODEL", "--tokenizer", "bpe:300"], "the model knows 256"),
        (["text:nowhere.txt"], "nowhere.txt"),
        (["--granularities", "bytes", "steps"], "no granularity 'steps'"),
    ],
)
def test_input_that_is_needed_late_is_refused_before_anything_is_measured(
    capsys, monkeypatch, tmp_path, words, arguments, said
):
    model = Transformer(ModelConfig(vocab_size=256, width=16, layers=1, heads=2, encoding=RoPEConfig()))
    save(model, tmp_path / "m")
    monkeypatch.setattr(module, "dependency", lambda *_arguments, **_options: pytest.fail("measured"))
    given = [str(tmp_path / "m") if argument == "MODEL" else argument for argument in arguments]
    code, _, err = run(capsys, f"text:{words}", *given, "--out", tmp_path / "report")
    assert code == 2
    assert said in err


def test_folder_in_use_is_refused_before_anything_is_read(capsys, tmp_path):
    (tmp_path / "report.json").write_text("{}")
    code, _, err = run(capsys, "austen", "--out", tmp_path)
    assert code == 2
    assert "already exists" in err


def test_interrupted_corpus_is_kept_with_the_granularities_that_are_done(monkeypatch, words):
    measured = []

    def interrupted(*arguments, **options):
        if len(measured) == 1:
            raise KeyboardInterrupt
        measured.append(real(*arguments, **options))
        return measured[-1]

    real = module.dependency
    monkeypatch.setattr(module, "dependency", interrupted)
    found = profile([f"text:{words}"], granularities=["bytes", "words"], longest=50)
    assert found.partial == f"interrupted at text:{words}"
    assert [level.granularity for level in found.corpora[0].granularities] == ["bytes"]


@pytest.mark.parametrize("place", range(3, 103, 9))
def test_ctrl_c_at_any_moment_keeps_every_distance_that_is_done(words, place):
    """The signal comes at a line of `dependency` after the first distance, whichever line that is."""
    left = place

    def trace(frame, event, _argument):
        nonlocal left
        if frame.f_code is not dependency.__code__:
            return None
        if event == "line" and len(frame.f_locals.get("baseline", ())) > 0:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    with interruptible() as stop:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            found = profile([f"text:{words}"], granularities=["bytes"], longest=50, stop=stop)
        finally:
            sys.settrace(before)
    (level,) = found.corpora[0].granularities
    assert found.partial == f"interrupted at text:{words}"
    assert not level.information.complete
    assert len(level.information.distances) == len(level.information.value) > 0


def press_ctrl_c(monkeypatch, owner, name, *, calls):
    """Let the process get SIGINT when a function is called for one of the given times, counted from 1."""
    real, made = getattr(owner, name), []

    def pressed(*arguments, **options):
        made.append(name)
        if len(made) in calls:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, pressed)


def test_ctrl_c_writes_what_is_done_marked_partial_with_exit_code_130(capsys, monkeypatch, tmp_path, words):
    out = tmp_path / "report"
    press_ctrl_c(monkeypatch, counting, "_joint", calls=[5])
    code, _, err = run(capsys, f"text:{words}", "--longest", 50, "--out", out)
    assert code == 130
    assert err == f"phasewise: interrupted at text:{words}; what was done is in {out}\n"
    values = Profile.model_validate(json.loads((out / "report.json").read_text())["values"])
    assert values.partial == f"interrupted at text:{words}"
    assert len(values.corpora[0].granularities[0].information.value) == 3
    assert "Partial result." in (out / "report.html").read_text()


def test_ctrl_c_before_anything_is_measured_writes_nothing(capsys, monkeypatch, tmp_path, words):
    press_ctrl_c(monkeypatch, module, "sequences", calls=[1])
    code, _, err = run(capsys, f"text:{words}", "--longest", 50, "--out", tmp_path / "report")
    assert (code, err) == (130, "phasewise: interrupted\n")
    assert not (tmp_path / "report").exists()


def test_ctrl_c_while_the_report_is_drawn_leaves_it_whole(capsys, monkeypatch, tmp_path, words):
    press_ctrl_c(monkeypatch, report, "draw", calls=[2])
    code, _, err = run(capsys, f"text:{words}", "--longest", 50, "--out", tmp_path / "report")
    assert (code, err) == (0, "")
    assert len(list((tmp_path / "report").iterdir())) == 6


def test_second_ctrl_c_while_the_report_is_drawn_keeps_the_values(capsys, monkeypatch, tmp_path, words):
    monkeypatch.setattr("phasewise.interrupt.SAME_WISH", 0.0)
    press_ctrl_c(monkeypatch, report, "draw", calls=[1, 2])
    out = tmp_path / "report"
    code, _, err = run(capsys, f"text:{words}", "--longest", 50, "--out", out)
    assert code == 130
    assert f"every value is in {out / 'report.json'}" in err
    assert Profile.model_validate(json.loads((out / "report.json").read_text())["values"]).partial is None


def test_checkpoint_of_transformers_is_measured_like_one_of_ours(words, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    view = module.ModelView(str(tmp_path / "llama"), context=16, windows=2)
    (corpus,) = profile([f"text:{words}"], granularities=["words"], longest=50, model=view).corpora
    assert corpus.model.complete
    assert np.isfinite(corpus.model.value).all()


def test_many_short_documents_of_a_generated_task_are_profiled():
    (corpus,) = profile(["indirect-indexing"], split="test", longest=20).corpora
    assert corpus.granularities[0].documents == 10_000
    assert corpus.granularities[0].information.blocks == "documents"


def test_a_checkpoint_reads_by_its_own_tokenizer_unless_another_is_given(words, tmp_path, monkeypatch):
    config = ModelConfig(vocab_size=256, width=16, layers=1, heads=2, encoding=RoPEConfig())
    save(Transformer(config), tmp_path / "mine" / "model")
    (tmp_path / "mine" / "model" / "tokenizer.json").write_text("{}")
    for given, said in ((None, "is not a tokenizer.json"), ("bpe:100", "is no vocabulary size")):
        view = module.ModelView(str(tmp_path / "mine"), tokenizer=given, context=32)
        with pytest.raises(ValueError, match=said):
            profile([f"text:{words}"], granularities=["words"], longest=50, model=view)


def test_options_of_a_checkpoint_without_one_are_refused(capsys, tmp_path):
    code, _, err = run(capsys, "austen", "--context", "32", "--out", tmp_path / "report")
    assert code == 2
    assert "--context is of a checkpoint: give one with --checkpoint" in err


@pytest.mark.filterwarnings("error")
def test_a_text_of_one_letter_has_no_dependence_and_says_which_granularity_is_too_short(tmp_path):
    path = tmp_path / "same.txt"
    path.write_text("a" * 20_000)
    (corpus,) = profile([f"text:{path}"], granularities=["bytes"], longest=50).corpora
    assert corpus.verdict.kind == "undetermined"
    with pytest.raises(ValueError, match=r"same\.txt in words: the longest document has 1 tokens"):
        profile([f"text:{path}"], granularities=["bytes", "words"], longest=50)
