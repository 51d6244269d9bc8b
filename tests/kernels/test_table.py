"""The launch table serves as it was committed; one that is damaged is named with row, value and remedy."""

import json

import pytest
import torch

from phasewise.kernels import table

REMEDY = r"; `git checkout` or a new installation of phasewise restores it"
CHOICE, TILES, SWITCHED = "separable.forward.body", "separable.forward", "separable.joint"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The launch table as a file of its own, read in the place of the committed one."""
    path = tmp_path / "launch.json"
    path.write_bytes(table.PATH.read_bytes())
    monkeypatch.setattr(table, "PATH", path)
    table.reread()
    yield path
    monkeypatch.undo()
    table.reread()


def refusal() -> str:
    """What a user's first call says, which is one line and names file and remedy."""
    table.reread()
    with pytest.raises(ValueError, match=REMEDY) as refused:
        table.launch(TILES, torch.zeros(1), qk=64, v=64, length=1)
    message = str(refused.value)
    assert str(table.PATH) in message
    assert "\n" not in message
    return message


def changed(path, kernel, change):
    """The number, from 1, of a kernel's first row, which is now as `change` makes it."""
    document = json.loads(path.read_text())
    index = next(i for i, row in enumerate(document["rows"]) if row["kernel"] == kernel)
    change(document["rows"][index])
    path.write_text(json.dumps(document))
    return index + 1


@pytest.mark.usefixtures("copied")
def test_the_table_is_read_as_it_was_written():
    assert table.launch_table() == json.loads(table.PATH.read_text())


@pytest.mark.parametrize(
    "content",
    [b"", b'{"rows": [', b"[]", b"7", b'{"tiles": []}', b'{"rows": []}', b'{"rows": [7]}', b'\xff{"rows": []}',
     b'{"rows": {}}', b"[" * 100_000],
)  # fmt: skip
def test_a_file_that_is_no_table_is_named(content, copied):
    copied.write_bytes(content)
    assert "launch.json is no launch table: " in refusal()


def test_what_cannot_be_read_is_named(copied):
    copied.unlink()
    assert "launch.json cannot be read (No such file or directory)" in refusal()
    copied.mkdir()
    assert "launch.json cannot be read (Is a directory)" in refusal()


def test_a_key_that_there_is_not_is_named(copied):
    copied.write_text(copied.read_text().replace('"rows"', '"comment": "by hand", "rows"', 1))
    assert "comment: Extra inputs are not permitted, but is 'by hand'" in refusal()


@pytest.mark.parametrize("name", ["kernel", "device", "dtype", "qk", "v", "length", "meta"])
def test_a_row_without_a_field_is_named(name, copied):
    number = changed(copied, TILES, lambda row: row.pop(name))
    message = refusal()
    assert f"row {number}" in message
    assert name in message


@pytest.mark.parametrize("name", ["qk", "v", "length"])
@pytest.mark.parametrize("value", ["64", 64.5, -1, 0, True, float("nan"), float("inf"), [64], {}])
def test_a_size_that_is_no_whole_number_from_1_is_named(name, value, copied):
    number = changed(copied, TILES, lambda row: row.update({name: value}))
    assert f"row {number} ({TILES}), {name}: Input should be" in (message := refusal())
    assert f", but is {value!r}" in message


@pytest.mark.parametrize("value", ["64", 64.5, -1, 0, 48, True, float("nan"), None, [64]])
def test_a_tile_that_triton_has_not_is_named(value, copied):
    number = changed(copied, TILES, lambda row: row["meta"].update(BLOCK_M=value))
    assert f"row {number} ({TILES}), meta.BLOCK_M: Input should be 16, 32, 64, 128 or 256" in (
        message := refusal()
    )
    assert f", but is {value!r}" in message


@pytest.mark.parametrize(
    ("kernel", "meta", "problem"),
    [
        (TILES, {"BLOCK_M": 64}, "meta.BLOCK_N: Field required"),
        (TILES, {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}, "meta.BLOCK_K: Extra inputs .*but is 64"),
        (TILES, {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 3}, "meta.num_warps: .*1, 2, 4, 8 or 16, but is 3"),
        (CHOICE, {"body": "triton"}, "meta.order: Field required"),
        (CHOICE, {"order": []}, "meta.order: give at least 1"),
        (CHOICE, {"order": ["flash", "flesh"]}, "meta.order.1: .*'flash', 'cudnn' or 'triton', but is 'flesh'"),
        ("separable.triton.forward", {"order": ["triton"]}, "meta.body: Field required"),
        ("separable.triton.forward", {"body": "triton "}, "meta.body: .*'hopper' or 'triton', but is 'triton '"),
        ("tapa.backward", {"body": "Joint"}, "meta.body: .*'joint' or 'passes', but is 'Joint'"),
        (SWITCHED, {"STAGES": 2, "AHEAD": 1}, "meta.AHEAD: .*boolean, but is 1"),
        ("tapa.chunks", {"queries": -1}, "meta.queries: .*greater than or equal to 0, but is -1"),
        ("separable.hopper.ahead", {"programs": 1.5, "tiles": 8}, "meta.programs: .*integer, but is 1.5"),
        ("separable.flash.gradient", {"m_block_size": 64}, "meta.n_block_size: Field required"),
        ("decode.plain", {}, "meta.BLOCK_N: Field required"),
    ],
)  # fmt: skip
def test_settings_that_a_kernel_does_not_take_are_named(kernel, meta, problem, copied):
    number = changed(copied, kernel, lambda row: row.update(meta=meta))
    table.reread()
    with pytest.raises(ValueError, match=rf"row {number} \({kernel}\), {problem}"):
        table.launch_table()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kernel", "separable.foward", "unknown kernel .*; choose from .*'separable.forward'"),
        ("kernel", None, "kernel"),
        ("dtype", "bf16", "'any', 'bfloat16', 'float16' or 'float32', but is 'bf16'"),
        ("device", "", "at least 1 character"),
        ("device", 7, "valid string, but is 7"),
        ("meta", None, "meta: .*but is None"),
        ("note", "x", "note: .*but is 'x'"),
    ],
)
def test_a_row_of_nothing_known_is_named(name, value, words, copied):
    number = changed(copied, TILES, lambda row: row.update({name: value}))
    table.reread()
    with pytest.raises(ValueError, match=rf"row {number}\b.*{words}"):
        table.launch_table()


def test_two_rows_that_serve_the_same_are_named(copied):
    document = json.loads(copied.read_text())
    document["rows"].append(document["rows"][4])
    copied.write_text(json.dumps(document))
    assert f"rows 5 and {len(document['rows'])} serve the same: {CHOICE}, NVIDIA H200, " in refusal()


@pytest.mark.parametrize("kernel", [CHOICE, "tapa.forward.body"])
def test_a_table_that_leaves_auto_without_a_choice_is_named(kernel, copied):
    changed(copied, kernel, lambda row: row.update(qk=64))
    assert f"no row of {kernel} serves any device" in refusal()


def test_a_row_that_was_taken_out_is_named_when_it_is_due(copied):
    document = json.loads(copied.read_text())
    document["rows"] = [row for row in document["rows"] if row["kernel"] != TILES]
    copied.write_text(json.dumps(document))
    assert f"no row of {TILES} for float32, widths 64 and 64 and length 1 on cpu" in refusal()
