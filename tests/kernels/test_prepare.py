"""The preparation kernels against the equations, restated here in float64."""

import math

import pytest
import torch
from torch import Tensor

prepare = pytest.importorskip("phasewise.kernels.prepare", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def magnitude(x: Tensor, kind: str) -> Tensor:
    return {"softplus": torch.nn.functional.softplus, "relu": torch.relu, "identity": lambda y: y}[kind](x)


def polar(x: Tensor, angle: Tensor, phase: Tensor | None, kind: str) -> Tensor:
    mu = magnitude(x, kind)
    turn = angle[:, None] - (0 if phase is None else phase[None, :, None])
    return torch.cat([mu * turn.cos(), mu * turn.sin()], -1)


def rotated(x: Tensor, angle: Tensor, factor: float) -> Tensor:
    n = angle.shape[-1]
    first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    cos, sin = factor * angle[:, None].cos(), factor * angle[:, None].sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def close(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within one rounding of dtype, plus the float32 arithmetic before it."""
    assert actual.isfinite().all()
    bound = torch.finfo(dtype).eps * exact.abs() + 4e-6 * exact.abs().max().clamp_min(1.0)
    assert ((actual.double() - exact).abs() <= bound).all()


def fast_phase_error(kind: str, terms: int) -> float:
    """How far the fast kernel's gradient of a phase may be off, over its terms' sizes mu (|g_cos| + |g_sin|) added up.

    Not over the gradient itself, as terms of both signs cancel. A term errs by the fast softplus; by its angle, which
    is below 16 and rounded once; by the hardware's waves, which turn it into turns with a product rounded towards 0
    (a step of 2^-23 below 2 turns), by a 1 / (2 pi) that is 4.1e-8 off, and err by 2^-20.9; and by four roundings.
    Adding n terms in any order errs by n - 1 roundings at most (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, section 4.2).
    """
    rounding = torch.finfo(torch.float32).eps / 2
    softplus = 9e-6 if kind == "softplus" else 0.0
    wave = 2 * math.pi * 2 * rounding + 4.1e-8 * 3 * math.pi + 2**-20.9
    return softplus + 8 * rounding + wave + (4 + terms - 1) * rounding


def inputs(rows=2, heads=3, length=17, width=24, n=24, angle_rows=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(length * width + heads)
    x = torch.randn(rows, length, heads, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    angle = (torch.rand(angle_rows, length, n, generator=generator) * 2 - 1).mul(math.pi).to(DEVICE)
    phase = (-2 * math.pi * torch.rand(heads, width, generator=generator)).to(DEVICE)
    return x, angle, phase


def gradient(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(out.shape[-1])
    return torch.randn(out.shape, dtype=torch.float64, generator=generator).to(DEVICE)


def one(x, angle, phase, kind):
    """PoPE's form of queries alone; the keys beside them have one head and other places."""
    expanded, _ = prepare.polar(x, x[:, :1, :1], angle, angle[:, :1].contiguous(), phase, kind)
    return expanded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["softplus", "relu", "identity"])
@pytest.mark.parametrize(("length", "width", "angle_rows"), [(1, 16, 1), (17, 24, 2), (33, 64, 1)])
def test_polar_and_its_gradients_are_the_equation(dtype, kind, length, width, angle_rows):
    x, angle, phase = inputs(length=length, width=width, n=width, angle_rows=angle_rows, dtype=dtype)
    exact = [t.double().requires_grad_() for t in (x, phase)]
    expected = polar(exact[0], angle.double(), exact[1], kind)
    close(one(x, angle, phase, kind), expected, dtype)
    grad = gradient(expected).to(dtype)
    dx, dphase = torch.autograd.grad(expected, exact, grad.double())
    actual_dx = torch.empty_like(x)
    sums = prepare.phase_sums(x)
    prepare.polar_backward(x, angle, phase, kind, grad, actual_dx, sums)
    close(actual_dx, dx, dtype)
    actual_dphase = prepare.phase_gradient(sums)
    for_cos, for_sin = grad.double().abs().chunk(2, -1)
    sizes = (magnitude(x.double(), kind).abs() * (for_cos + for_sin)).sum((0, 2))
    bound = fast_phase_error(kind, terms=x.shape[0] * length) * sizes
    assert ((actual_dphase.double() - dphase).abs() <= bound).all()
    if DEVICE == "cpu" or dtype == torch.float32:
        close(actual_dphase, dphase, torch.float32)


def test_keys_have_no_phase_and_their_own_heads_and_places():
    x, angle, phase = inputs()
    k, k_angle, _ = inputs(heads=2, length=40, angle_rows=2)
    both = prepare.polar(x, k, angle, k_angle, phase, "softplus")
    close(both[0], polar(x.double(), angle.double(), phase.double(), "softplus"), x.dtype)
    close(both[1], polar(k.double(), k_angle.double(), None, "softplus"), x.dtype)


def test_softplus_keeps_its_relative_precision_at_the_extremes():
    _, angle, _ = inputs(rows=1, heads=1, length=8, width=16, n=16)
    x = torch.tensor([-1e4, -80.0, -40.0, -17.0, -1e-6, 17.0, 80.0, 1e4], device=DEVICE)[
        None, None, :, None
    ].expand(1, 1, 8, 16)
    expected = polar(x.double(), angle.double(), None, "softplus")
    actual = one(x, angle, None, "softplus")
    dx = torch.empty_like(x)
    prepare.polar_backward(x, angle, None, "softplus", torch.ones_like(actual), dx, None)
    assert ((actual.double() - expected).abs() <= 2e-6 * expected.abs() + 1e-37 + 2e-7 * magnitude(
        x.double(), "softplus").repeat(1, 1, 1, 2)).all()  # fmt: skip
    assert dx.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "n"), [(32, 16), (24, 12), (40, 4)])
def test_rotation_and_its_gradient_are_the_equation_and_may_go_in_place(dtype, width, n):
    pair = [inputs(width=width, n=n, angle_rows=2, dtype=dtype)]
    pair.append(inputs(heads=2, length=40, width=width, n=n, dtype=dtype))
    (q, q_angle, _), (k, k_angle, _) = pair
    exact = [x.double().requires_grad_() for x in (q, k)]
    expected = [rotated(x, angle.double(), 1.25) for x, angle in zip(exact, (q_angle, k_angle), strict=True)]
    for actual, right in zip(prepare.rotate(q, k, q_angle, k_angle, 1.25), expected, strict=True):
        close(actual, right, dtype)
    grads = [gradient(x).to(dtype) for x in expected]
    right = torch.autograd.grad(expected, exact, [x.double() for x in grads])
    prepare.rotate(*grads, q_angle, k_angle, 1.25, back=True, into=(grads[0], grads[1]))
    for actual, dx in zip(grads, right, strict=True):
        close(actual, dx, dtype)


def as_threads_hold(products: Tensor) -> Tensor:
    """`[..., 64, columns]` in the order of a Hopper tensor core's threads and their registers, `[..., 64 columns]`."""
    columns = products.shape[-1]
    held = products.new_empty(*products.shape[:-2], columns // 8, 128, 4)
    for row in range(64):
        for column in range(columns):
            thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
            held[..., column // 8, thread, row // 8 % 2 * 2 + column % 2] = products[..., row, column]
    return held.flatten(-3)


@pytest.mark.parametrize(("length", "heads", "phased"), [(96, 1, True), (150, 6, True), (5, 2, False)])
def test_gradients_of_pope_are_read_from_sums_in_tiles_of_channels_by_places(length, heads, phased):
    dtype, rows = DTYPES[-1], 48
    x, angle, phase = inputs(heads=heads, length=length, width=64, n=64, angle_rows=2, dtype=dtype)
    phase = phase if phased else None
    tiles = -(-length // rows)
    grad = torch.randn(2, heads, tiles * rows, 128, device=DEVICE)
    products = grad.unflatten(2, (tiles, rows)).unflatten(-1, (2, 64)).permute(0, 1, 2, 4, 5, 3)
    held = prepare.Sums(as_threads_hold(products).flatten(2), 0.5, rows)
    results = []
    for given in (held, 0.5 * grad[:, :, :length]):
        dx, sums = torch.full_like(x, torch.nan), prepare.phase_sums(x) if phased else None
        prepare.polar_backward(x, angle, phase, "softplus", given, dx, sums)
        results.append((dx, torch.zeros(()) if sums is None else prepare.phase_gradient(sums)))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "n", "heads"), [(64, 8, 1), (150, 32, 6), (1, 16, 2)])
def test_gradients_are_turned_back_from_sums_in_the_order_of_the_threads_that_hold_them(length, n, heads):
    dtype = DTYPES[-1]
    blocks = -(-length // 64)
    dq, q_angle, _ = inputs(heads=heads, length=length, width=2 * n, n=n, angle_rows=2, dtype=dtype)
    dk, k_angle, _ = inputs(heads=2, length=40, width=2 * n, n=n, dtype=dtype)
    sums = torch.randn(2, heads, blocks * 64, 2 * n, device=DEVICE)
    halves = sums.unflatten(2, (blocks, 64)).unflatten(-1, (2, n)).permute(0, 1, 2, 4, 3, 5)
    held = as_threads_hold(halves)
    expected = [
        rotated(x.double(), -angle.double(), 1.25)
        for x, angle in ((0.5 * sums[:, :, :length], q_angle), (dk, k_angle))
    ]
    into = torch.full_like(dq, torch.nan)
    prepare.finish_rotated(held.flatten(2), 0.5, into, dk, q_angle, k_angle, 1.25)
    for actual, exact in zip((into, dk), expected, strict=True):
        close(actual, exact, dtype)


def test_strided_and_expanded_inputs_give_the_same():
    x, angle, phase = inputs(width=32, n=16)
    wide = torch.stack([x, x], -1)[..., 0]
    spread, dense = (prepare.rotate(y, y, angle, angle, 1.0) for y in (wide, x.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(spread, dense, strict=True))
    same = x[:, :1].expand(-1, 3, -1, -1)
    angle = torch.cat([angle, angle], -1)
    phase = torch.zeros(3, 32, device=DEVICE)
    assert torch.equal(one(same, angle, phase, "relu")[:, 2], one(x, angle, phase, "relu")[:, 0])
