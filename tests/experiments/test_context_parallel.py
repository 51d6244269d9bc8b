"""The measurement of shared rows: its order, and that a second call measures only what is missing."""

import json

from experiments import context_parallel
from experiments.context_parallel import Case, cases, main


def test_shorter_rows_come_first_and_what_is_not_recomputed_last():
    found = list(cases(["rope", "tapa"], [64, 128], 4))
    assert found[0] == Case("rope", 64, 4, recompute=True)
    assert [case.recompute for case in found] == [True] * 4 + [False] * 2
    assert len(set(found)) == len(found)


def test_a_second_call_measures_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    out, sizes = tmp_path / "x1.json", {"width": 16, "layers": 1, "heads": 2, "timed": 1}
    main(out, ["rope"], [32], **sizes)
    first = json.loads(out.read_text())["values"]
    assert [row["case"]["recompute"] for row in first] == [True, False]
    assert first[0]["losses"] == first[1]["losses"]
    measured, known = [], context_parallel.measured
    monkeypatch.setattr(
        context_parallel, "measured", lambda case, *rest: measured.append(case) or known(case, *rest)
    )
    main(out, ["rope", "nope"], [32], **sizes)
    assert {case.encoding for case in measured} == {"nope"}
    assert json.loads(out.read_text())["values"][:2] == first
