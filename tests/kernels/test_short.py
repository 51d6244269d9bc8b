"""Rows laid end to end against the reference on each row alone."""

import pytest
import torch

from phasewise.encodings import PoPE, RoPE
from phasewise.encodings.spectral import STANDARD
from phasewise.kernels.short import LONGEST, short_rows
from phasewise.positions import Positions
from phasewise.reference import reference

HEADS, WIDTH = 2, 32
LENGTHS = (1, 5, 64, 33)
EPSILON = 1e-2
NAMES = ("rope", "softplus", "relu", "identity")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def encoding(name):
    torch.manual_seed(1)
    if name == "rope":
        return RoPE(head_dim=WIDTH).to(DEVICE)
    return PoPE(num_heads=HEADS, head_dim=WIDTH, magnitude=name, phase_init="uniform").to(DEVICE)


def norm_weights():
    torch.manual_seed(2)
    return (1 + 0.3 * torch.randn(2, WIDTH, device=DEVICE)).requires_grad_()


def expected(x, dout, lengths, encoding, dtype=torch.float64, norm=None):
    """Output and gradients of x, the phase and the norm, in `dtype`, each row alone."""
    encoding = encoding.to(dtype)
    norm = None if norm is None else norm.detach().to(dtype).requires_grad_()
    x = x.detach().to(dtype).requires_grad_()
    outs = []
    for row in x.split(list(lengths)):
        q, k, v = row.unbind(1)
        if norm is not None:
            q, k = (
                y / (y.square().mean(-1, keepdim=True) + EPSILON).sqrt() * w
                for y, w in zip((q, k), norm, strict=True)
            )
        at = Positions.arange(len(row), device=x.device)
        q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
        outs.append(reference(q, k, v, encoding, q_at=at, k_at=at)[0][0].transpose(0, 1))
    out = torch.cat(outs)
    out.backward(dout.to(dtype))
    learned = [*encoding.parameters(), *([] if norm is None else [norm])]
    return out.detach(), x.grad, [parameter.grad for parameter in learned]


def arguments(x, lengths, encoding, name, norm=None):
    at = Positions.arange(LONGEST, device=x.device)
    angle = encoding.phases(at.index, STANDARD)[0]
    length = torch.tensor([*lengths, 0], device=x.device)
    start = length.cumsum(0) - length
    phase = next(encoding.parameters(), torch.empty(0, device=x.device))
    turn = torch.stack([phase.cos(), phase.sin()]).detach()
    norm = torch.empty(0, device=x.device) if norm is None else norm
    return x, start, length, angle.cos(), angle.sin(), phase, norm, turn, name, WIDTH**-0.5, EPSILON


def found(x, dout, lengths, encoding, name, norm=None):
    x = x.clone().requires_grad_()
    out = short_rows(*arguments(x, lengths, encoding, name, norm))
    out.backward(dout)
    learned = [*encoding.parameters(), *([] if norm is None else [norm])]
    return out.detach(), x.grad, [parameter.grad for parameter in learned]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rows_laid_end_to_end_attend_as_each_alone_with_every_gradient(name, normed):
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), 3, HEADS, WIDTH, device=DEVICE)
    dout = torch.randn(sum(LENGTHS), HEADS, WIDTH, device=DEVICE)
    norm = norm_weights() if normed else None
    want = expected(x, dout, LENGTHS, encoding(name), norm=norm)
    got = found(x, dout, LENGTHS, encoding(name), name, norm)
    for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
        assert (a - b).abs().max() < 2e-5 * b.abs().max()


@pytest.mark.filterwarnings("ignore:(All-NaN|invalid value):RuntimeWarning")  # numpy's, which interprets
@pytest.mark.parametrize("name", ["rope", "softplus"])
def test_what_another_row_or_a_later_key_holds_does_not_matter(name):
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), 3, HEADS, WIDTH, device=DEVICE)
    settings = arguments(x, LENGTHS, encoding(name), name)
    clean = short_rows(*settings)
    spoilt = x.clone()
    spoilt[1:6] = torch.nan  # the second row
    spoilt[6 + 40, 1] = torch.nan  # a key of the third
    out = short_rows(spoilt, *settings[1:])
    for seen in (slice(0, 1), slice(6, 6 + 40), slice(6 + 64, None)):
        assert torch.equal(out[seen], clean[seen])


def test_a_row_of_no_tokens_adds_nothing_to_the_gradient_of_the_phase():
    torch.manual_seed(0)
    x, dout = torch.randn(5, 3, HEADS, WIDTH, device=DEVICE), torch.ones(5, HEADS, WIDTH, device=DEVICE)
    assert found(x, dout, (5,), encoding("softplus"), "softplus")[2][0].isfinite().all()


@pytest.mark.parametrize("name", ["rope", "softplus"])
def test_operator_passes_torchs_checks(name):
    torch.manual_seed(0)
    x = torch.randn(6, 3, HEADS, WIDTH, device=DEVICE, requires_grad=True)
    torch.library.opcheck(short_rows, arguments(x, (2, 4), encoding(name), name, norm_weights()))


def test_second_derivatives_raise():
    torch.manual_seed(0)
    x = torch.randn(6, 3, HEADS, WIDTH, device=DEVICE, requires_grad=True)
    out = short_rows(*arguments(x, (2, 4), encoding("rope"), "rope"))
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_within_twice_the_eager_error(name, normed):
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), 3, HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    dout = torch.randn(sum(LENGTHS), HEADS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    norm = norm_weights() if normed else None
    want = expected(x, dout, LENGTHS, encoding(name), torch.float64, norm)
    eager = expected(x, dout, LENGTHS, encoding(name), torch.bfloat16, norm)
    got = found(x, dout, LENGTHS, encoding(name), name, norm)
    for a, b, c in zip(*((*each[:2], *each[2]) for each in (got, eager, want)), strict=True):
        rounding = torch.finfo(torch.bfloat16).eps * c.abs().max()
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + rounding
