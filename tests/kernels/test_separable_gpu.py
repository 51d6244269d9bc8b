"""Separable attention on a real GPU: sizes, dtypes, bodies, repeats, graphs and large tensors."""

import importlib.util
import math
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from phasewise.kernels import separable
from tests.kernels.separable_oracle import DEVICE, GPU, Case, fused, holds, inputs_of


def on_gpu() -> Iterator[Case]:
    """The matrix for a real GPU: lengths around the tiles, widths, masks, groups, dtypes and bodies."""
    half, full = torch.bfloat16, torch.float32
    for length in (1, 2, 15, 63, 111, 217, 1023, 1025, 4096):
        yield Case(length, length, width=64, v_width=64, preparation="softplus", dtype=half)
        yield Case(length, length, width=128, v_width=128, preparation="softplus", dtype=half)
        yield Case(
            length, length, width=64, v_width=64, preparation="rope", dtype=torch.float16, causal=False
        )
    for queries, keys in ((63, 217), (1, 1025), (111, 1023), (1024, 1088), (217, 63)):
        yield Case(queries, keys, width=64, v_width=64, preparation="softplus", dtype=half, group=2)
        yield Case(queries, keys, width=32, v_width=32, dtype=full, slopes=True)
    for width, v_width in ((16, 16), (24, 40), (80, 80), (96, 64), (160, 128), (256, 256), (64, 256)):
        yield Case(217, 217, width=width, v_width=v_width, heads=8, group=8, dtype=half)
        yield Case(217, 217, width=width, v_width=v_width, preparation="softplus", dtype=torch.float16)
        yield Case(111, 111, width=width, v_width=v_width, preparation="softplus", dtype=full)
    # The backward by stored score gradients: in parts, grouped, full, and of widths that fill no tile.
    for length in (64, 127, 513, 2049):
        yield Case(length, length, width=128, v_width=128, heads=1, preparation="softplus", dtype=half)
        yield Case(
            length,
            length,
            width=128,
            v_width=128,
            heads=6,
            group=3,
            rows=2,
            preparation="softplus",
            dtype=half,
        )
    yield Case(1025, 1025, width=128, v_width=128, preparation="softplus", dtype=torch.float16, causal=False)
    yield Case(1025, 1025, width=104, v_width=72, heads=3, preparation="softplus", dtype=half)
    yield Case(1025, 1025, width=256, v_width=128, heads=3, dtype=half)
    for places in ("packed", "left-padded", "shuffled", "far"):
        for window in (None, 100):
            yield Case(511, 511, width=64, v_width=64, rows=2 if places == "left-padded" else 1, heads=4, group=2,
                       preparation="softplus", places=places, window=window, dtype=half)  # fmt: skip
    for window in (1, 64, 300):
        yield Case(777, 777, width=64, v_width=64, window=window, dtype=half, preparation="rope")
        yield Case(777, 777, width=64, v_width=64, window=window, dtype=half, causal=False, rows=2)
    for body in ("flash", "cudnn"):
        for width in (64, 128):
            for preparation in ("none", "rope", "softplus"):
                yield Case(1025, 1025, width=width, v_width=width, heads=4, rows=2, preparation=preparation,
                           dtype=half, body=body)  # fmt: skip
    yield Case(
        300, 1025, width=64, v_width=64, heads=4, group=2, preparation="softplus", dtype=half, body="flash"
    )
    yield Case(1025, 1025, width=64, v_width=64, window=100, preparation="softplus", dtype=half, body="flash")


def needed(case: Case) -> None:
    if case.body == "flash" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    if case.body != "triton":
        # Other people's kernels refuse torch's deterministic mode, or ask it for what they do anyway.
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("case", list(on_gpu()), ids=str)
def test_gpu_matrix_is_within_twice_the_eager_error(case):
    needed(case)
    holds(case)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("body", ["triton", "flash", "cudnn"])
@pytest.mark.parametrize("width", [64, 128])
def test_gpu_backward_repeats_its_bits(body, width):
    case = Case(4096, 4096, width=width, v_width=width, heads=16, rows=2, preparation="softplus",
                dtype=torch.bfloat16, body=body)  # fmt: skip
    needed(case)
    inputs = inputs_of(case)
    first, *others = (fused(case, inputs) for _ in range(4))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.usefixtures("tens_of_gigabytes")
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_gpu_tensors_past_2_to_the_31_elements():
    heads, width, window, tail = 16, 128, 64, 256
    length = 2**31 // (heads * width) + 1000
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (1, length, heads, width)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = separable.attend(q, k, v, scale=0.1, causal=True, window=window)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    last = slice(length - tail - window, length)
    ends = [x[:, :, last].detach().double().requires_grad_() for x in (q, k, v)]
    place = torch.arange(tail + window, device=DEVICE)
    ahead = place[:, None] - place
    scores = (0.1 * ends[0] @ ends[1].transpose(-1, -2)).masked_fill(
        (ahead < 0) | (ahead >= window), -math.inf
    )
    expected = scores.softmax(-1) @ ends[2]
    exact_grads = torch.autograd.grad(expected, ends, dout[:, :, last].double())
    for actual, right in zip((out, *grads), (expected, *exact_grads), strict=True):
        part, right = actual[:, :, -tail + window :].double(), right[:, :, -tail + window :]
        assert (part - right).norm() < 0.01 * right.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("width", [64, 128])
def test_gpu_graphs_capture_forward_and_backward(width):
    case = Case(512, 512, width=width, v_width=width, preparation="softplus", dtype=torch.bfloat16)
    inputs = inputs_of(case)
    expected = fused(case, inputs)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fused(case, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused(case, inputs)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(expected[name], captured[name]) for name in expected)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("preparation", ["none", "rope", "softplus"])
@pytest.mark.parametrize("places", [None, "packed"])
def test_gpu_more_heads_than_a_grid_axis_holds(preparation, places):
    case = Case(16, 16, width=16, v_width=16, rows=70_000, heads=2, preparation=preparation, places=places,
                dtype=torch.float16)  # fmt: skip
    holds(case)
