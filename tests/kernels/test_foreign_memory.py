"""What hidden keys hold and how far apart channels lie does not matter, by every fused implementation."""

import functools
import mmap

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from phasewise import Positions, attention
from tests.kernels.test_every_route import DEVICE, GPU, drawn, encoding_of, every_route, trained

pytestmark = [pytest.mark.gpu] if GPU else []


@every_route
@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value):RuntimeWarning")  # numpy's, which interprets
@pytest.mark.parametrize("value", [torch.nan, torch.inf] if GPU else [torch.nan])
def test_what_a_hidden_key_or_another_query_holds_does_not_matter(name, impl, value):
    """Later keys, keys beyond a window, another document's and padding's; of queries, the last."""
    length, width = (300, 64) if GPU else (40, 16)
    encoding = encoding_of(name, 2, width)
    q, k, v, _ = drawn(1, length, 2, width)
    middle, last = length // 2, length - 1
    place = torch.arange(length, device=DEVICE)[None]
    packed = Positions.packed([middle, length - middle]).to(DEVICE)
    cases = [
        ({}, middle, slice(0, middle), length),
        ({"window": 5}, middle, slice(middle + 5, last), length),
        ({"window": 5, "causal": False}, middle, slice(0, middle - 4), length),
        ({"k_at": packed}, middle - 1, slice(middle, last), length),
        ({"k_at": Positions(place, -(place < 9).long())}, 4, slice(9, last), length),
        ({}, last, slice(0, 1), 2),  # two queries on many keys decode
    ]
    for options, at, unseeing, queries in cases:
        run = functools.partial(attention, v=v, encoding=encoding, impl=impl, **options)
        seeing = q[:, :, length - queries :]
        with torch.no_grad():
            try:
                clean = run(seeing, k)
            except ValueError:
                assert impl != "triton", "which takes them all"
                continue
            spoilt_q, spoilt_k = seeing.clone(), k.clone()
            spoilt_q[:, :, -1] = value
            spoilt_k[:, :, at] = value
            assert torch.equal(run(spoilt_q, spoilt_k)[:, :, unseeing], clean[:, :, unseeing])


def far_apart(tensors: list[Tensor]) -> list[Tensor]:
    """The same in half precision, of 32 channels 2^27 elements apart; a CPU has no memory where none is written.

    So their addresses go beyond 2^31 elements, and one half of the channels is 2^31 from the other.
    """
    halves = [x.half() for x in tensors]
    sizes = [x[..., 0].numel() for x in halves]
    elements = 31 * 2**27 + sum(sizes)
    if GPU:
        memory = torch.empty(elements, dtype=torch.float16, device="cuda")
    else:
        memory = torch.frombuffer(mmap.mmap(-1, 2 * elements), dtype=torch.float16)
    found = []
    for x, first in zip(halves, [sum(sizes[:at]) for at in range(len(sizes))], strict=True):
        _, heads, length, _ = x.shape
        strides = (heads * length, length, 1, 2**27)
        found.append(torch.as_strided(memory, x.shape, strides, first).copy_(x))
    return found


@pytest.mark.usefixtures("tens_of_gigabytes")
@every_route
def test_channels_may_lie_further_apart_than_32_bits_count(name, impl):
    encoding = encoding_of(name, 2, 32)
    tensors = [x.half() for x in drawn(1, 40, 2, 32)]
    apart = far_apart(tensors)
    rounding = torch.finfo(torch.float16).eps if GPU else 0.0  # as of any strides
    for ours, right in zip(trained(apart, encoding, impl), trained(tensors, encoding, impl), strict=True):
        assert (ours.float() - right.float()).norm() <= rounding * right.float().norm()
    if impl == "triton":
        decoded, rows = [apart[0][:, :, -2:], *apart[1:3]], [tensors[0][:, :, -2:], *tensors[1:3]]
        with torch.no_grad():
            assert torch.equal(
                attention(*decoded, encoding, impl=impl), attention(*rows, encoding, impl=impl)
            )
