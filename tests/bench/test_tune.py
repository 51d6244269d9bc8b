"""Tuning measures every row of the launch table, decides by times and writes; what it measures needs a GPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.bench import tune
from phasewise.bench.decode import tunable as decoding
from phasewise.bench.timing import Time
from phasewise.bench.tunable import Subject, Trial, chains
from phasewise.kernels import table

GPU = torch.cuda.is_available()
LENGTHS = (2048, 8192)


def row(**changes):
    meta = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    return {"kernel": "tapa.forward", "device": "a GPU", "dtype": "bfloat16", "qk": 64, "v": 64,
            "length": None, "meta": meta, **changes}  # fmt: skip


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The launch table as a file of its own, read and written in the place of the committed one."""
    path = tmp_path / "launch.json"
    path.write_text(table.PATH.read_text())
    monkeypatch.setattr(table, "PATH", path)
    table.reread()
    yield path
    monkeypatch.undo()
    table.reread()


def test_rows_take_the_place_of_their_family_and_nothing_else_changes(copied):
    before = json.loads(copied.read_text())
    tune.write([row(length=4096), row()])
    tune.write([row(meta={"BLOCK_M": 32})])
    after = json.loads(copied.read_text())
    assert after["rows"] == [*before["rows"], row(meta={"BLOCK_M": 32})]
    assert {**after, "rows": None} == {**before, "rows": None}


def test_tiles_for_just_some_widths_serve_no_others(copied, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(table, "name_of", lambda _: "a GPU")

    def tiles(qk, v):
        return table.exact("separable.flash.forward", torch.device("cpu"), torch.bfloat16, qk, v)

    assert tiles(128, 64) == {"tile_m": 192, "tile_n": 112}
    assert tiles(64, 64) is None
    assert tiles(128, 32) is None
    tune.write([row(kernel="separable.flash.forward", qk=256, v=128, meta={"tile_m": 128, "tile_n": 80})])
    assert tiles(256, 128) == {"tile_m": 128, "tile_n": 80}
    assert tiles(128, 64) == {"tile_m": 192, "tile_n": 112}


def test_every_kernel_and_choice_of_the_table_is_measured():
    decoded = decoding(["plain", "rope", "pope", "polar", "tapa"], [64], 4096)
    measured = {s.kernel for chain in (*chains([64], LENGTHS), *decoded) for stage in chain for s in stage}
    assert {r["kernel"] for r in table.launch_table()["rows"]} <= measured


def test_candidates_are_the_present_row_and_what_differs_from_it():
    families = {s.name: s for chain in chains([64], LENGTHS) for stage in chain for s in stage}
    bodies = families["separable.flash.backward 64 64"].candidates([{"body": "flash"}], 0)
    assert bodies[0] == {"body": "flash"}
    assert {"body": "stored"} in bodies
    order = {"order": ["flash", "cudnn", "triton"]}
    orders = families["separable.forward.body 128 64"].candidates([order], 0)
    assert [x["order"][0] for x in orders] == ["flash", "cudnn", "triton"]
    present = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
    forward = families["tapa.forward 64 64"]
    tiles = forward.candidates([present], 0)
    assert tiles[0] == present
    assert all((x["maxnreg"], x["num_stages"]) == (168, 3) for x in tiles)
    assert tiles.count(present) == 1
    assert forward.candidates(tiles[:1], 1) == [present, {**present, "num_stages": 2}]
    assert forward.candidates(tiles[:2], 2) == tiles[:2]


def test_every_body_of_a_choice_is_tried():
    families = {s.kernel: s for chain in chains([64], LENGTHS) for stage in chain for s in stage}
    for kernel, bodies in table.BODIES.items():
        assert kernel in families
        if not kernel.endswith(".body"):
            tried = families[kernel].candidates([{"body": bodies[0]}], 0)
            assert {meta["body"] for meta in tried} == set(bodies)


def test_an_order_changes_only_where_a_body_is_faster_by_more_than_the_gain():
    bodies = [{"order": [x]} for x in ("flash", "cudnn", "triton")]
    before = {"order": ["flash", "cudnn", "triton"]}
    assert tune.decision(bodies, [1.0, 1.2, 1.19], before) == before
    assert tune.decision(bodies, [1.0, 1.2, 1.1], before)["order"] == ["flash", "triton", "cudnn"]
    refused = tune.Refused("not installed")
    assert tune.decision(bodies, [refused, 1.2, 1.1], before)["order"] == ["flash", "triton", "cudnn"]


def test_what_could_not_be_tried_here_is_not_decided():
    refused = tune.Refused("not installed")
    bodies = [{"body": "flash"}, {"body": "triton"}]
    assert tune.decision(bodies, [refused, 1.0], bodies[0]) == bodies[0]
    tiles = [{"BLOCK_M": 128}, {"BLOCK_M": 64}]
    assert tune.decision(tiles, [refused, 1.0], tiles[0]) == tiles[1]


@pytest.fixture
def a_gpu(monkeypatch):
    """A GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")


@pytest.fixture
def pretended(monkeypatch, copied, a_gpu):
    """That GPU, whose times are told by `took`, and a subject with two bodies."""
    asked = []

    def told(work, tasks, **_):
        while tasks:
            task = tasks.popleft()
            asked.append(task.subject)
            times = {2048: {"flash": 1.0, "triton": 2.0, "stored": tune.Refused("no")}}
            times[8192] = {"flash": 9.0, "triton": 8.0, "stored": tune.Refused("no")}
            yield task, {n: [times[n][meta["body"]] for meta in task.metas] for n in LENGTHS}

    monkeypatch.setattr(tune, "outcomes", told)
    tried = tuple({"body": body} for body in ("flash", "triton", "stored"))
    subject = Subject(
        "separable.flash.backward", 64, 64, LENGTHS, lambda _: Trial(tuple, tuple, tuple), (tried,)
    )
    return subject, asked


def test_a_choice_is_written_for_this_device_by_lengths_and_tuning_goes_on_where_it_stopped(
    pretended, copied, tmp_path
):
    subject, asked = pretended
    journal = tmp_path / "tune.json"
    rows = tune.tune(lambda: [[[subject]]], journal)
    assert [(r["dtype"], r["length"], r["meta"]["body"]) for r in rows] == [
        ("bfloat16", 4096, "flash"), ("bfloat16", None, "triton"),
        ("float16", 4096, "flash"), ("float16", None, "triton"),
    ]  # fmt: skip
    assert json.loads(copied.read_text())["rows"][-4:] == rows
    assert {r["device"] for r in rows} == {"a GPU"}
    record = json.loads(journal.read_text())
    assert record["values"]["complete"]
    record["values"]["complete"] = False
    journal.write_text(json.dumps(record))
    another = replace(subject, kernel="tapa.backward")
    asked.clear()
    with pytest.raises(KeyError):  # the pretended GPU has no times of TAPA's bodies
        tune.tune(lambda: [[[subject, another]]], journal)
    assert set(asked) == {another.name}


def test_what_was_decided_at_other_lengths_is_measured_anew(pretended, copied, tmp_path):
    subject, asked = pretended
    journal = tmp_path / "tune.json"
    tune.tune(lambda: [[[subject]]], journal)
    record = json.loads(journal.read_text())
    times = record["values"]["subjects"][subject.name]
    record["values"]["subjects"][subject.name] = [time for time in times if time["length"] == 2048]
    record["values"]["complete"] = False
    journal.write_text(json.dumps(record))
    asked.clear()
    tune.tune(lambda: [[[subject]]], journal)
    assert asked == [subject.name]


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"values": {"loss": 1.0}, "recipe": {}}', "\0", "[" * 100_000]
)
def test_a_journal_that_is_none_is_left_alone_and_named(text, pretended, copied, tmp_path):
    journal = tmp_path / "tune.json"
    journal.write_text(text)
    with pytest.raises(ValueError, match=r"tune.json holds no times of a tuning.*move it"):
        tune.tune(lambda: [[[pretended[0]]]], journal)
    assert journal.read_text() == text


def test_a_part_of_no_kernels_name_is_named(pretended, copied, tmp_path):
    with pytest.raises(ValueError, match=r"no stage.*'flesh' \(tiles\).*separable\.flash\.backward"):
        tune.tune(lambda: [[[pretended[0]]]], tmp_path / "tune.json", only=["flesh"])


def test_one_tuning_at_a_time_rewrites_a_table(pretended, copied, tmp_path):
    subject, asked = pretended

    def another():
        with pytest.raises(ValueError, match=r"another tuning.*launch\.json"):
            tune.tune(lambda: [[[subject]]], tmp_path / "another.json")
        return [[[subject]]]

    tune.tune(another, tmp_path / "tune.json")
    assert asked == [subject.name]


def test_a_table_or_journal_that_cannot_be_written_is_known_before_anything_is_measured(
    pretended, copied, tmp_path, monkeypatch
):
    subject, asked = pretended
    with pytest.raises(OSError, match="proc"):
        tune.tune(lambda: [[[subject]]], Path("/proc/tune.json"))
    full = copied.rename(copied.with_name("x" * 250))  # beside which no longer name fits
    monkeypatch.setattr(table, "PATH", full)
    with pytest.raises(OSError, match="too long"):
        tune.tune(lambda: [[[subject]]], tmp_path / "tune.json")
    assert asked == []


def test_the_fastest_few_meet_the_present_row_and_a_stage_knows_what_the_one_before_wrote(
    monkeypatch, copied, a_gpu, tmp_path
):
    given = []

    def told(work, tasks, **_):
        while tasks:
            task = tasks.popleft()
            given.append(task)
            yield task, {4096: [float(meta["num_warps"]) for meta in task.metas]}

    monkeypatch.setattr(tune, "outcomes", told)
    tried = tuple({"num_warps": n} for n in (7, 6, 5, 3, 2, 1, 8))
    then = tuple({"num_stages": n} for n in (2, 3))
    tiles = Subject("tapa.forward", 64, 64, (4096,), lambda _: Trial(tuple, tuple, tuple), (tried, then))
    again = replace(tiles, rounds=(({"num_warps": 3},),))
    (written, _) = tune.tune(lambda: [[[tiles], [again]]], tmp_path / "tune.json")
    assert (written["meta"]["num_warps"], written["meta"]["num_stages"]) == (1, 2)
    finals = [
        [(meta["num_warps"], meta["num_stages"]) for meta in task.metas] for task in given if task.final
    ]
    assert finals == [[(4, 2), (1, 2), (1, 3), (2, 2)], [(1, 2), (3, 2)]]
    screened = [(task.metas[0]["num_warps"], task.metas[0]["num_stages"]) for task in given if not task.final]
    assert sorted(screened) == sorted([*((n, 2) for n in range(1, 9)), (1, 3), (2, 3)])


def test_a_chain_does_not_wait_for_another(monkeypatch, copied, a_gpu, tmp_path):
    given = []

    def told(work, tasks, **_):
        while tasks:
            task = min(tasks, key=lambda task: "tapa" in task.subject)  # which is done last
            tasks.remove(task)
            given.append(task.subject)
            yield task, {4096: [1.0] * len(task.metas)}

    monkeypatch.setattr(tune, "outcomes", told)
    tried = ({"num_warps": 8}, {"num_warps": 2})

    def subject(kernel, qk):
        return Subject(kernel, qk, 64, (4096,), lambda _: Trial(tuple, tuple, tuple), (tried,))

    chains = [
        [[subject("tapa.forward", 64)]],
        [[subject("separable.forward", 64)], [subject("separable.joint", 64)]],
    ]
    tune.tune(lambda: chains, tmp_path / "tune.json")
    assert given == ["separable.forward 64 64", "separable.joint 64 64", "tapa.forward 64 64"]


def test_what_is_narrower_keeps_the_row_that_served_it(monkeypatch, copied, a_gpu, tmp_path):
    tune.write([row(qk=128, v=128)])  # which serves 64 channels too

    def told(work, tasks, **_):
        while tasks:
            task = tasks.popleft()
            best = {"tapa.forward 64 64": 4, "tapa.forward 128 128": 8}[task.subject]
            yield task, {4096: [1.0 + (meta["num_warps"] != best) for meta in task.metas]}

    monkeypatch.setattr(tune, "outcomes", told)
    narrow, wide = (
        Subject("tapa.forward", n, n, (4096,), lambda _: Trial(tuple, tuple, tuple), (({"num_warps": 8},),))
        for n in (64, 128)
    )
    rows = tune.tune(lambda: [[[narrow]], [[wide]]], tmp_path / "tune.json")
    assert {(r["qk"], r["meta"]["num_warps"]) for r in rows} == {(64, 4), (128, 8)}
    assert tune.present(narrow, 4096)["num_warps"] == 4


def test_one_stage_can_be_tuned_by_itself(pretended, copied, tmp_path):
    subject, asked = pretended
    later = replace(subject, qk=128, stage="bodies")
    tune.tune(lambda: [[[subject], [later]]], tmp_path / "tune.json", only=["bodies"])
    assert asked == [later.name]


class Counted:
    """A call that is refused, wrong or right, by its row's body, on a GPU that is not there."""

    def __init__(self):
        self.seen = []

    def __call__(self, length):
        def run():
            body = table.launch(
                "tapa.backward", torch.zeros(1, dtype=torch.bfloat16), qk=64, v=64, length=length
            )["body"]
            self.seen.append(body)
            if body == "refused":
                raise ValueError("no such body\nat all")
            return (torch.full((1, 2, 3), 2.0 if body == "wrong" else 1.0),)

        return Trial(run, run, lambda: (torch.ones(1, 2, 3),))


def test_only_what_is_right_is_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(tune, "start_gpu", lambda: None)
    timed = {}

    def side_by_side(calls, **sampled):
        for name, call in calls.items():
            call()
            timed[name] = sampled
        return {name: Time(5.0, 5.0, 5.0) for name in calls}

    monkeypatch.setattr(tune, "side_by_side", side_by_side)
    call = Counted()
    subject = Subject("tapa.backward", 64, 64, (2048,), call)
    work = tune.Work(lambda: [[[subject]]], str(tmp_path / "turn"))
    metas = tuple({"body": body} for body in ("refused", "wrong", "right"))
    (found,) = work(tune.Task(subject.name, metas, True)).values()
    assert found[0] == tune.Refused("ValueError: no such body")
    assert found[1] == tune.Refused("Wrong: 1.0e+00 from the reference", wrong=True)
    assert found[2] == 5.0
    assert list(timed) == ["2"]
    assert call.seen == ["refused", "wrong", "right", "wrong", "right", "right"]


def test_a_row_on_trial_wins_over_tighter_ones_and_leaves_the_table_as_it_was(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "cpu")
    x = torch.zeros(1, dtype=torch.bfloat16)
    subject = Subject("separable.forward", 64, 64, (99,), lambda _: Trial(tuple, tuple, tuple))
    before = list(table.launch_table()["rows"])
    with tune.in_force(subject, {"BLOCK_M": 128}, 99):
        assert table.launch("separable.forward", x, qk=64, v=64, length=99) == {"BLOCK_M": 128}
    assert table.launch_table()["rows"] == before
    assert table.launch("separable.forward", x, qk=64, v=64, length=99) != {"BLOCK_M": 128}


@pytest.mark.skipif(GPU, reason="a GPU is here")
def test_tuning_and_measuring_without_a_gpu_say_so(tmp_path):
    from phasewise.cli import main

    with pytest.raises(ValueError, match="CUDA device"):
        tune.tune(lambda: [], tmp_path / "tune.json")
    assert main(["bench", "attention", "--out", "x.json"]) == 2


def coarse():
    """Few candidates of one kernel, for the GPU."""
    tiles = (s for chain in chains([64], [2048]) for s in chain[0])
    (found,) = (s for s in tiles if s.name == "separable.forward 128 64")
    tried = tuple({"BLOCK_M": 64, "BLOCK_N": n, "num_warps": 4, "num_stages": 2} for n in (32, 64))
    return [[[Subject(found.kernel, found.qk, found.v, (1024,), found.make, (tried,))]]]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_tuning_measures_and_keeps_what_is_right(copied, tmp_path):
    journal = tmp_path / "tune.json"
    for found in tune.tune(coarse, journal):
        assert found["meta"]["BLOCK_M"] == 64
    times = json.loads(journal.read_text())["values"]["subjects"]["separable.forward 128 64"]
    assert len([x for x in times if x["ms"] > 0]) == 3
