import errno
import json
import math
import os
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from phasewise.interrupt import Interrupted
from phasewise.train import compare as module
from phasewise.train import loop
from phasewise.train.compare import compare, read_begun
from phasewise.train.folder import Unwritten, held
from phasewise.train.recipe import SCALINGS, CompareRecipe
from phasewise.train.report import Comparison

TINY = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "context": 16,
    "batch_size": 2,
    "steps": 4,
    "warmup": 1,
    "checkpoint_every": 2,
    "evaluate_tokens": 300,
}


def tiny(**changes) -> CompareRecipe:
    return CompareRecipe(**{**TINY, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison of all encodings from two seeds, in one sitting."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return compare(tiny(seeds=(0, 1), dropout=0.1), out), out


def values(comparison: Comparison) -> dict:
    """The comparison without what time it took."""
    dumped = comparison.model_dump()
    del dumped["seconds"]
    for row in dumped["rows"]:
        for run in row["runs"]:
            del run["train_seconds"], run["evaluate_seconds"]
    return dumped


def stop_after(monkeypatch, count):
    """Press Ctrl-C, so to speak, when it is asked for the `count`-th time."""
    asked = iter(range(1, 100_000))
    monkeypatch.setattr(module, "stoppable", lambda: nullcontext(lambda: next(asked) >= count))


def test_every_encoding_and_scaling_is_measured_from_the_trained_length_to_eight_times_it(whole):
    comparison, _ = whole
    assert [(row.encoding, row.scaling) for row in comparison.rows] == [
        ("rope", None),
        *(("rope", scaling) for scaling in SCALINGS),
        ("pope", None),
        ("tapa", None),
        ("nope", None),
        ("alibi", None),
    ]
    for row in comparison.rows:
        assert [run.seed for run in row.runs] == [0, 1]
        for run in row.runs:
            assert [m.length for m in run.measurements] == [16, 32, 64, 128]
            assert [m.stride for m in run.measurements] == [8, 16, 32, 64]
            assert {m.tokens for m in run.measurements} == {300}
            assert (run.frozen_phases == 0.0) if row.encoding == "pope" else (run.frozen_phases is None)


def test_scaling_is_rope_at_the_trained_length_and_something_else_beyond(whole):
    rope, *scaled = whole[0].rows[:4]
    for row in scaled:
        for run, plain in zip(row.runs, rope.runs, strict=True):
            assert run.measurements[0] == plain.measurements[0]
            assert run.measurements[-1].loss != plain.measurements[-1].loss


def test_scores_are_the_mean_and_every_seed(whole):
    comparison, _ = whole
    row = comparison.rows[4]
    for place, score in enumerate(comparison.scores(row)):
        losses = tuple(run.measurements[place].loss for run in row.runs)
        assert score.seeds == losses
        assert score.mean == pytest.approx(sum(losses) / 2, rel=1e-15)


def test_report_says_what_was_measured_on_what_and_is_plain_json(whole):
    comparison, out = whole
    report = json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)
    assert Comparison.model_validate(report["values"]) == comparison
    assert report["recipe"] == tiny(seeds=(0, 1), dropout=0.1).model_dump(mode="json")
    assert {"commit", "dirty", "device", "versions", "date"} < set(report)
    assert comparison.corpus.name == "austen"
    assert comparison.corpus.unit == "byte"
    assert comparison.trained_tokens == 4 * 2 * 16
    assert comparison.seconds == pytest.approx(
        sum(run.train_seconds + run.evaluate_seconds for row in comparison.rows for run in row.runs)
    )


def test_run_folder_holds_recipe_figures_metrics_and_checkpoints(whole):
    _, out = whole
    assert {path.name for path in out.iterdir()} == {
        "recipe.json",
        "report.json",
        "figure.svg",
        "figure.png",
        "runs",
    }
    assert read_begun(out).recipe == tiny(seeds=(0, 1), dropout=0.1)
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "pope" in (out / "figure.svg").read_text()
    for name in ("rope", "pope", "tapa", "nope", "alibi"):
        for seed in (0, 1):
            names = sorted(
                path.name.split("-")[0] for path in (out / "runs" / f"{name}-seed{seed}").iterdir()
            )
            assert names == ["checkpoint", "checkpoint", "evaluation.json", "metrics.jsonl", "model"]


@pytest.mark.parametrize("count", [1, 6, 30, 70])
def test_interrupted_comparison_resumed_equals_the_uninterrupted_one(whole, tmp_path, monkeypatch, count):
    recipe = tiny(seeds=(0, 1), dropout=0.1)
    stop_after(monkeypatch, count)
    with pytest.raises(Interrupted, match="seed"):
        compare(recipe, tmp_path / "run", figure=False)
    assert not (tmp_path / "run" / "report.json").exists()
    monkeypatch.undo()
    assert values(compare(recipe, tmp_path / "run", resume=True, figure=False)) == values(whole[0])


def test_resuming_a_finished_comparison_gives_its_report_again_and_changes_nothing(whole):
    comparison, out = whole
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert compare(tiny(seeds=(0, 1), dropout=0.1), out, resume=True) == comparison
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_resuming_another_recipe_is_refused_naming_the_fields(whole):
    with pytest.raises(
        ValueError, match=r"another steps \(4, now 5\), dropout \(0.1, now 0.0\): resume it as begun"
    ):
        compare(tiny(seeds=(0, 1), steps=5), whole[1], resume=True)


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run to resume"):
        compare(tiny(), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"recipe": {}}', '{"recipe": {"colour": 1}}'])
def test_recipe_that_cannot_be_read_is_refused(tmp_path, content):
    (tmp_path / "recipe.json").write_text(content)
    said = rf"recipe.json is not a recipe of compare \(.*\): choose another folder, or delete {tmp_path} to start"
    with pytest.raises(ValueError, match=said):
        compare(tiny(), tmp_path, resume=True)


@pytest.mark.parametrize("place", ["file", "folder"])
def test_place_that_holds_something_is_refused_and_left_alone(tmp_path, place):
    out = tmp_path / "run"
    if place == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(ValueError, match="already exists: choose another folder"):
        compare(tiny(), out)
    assert (out if place == "file" else out / "mine").read_text() == "mine"
    assert len(list(tmp_path.rglob("*"))) == (1 if place == "file" else 2)


def test_changed_corpus_is_refused_on_resume(tmp_path, monkeypatch):
    text = tmp_path / "book.txt"
    text.write_text("It is a truth universally acknowledged. " * 200)
    recipe = tiny(data=f"text:{text}", encodings=("nope",))
    stop_after(monkeypatch, 1)
    with pytest.raises(Interrupted):
        compare(recipe, tmp_path / "run", figure=False)
    text.write_text("It was the best of times, it was the worst of times. " * 200)
    with pytest.raises(ValueError, match="has changed since"):
        compare(recipe, tmp_path / "run", resume=True, figure=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": "austin"}, "austin.*there are austen, chorales"),
        ({"evaluate_tokens": 127}, "127 do not fill one window of 128: ask for more tokens"),
        ({"evaluate_tokens": 10**9, "evaluate_lengths": (16, 10**8)}, "needs a document of 100000001 tokens"),
        ({"evaluate_stride": 17}, "stride must be from 1 to the length 16"),
        ({"heads": 3}, "does not divide into 3 heads"),
        ({"width": 6, "heads": 2}, "head_dim.*3"),
        ({"data": "indirect-indexing"}, "use 50 for the context"),
        ({"data": "indirect-indexing", "context": 50, "evaluate_lengths": (50, 100)}, "rows of 50 tokens"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        compare(tiny(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_task_is_compared_by_accuracy_at_its_one_length(tmp_path):
    recipe = tiny(data="indirect-indexing", context=50, encodings=("rope", "pope"), evaluate_tokens=40)
    comparison = compare(recipe, tmp_path / "run", figure=False)
    assert comparison.quantity == "accuracy"
    assert [row.name for row in comparison.rows] == ["rope", "pope"]
    for row in comparison.rows:
        (measured,) = row.runs[0].measurements
        assert (measured.length, measured.tokens) == (50, 40)
        assert comparison.scores(row)[0].mean == measured.accuracy
        assert 0 <= measured.accuracy <= 1


def test_bits_and_perplexity_belong_to_the_loss(whole):
    for row in whole[0].rows:
        for run in row.runs:
            for measured in run.measurements:
                assert measured.bits == pytest.approx(measured.loss / math.log(2))
                assert measured.perplexity == pytest.approx(math.exp(measured.loss))


def begun(out, monkeypatch, count=1, **changes):
    """A run of one encoding stopped after a while."""
    stop_after(monkeypatch, count)
    with pytest.raises(Interrupted):
        compare(tiny(encodings=("nope",), **changes), out, figure=False)
    monkeypatch.undo()
    return tiny(encodings=("nope",), **changes)


def test_folder_another_process_works_on_is_refused_at_once(tmp_path, monkeypatch):
    recipe = begun(tmp_path / "run", monkeypatch)
    with (
        held(tmp_path / "run"),
        pytest.raises(ValueError, match=f"another process is working on {tmp_path / 'run'}: wait until"),
    ):
        compare(recipe, tmp_path / "run", resume=True, figure=False)
    compare(recipe, tmp_path / "run", resume=True, figure=False)


def test_run_is_held_from_its_first_step_to_its_report(tmp_path, monkeypatch):
    out, refused = tmp_path / "run", []

    def try_to_resume(*arguments, **options):
        with pytest.raises(ValueError, match="another process is working on"):
            compare(recipe, out, resume=True, figure=False)
        refused.append(arguments[0].name)
        return write(*arguments, **options)

    recipe, write = tiny(encodings=("nope",)), module.record
    monkeypatch.setattr(module, "record", try_to_resume)
    compare(recipe, out, figure=False)
    assert refused == ["report.json"]
    assert sorted(path.name for path in out.iterdir()) == ["recipe.json", "report.json", "runs"]


def test_of_two_fresh_starts_at_once_one_is_refused(tmp_path, monkeypatch):
    out, recipe = tmp_path / "run", tiny(encodings=("nope",))
    prepare = module._prepare

    def other_is_quicker(*arguments):
        monkeypatch.setattr(module, "_prepare", prepare)
        compare(recipe, out, figure=False)
        return prepare(*arguments)

    monkeypatch.setattr(module, "_prepare", other_is_quicker)
    with pytest.raises(ValueError, match="already exists: choose another folder, or --resume"):
        compare(recipe, out, figure=False)


@pytest.mark.parametrize("content", ["", "[]", "{}", '[{"encoding": "nope"}]', "\udcff"])
@pytest.mark.parametrize("name", ["evaluation.json", "report.json"])
def test_damaged_result_is_named_and_deleting_it_has_it_made_again(tmp_path, name, content):
    out, recipe = tmp_path / "run", tiny(encodings=("nope",))
    whole = compare(recipe, out, figure=False)
    path = out / name if name == "report.json" else out / "runs" / "nope-seed0" / name
    (out / "report.json").unlink()
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=rf"{path} is not .*: delete it to have it m"):
        compare(recipe, out, resume=True, figure=False)
    path.unlink()
    assert values(compare(recipe, out, resume=True, figure=False)) == values(whole)


def test_report_without_rows_is_refused(tmp_path):
    out, recipe = tmp_path / "run", tiny(encodings=("nope",))
    compare(recipe, out, figure=False)
    (out / "report.json").write_text('{"values": {}}')
    with pytest.raises(
        ValueError, match=r"report\.json is not a report of compare \(.*: Field required\): delete it"
    ):
        compare(recipe, out, resume=True, figure=False)


def test_report_says_the_threads_that_trained(tmp_path):
    compare(tiny(encodings=("nope",), threads=3), tmp_path / "run", figure=False)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["device"].endswith("3 torch threads")


def test_figure_left_out_at_first_is_drawn_on_resume(tmp_path):
    out, recipe = tmp_path / "run", tiny(encodings=("nope",))
    comparison = compare(recipe, out, figure=False)
    report = (out / "report.json").read_bytes()
    assert compare(recipe, out, resume=True) == comparison
    assert (out / "figure.svg").exists()
    assert (out / "figure.png").exists()
    assert (out / "report.json").read_bytes() == report


@pytest.mark.parametrize("written", ["checkpoint", "model", "metrics", "evaluation", "report"])
def test_full_disk_ends_the_run_and_resume_goes_on(whole, tmp_path, monkeypatch, written):
    out, recipe = tmp_path / "run", tiny(seeds=(0, 1), dropout=0.1)
    fail_to_write(monkeypatch, written)
    with pytest.raises(Unwritten, match=rf"{out} cannot be written to \(.*No space left"):
        compare(recipe, out, figure=False)
    monkeypatch.undo()
    assert values(compare(recipe, out, resume=True, figure=False)) == values(whole[0])


def fail_to_write(monkeypatch, what):
    def no_space(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "checkpoint":
        monkeypatch.setattr(torch, "save", no_space)
    elif what == "metrics":
        monkeypatch.setattr(loop.Trainer, "step", no_space)
    elif what == "report":
        monkeypatch.setattr(module, "record", no_space)
    elif what == "evaluation":
        monkeypatch.setattr(module, "replacing", no_space)
    else:

        def no_space_for_tensors(*_arguments, **_options):
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr(safetensors.torch, "save_file", no_space_for_tensors)


def test_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"file/run cannot be written \(Not a directory\): choose another --out"
    ):
        compare(tiny(), tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("device", "said"),
    [("meta", "device 'meta' cannot be used here"), ("mps", "'MPS' backend): use cpu, or one there is")],
)
def test_device_that_computes_nothing_here_is_refused_in_one_sentence(tmp_path, device, said):
    with pytest.raises(ValueError, match="cannot be used here") as refused:
        compare(tiny(), tmp_path / "run", device=device)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 250
    assert not (tmp_path / "run").exists()
