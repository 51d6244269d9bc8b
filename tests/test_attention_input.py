"""What attention and positions are given that does not fit is named, with the remedy."""

import numpy as np
import pytest
import torch

from phasewise import TAPA, ALiBi, NoPE, PoPE, Positions, RoPE, RoPEConfig, attention, choose
from phasewise.positions import visible

STRETCHED = {"kind": "yarn", "base": 1e4, "factor": 2.0, "original_length": 4}


def tensors(dtype=torch.float32):
    return [torch.zeros(1, 2, 3, 8).to(dtype) for _ in range(3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoding": RoPEConfig()}, "config.build"),
        ({"encoding": "rope"}, "RoPE\\(head_dim=64\\)"),
        ({"q": np.zeros((1, 2, 3, 8))}, "torch.as_tensor"),
        ({"q": torch.zeros(2, 3, 8)}, "batch, heads, length, width"),
        ({"q": torch.zeros(1, 2, 3, 8, dtype=torch.int64)}, "q is torch.int64; attention takes"),
        ({"q": torch.zeros(1, 2, 3, 8).to(torch.float8_e4m3fn)}, "attention takes"),
        ({"q": torch.zeros(1, 2, 3, 8, dtype=torch.float64)}, "share one dtype"),
        ({"q": torch.zeros(1, 3, 3, 8)}, "3 query heads do not divide over 2 kv heads"),
        ({"q": torch.zeros(1, 2, 4, 8)}, "give q_at"),
        ({"q": torch.zeros(1, 2, 3, 16)}, "one width"),
        (
            {"q": torch.zeros(1, 2, 3, 0), "k": torch.zeros(1, 2, 3, 0), "encoding": NoPE()},
            "1 channel or more",
        ),
        ({"v": torch.zeros(1, 2, 4, 8)}, "kv heads, keys, width"),
        ({"encoding": RoPE(head_dim=16)}, "head_dim 16, but q and k are 8 wide; use head_dim=8"),
        ({"encoding": TAPA(head_dim=16)}, "use head_dim=8"),
        ({"encoding": ALiBi(num_heads=3)}, r"use ALiBi\(num_heads=2\)"),
        ({"encoding": PoPE(num_heads=3, head_dim=8)}, "use num_heads=2, head_dim=8"),
        ({"q_at": torch.arange(3)[None]}, "must be Positions"),
        ({"q_at": Positions.arange(3)}, "without k_at"),
        ({"k_at": Positions.arange(4)}, "places 1 x 4 tokens"),
        ({"k_at": Positions.arange(3).expand(2)}, "places 2 x 3 tokens"),
        ({"window": 0}, "at least 1"),
        ({"window": 2.5}, "whole number"),
        ({"window": True}, "whole number"),
        ({"scale": float("nan")}, "finite"),
        ({"scale": torch.tensor(0.5, requires_grad=True)}, "a number, but is Tensor; give a float"),
        ({"scale": "1"}, "a number, but is str"),
        ({"causal": "no"}, "True or False, but is 'no'"),
        ({"causal": None}, "True or False, but is None"),
        ({"q": torch.zeros(1, 2, 3, 8).to_sparse()}, "q is torch.sparse_coo, and attention takes dense"),
        ({"q": torch.zeros(1, 2, 1, 8), "k_at": Positions.arange(2)}, "k_at places 1 x 2 tokens"),
        ({"encoding": PoPE(num_heads=2, head_dim=8).to("meta")}, r"phase is on meta.*encoding.to\('cpu'\)"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    q, k, v = tensors()
    given = {"q": q, "k": k, "v": v, "encoding": RoPE(head_dim=8)} | change
    with pytest.raises(ValueError, match=message):
        attention(given.pop("q"), given.pop("k"), given.pop("v"), given.pop("encoding"), **given)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_not_dense():
    with pytest.raises(ValueError, match="q is nested, and attention takes dense"):
        attention(torch.nested.nested_tensor([torch.zeros(2, 3, 8)]), *tensors()[1:], NoPE())


def test_hardware_is_no_name():
    with pytest.raises(ValueError, match="hardware must be Hardware, but is 'cuda'"):
        choose(*tensors(), NoPE(), hardware="cuda")


@pytest.mark.parametrize(
    "encoding",
    [NoPE(), RoPE(head_dim=8), PoPE(num_heads=2, head_dim=8), TAPA(head_dim=8), ALiBi(num_heads=2)],
    ids=lambda encoding: encoding.kind,
)
@pytest.mark.parametrize("window", [None, 2])
def test_shapes_can_be_asked_for_on_the_meta_device(encoding, window):
    q, k, v = (x.to("meta") for x in tensors())
    out = attention(q, k, v[..., :5], encoding.to("meta"), window=window)
    assert out.device.type == "meta"
    assert out.shape == (1, 2, 3, 5)


@pytest.mark.parametrize(
    "encoding",
    [NoPE(), RoPE(head_dim=8), PoPE(num_heads=2, head_dim=8), TAPA(head_dim=8), ALiBi(num_heads=2)],
    ids=lambda encoding: encoding.kind,
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_by_the_reference_what_a_hidden_key_or_another_query_holds_does_not_matter(encoding, value):
    q, k, v = (torch.randn(1, 2, 12, 8, generator=torch.Generator().manual_seed(0)) for _ in range(3))
    padded = Positions(torch.arange(12)[None], -(torch.arange(12) < 3).long()[None])
    for options, at, unseeing in (
        ({}, 7, slice(0, 7)),
        ({"window": 2}, 7, slice(9, 11)),
        ({"window": 2, "causal": False}, 7, slice(0, 6)),
        ({"k_at": Positions.packed([5, 7])}, 4, slice(5, 11)),
        ({"k_at": padded}, 2, slice(3, 11)),
    ):
        clean = attention(q, k, v, encoding, impl="reference", return_lse=True, **options)
        spoilt_q, spoilt_k = q.clone(), k.clone()
        spoilt_q[:, :, 11], spoilt_k[:, :, at] = value, value
        spoilt = attention(spoilt_q, spoilt_k, v, encoding, impl="reference", return_lse=True, **options)
        for ours, right in zip(spoilt, clean, strict=True):
            assert torch.equal(ours[:, :, unseeing], right[:, :, unseeing])


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), 1])
def test_numbers_of_numpy_are_numbers(number):
    q, k, v = (torch.ones(1, 2, 3, 8) for _ in range(3))
    expected = attention(q, k, v, NoPE(), scale=float(number), window=2)
    assert torch.equal(attention(q, k, v, NoPE(), scale=number, window=np.int64(2)), expected)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize(("batch", "length"), [(0, 3), (1, 0)])
def test_an_empty_call_gives_an_empty_output_and_gradients_of_zero(impl, batch, length):
    q, k, v = (torch.zeros(batch, 2, size, 8) for size in (length, 3, 3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, RoPE(head_dim=8), impl=impl)
    assert out.shape == (batch, 2, length, 8)
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Positions.arange(-1), "length must be whole numbers from 0"),
        (lambda: Positions.arange(10**30), f"length must be at most {2**62} from 0, but is {10**30}"),
        (
            lambda: Positions.arange(2, start=-(10**30)),
            f"start must be at most {2**62} from 0, but is -{10**30}",
        ),
        (lambda: Positions.packed([1, 10**30]), f"document lengths must be at most {2**62} from 0"),
        (lambda: Positions.grid([10**30, 2]), f"shape must be at most {2**62} from 0"),
        (lambda: Positions.after(Positions.arange(3), 10**30), f"length must be at most {2**62} from 0"),
        (lambda: Positions.packed([1.5]), "document lengths must be whole numbers"),
        (lambda: Positions.packed([-1]), "document lengths must be whole numbers"),
        (lambda: Positions.cu_seqlens(torch.zeros(2), 3), r"int32 or int64 \[documents \+ 1\]"),
        (lambda: Positions.cu_seqlens(torch.tensor([0, 2]), -1), "length must be whole numbers"),
        (lambda: Positions.grid([-1, 2]), "shape must be whole numbers"),
        (lambda: Positions.grid([5]), "size of each axis"),
        (
            lambda: Positions(torch.zeros(1, 3, 1, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)),
            "index\\[..., 0\\]",
        ),
        (
            lambda: Positions.cat(Positions.arange(2), Positions.grid([1, 2])),
            "do not join; give both on the same axes",
        ),
        (
            lambda: Positions.arange(3).narrow(2, 2),
            "places 2 to 4 are not all among the 3 there are; ask for fewer",
        ),
        (lambda: Positions.arange(3).expand(2).expand(3), "give 1 row or 3"),
        (lambda: Positions.arange(3).expand(10**30), "rows must be at most"),
        (lambda: Positions.padded(torch.ones(3, dtype=torch.bool)), r"\[B, T\]"),
        (lambda: Positions(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int64)), "must be int64"),
        (
            lambda: Positions(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)),
            r"index\[None\]",
        ),
        (lambda: Positions.after(Positions.arange(0), 1), "nothing to continue"),
        (lambda: Positions([[0, 1]], [[0, 0]]), "index must be a tensor, but is list; use torch.as_tensor"),
        (lambda: Positions.arange(3, start=1.5), "start must be a whole number, but is 1.5"),
        (lambda: Positions.arange(3, start="a"), "start must be a whole number, but is 'a'"),
        (lambda: Positions.packed(3), "document lengths must be whole numbers, but is 3; give a list"),
        (lambda: Positions.grid(4), "shape must be whole numbers, but is 4; give a list"),
        (lambda: Positions.arange(3).narrow(1.0, 1), "places 1.0 to 2.0 are not all"),
        (lambda: Positions.after(torch.arange(3), 1), "past must be Positions, but is Tensor"),
        (lambda: Positions.cat(Positions.arange(3), 3), "second must be Positions, but is int"),
        (lambda: visible(Positions.arange(3), torch.arange(3)), "k_at must be Positions, but is Tensor"),
        (lambda: visible(Positions.arange(3), Positions.arange(3, device="meta")), "k_at on meta"),
        (
            lambda: visible(Positions.arange(3).expand(2), Positions.arange(3).expand(3)),
            "q_at places 2 rows and k_at 3; give as many, or 1",
        ),
        (
            lambda: visible(Positions.arange(3), Positions.arange(3), causal="no"),
            "True or False, but is 'no'",
        ),
    ],
)
def test_places_that_are_none_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class _Attention(torch.nn.Module):
    def __init__(self, encoding, window):
        super().__init__()
        self.encoding, self.window = encoding, window

    def forward(self, q, k, v):
        return attention(q, k, v, self.encoding, window=self.window)


@pytest.mark.parametrize(
    ("encoding", "window", "longest"),
    [
        (PoPE(num_heads=2, head_dim=8, phase_init="uniform"), None, 100_000),
        (RoPE(head_dim=8), 5, 16_000),  # with a mask of T x S elements
        (ALiBi(num_heads=2), None, 11_000),
        (TAPA(head_dim=8), None, 2_000),  # by the reference, in one block
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_a_module_with_attention_is_exported_once_for_every_length_in_a_range(encoding, window, longest):
    torch.manual_seed(0)
    module = _Attention(encoding, window)
    length = torch.export.Dim("length", min=1, max=longest)
    example = [torch.randn(1, 2, 20, 8) for _ in range(3)]
    exported = torch.export.export(module, tuple(example), dynamic_shapes=({2: length},) * 3).module()
    for length in (3, 33, 1100):
        q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
        torch.testing.assert_close(exported(q, k, v), module(q, k, v))


@pytest.mark.parametrize(
    "encoding",
    [
        RoPE(head_dim=8, frequencies=STRETCHED, fraction="0.5"),
        PoPE(num_heads=2, head_dim=8, frequencies=STRETCHED, axes="1"),
        TAPA(head_dim=8, alpha="0.1", fraction="0.5"),
    ],
    ids=lambda encoding: encoding.kind,
)
def test_an_encoding_is_what_its_config_builds_however_its_settings_were_written(encoding):
    q, k, v = (torch.ones(1, 2, 3, 8) for _ in range(3))
    built = encoding.config.build(num_heads=2, head_dim=8)
    assert torch.equal(attention(q, k, v, encoding), attention(q, k, v, built))
