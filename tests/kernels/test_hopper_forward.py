"""Our own forward for compute capability 9.0, held to the definition wherever it may be chosen."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import hopper_draw, table
from tests.kernels.separable_oracle import GPU, Case, fused, holds, inputs_of, needs_hopper

pytestmark = [pytest.mark.gpu] if GPU else []
HALF = torch.bfloat16


@pytest.mark.parametrize("together", [1, 3, 16])
@pytest.mark.parametrize(("tile_count", "heads"), [(1, 1), (5, 7), (16, 32)])
def test_numbers_that_are_drawn_name_every_tile_once_the_longest_first_of_as_many_heads(
    tile_count, heads, together, monkeypatch
):
    monkeypatch.setattr(hopper_draw.gl, "minimum", min)
    total = tile_count * heads
    named = [hopper_draw.place.fn(at, tile_count, heads, together) for at in range(total + 2)]
    assert named == [
        *(
            (tile, head)
            for first in range(0, heads, together)
            for tile in reversed(range(tile_count))
            for head in range(first, min(first + together, heads))
        ),
        *[named[total - 1]] * 2,
    ]


@pytest.fixture
def chosen(monkeypatch):
    """It is taken for every length, width and dtype."""
    choose = table.chosen

    def always(kernel, *call):
        return {"body": "hopper"} if kernel == "separable.triton.forward" else choose(kernel, *call)

    monkeypatch.setattr(table, "chosen", always)


def cases() -> Iterator[Case]:
    for length in (1, 2, 15, 63, 64, 65, 111, 129, 191, 217, 1023, 1025, 2049):
        for width in (64, 128):
            yield Case(length, length, width=width, v_width=width, preparation="softplus", dtype=HALF)
        yield Case(
            length, length, width=64, v_width=64, preparation="rope", dtype=torch.float16, causal=False
        )
    for queries, keys in ((1, 1025), (63, 217), (111, 1023), (192, 640), (1024, 1088)):
        for group in (1, 4):
            yield Case(queries, keys, width=128, v_width=128, heads=4, group=group, rows=2, preparation="softplus",
                       dtype=HALF)  # fmt: skip
        yield Case(queries, keys, width=64, v_width=64, heads=4, group=2, rows=3, dtype=torch.float16)
        yield Case(queries, keys, width=64, v_width=64, preparation="softplus", dtype=HALF, causal=False)
    yield Case(217, 63, width=64, v_width=64, preparation="softplus", dtype=HALF, causal=False)
    for width, v_width in (
        (16, 16),
        (24, 40),
        (80, 80),
        (96, 64),
        (128, 64),
        (120, 104),
        (64, 128),
        (128, 16),
    ):
        for preparation in ("none", "softplus"):
            yield Case(217, 217, width=width, v_width=v_width, preparation=preparation, dtype=HALF)
    yield Case(217, 217, width=256, v_width=128, dtype=HALF)
    for magnitude in ("relu", "identity"):
        yield Case(217, 217, width=64, v_width=64, preparation=magnitude, dtype=HALF)


@needs_hopper
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_outputs_and_gradients_are_within_twice_the_eager_error_where_memory_is_nan(case):
    holds(case)


@needs_hopper
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("preparation", ["none", "rope", "softplus"])
@pytest.mark.parametrize("width", [64, 128])
def test_more_tiles_than_programs_repeat_their_bits(width, preparation):
    case = Case(1100, 1100, width=width, v_width=width, heads=48, rows=2, preparation=preparation, dtype=HALF)
    inputs = inputs_of(case)
    first, *others = (fused(case, inputs) for _ in range(3))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@needs_hopper
@pytest.mark.usefixtures("chosen")
def test_strided_and_offset_inputs_are_read_as_they_are():
    from phasewise.kernels import separable

    wide = torch.randn(2, 300, 3, 8, 80, device="cuda", dtype=HALF)
    q, k, v = (wide[:, :, part, :, 5:69].transpose(1, 2) for part in range(3))
    strided, _ = separable.attend(q, k, v, scale=0.125, causal=True, window=None)
    dense, _ = separable.attend(*(x.contiguous() for x in (q, k, v)), scale=0.125, causal=True, window=None)
    assert torch.equal(strided, dense)
