"""Every length around the tiles, every width and every dtype, for each implementation that auto may choose."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import tapa
from tests.kernels.separable_oracle import GPU, Case, exact, fused, holds, inputs_of
from tests.kernels.test_tapa import assert_within_budget
from tests.kernels.test_tapa import inputs as tapa_inputs

HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9
FLASH = HOPPER and importlib.util.find_spec("flash_attn") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
HALF = torch.bfloat16
LENGTHS = (1, 2, 15, 63, 111, 217, 1023, 1025, 4096)


def square(length: int, width: int, preparation: str, **options) -> Case:
    return Case(length, length, width=width, v_width=width, preparation=preparation, **options)


def at_every_length() -> Iterator[Case]:
    """Beside what test_separable_gpu.py and test_flash.py have at these lengths."""
    for length in LENGTHS:
        yield square(length, 64, "none", dtype=HALF, slopes=True)
        yield square(length, 64, "none", dtype=HALF)
        yield square(length, 64, "rope", dtype=HALF, group=2)
        yield square(length, 64, "softplus", dtype=torch.float16)
        if length > 2:
            yield square(length, 64, "softplus", dtype=torch.float32)
        if HOPPER and length > 1:
            yield square(length, 64, "softplus", dtype=HALF, body="cudnn")
            yield square(length, 128, "rope", dtype=HALF, body="cudnn", group=2)
        if FLASH:
            yield square(length, 128, "softplus", dtype=HALF, body="flash")
            yield square(length, 128, "rope", dtype=torch.float16, body="flash", group=2)


def at_other_sizes() -> Iterator[Case]:
    """Queries shorter and longer than keys, unequal and odd widths, where each body takes them."""
    for width, v_width in ((24, 40), (80, 80), (96, 64), (120, 104)):
        for body in ("cudnn",) * HOPPER:
            yield Case(217, 217, width=width, v_width=v_width, preparation="softplus", dtype=HALF, body=body)
    for body in ("flash",) * FLASH:
        yield Case(217, 217, width=24, v_width=40, preparation="softplus", dtype=HALF, body=body)
        for queries, keys in ((1, 1025), (111, 1023), (217, 63)):
            yield Case(queries, keys, width=128, v_width=128, preparation="softplus", dtype=HALF, body=body)
            yield Case(queries, keys, width=128, v_width=128, preparation="rope", dtype=torch.float16, body=body,
                       group=2)  # fmt: skip
    for body in ("cudnn",) * HOPPER:
        for queries, keys in ((111, 1023), (217, 63)):
            yield Case(queries, keys, width=64, v_width=64, preparation="softplus", dtype=HALF, body=body,
                       causal=False)  # fmt: skip


@pytest.mark.parametrize("case", [*at_every_length(), *at_other_sizes()], ids=str)
def test_every_length_is_within_twice_the_eager_error_where_memory_is_nan(case):
    holds(case)


@pytest.mark.parametrize("preparation", ["none", "rope", "softplus"])
@pytest.mark.parametrize("length", [1, 2])
def test_one_or_two_keys_in_float32_are_right_to_the_rounding_of_their_terms(length, preparation):
    """Gradients of scores are differences of equal terms there, which eager arithmetic may cancel to the last bit."""
    case = square(length, 64, preparation)
    inputs = inputs_of(case)
    truth, actual = exact(case, inputs, torch.float64), fused(case, inputs)
    q, k, v = (x.double() for x in list(inputs.tensors.values())[:3])
    terms = (inputs.dout.double().abs() @ v.abs().mT).max() * max(q.abs().max(), k.abs().max()) * 64**-0.5
    for name, expected in truth.items():
        size = max(expected.abs().max().item(), terms.item() if name in ("q", "k", "phase") else 0.0)
        assert (actual[name].double() - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps * size, (
            name
        )


@pytest.mark.parametrize("width", [40, 104, 200])
def test_multiples_of_eight_are_widths_of_pope_and_of_rope(width):
    holds(square(150, width, "softplus", dtype=HALF, group=2))
    holds(square(150, width, "rope", dtype=HALF))


@pytest.mark.skipif(not FLASH, reason="needs a Hopper GPU and flash-attn-4")
@pytest.mark.parametrize(
    ("width", "preparation"), [(16, "rope"), (80, "none"), (32, "softplus"), (48, "softplus")]
)
def test_widths_at_which_the_backward_of_flash_is_wrong_have_right_gradients(width, preparation):
    holds(square(150, width, preparation, dtype=HALF, body="flash"))
    holds(square(150, width, preparation, dtype=HALF, body="flash", group=2))


@pytest.mark.parametrize("width", [40, 136])
def test_multiples_of_eight_are_widths_of_tapa(width):
    tensors = tapa_inputs(150, heads=2, width=width, v_width=width, dtype=HALF)
    assert_within_budget(tensors, amplitude_dim=width // 2)


@pytest.mark.skipif(not FLASH, reason="needs a Hopper GPU and flash-attn-4")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [63, 217, 1023, 4096])
def test_tapa_of_auto_is_the_equation_at_the_other_lengths(length, width):
    def attend(*tensors, **options):
        return tapa.attend(*tensors, body="flash", **options)

    tensors = tapa_inputs(length, width=width, v_width=width, dtype=HALF)
    assert_within_budget(tensors, attend=attend, amplitude_dim=width // 2)
