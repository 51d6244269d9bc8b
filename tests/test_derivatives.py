"""By the reference every derivative passes; by torch's SDPA on a CPU first ones in reverse alone, as the docs say."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from phasewise.attention import attention
from tests.test_contracts import ORIGINAL, inputs, make

CASES = [
    "nope",
    "rope",
    "rope-dynamic_ntk",
    "pope-uniform",
    "pope-dynamic_yarn",
    "tapa",
    "tapa-linear",
    "alibi",
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at_once", [2**23, 40], ids=["whole", "blocks"])
def test_forward_mode_and_second_derivatives_pass_through_the_reference(case, at_once, monkeypatch):
    monkeypatch.setattr("phasewise.reference.SCORES_AT_ONCE", at_once)
    encoding, given = make(case), [x.requires_grad_() for x in inputs(ORIGINAL + 2, batch=1)]

    def attend(q, k, v):
        return attention(q[..., -3:, :], k, v, encoding, impl="reference")

    assert gradcheck(attend, given, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(attend, given, fast_mode=True)


@pytest.mark.parametrize("case", ["nope", "rope", "pope-uniform", "alibi"])
@pytest.mark.parametrize("window", [None, 3])
def test_by_sdpa_gradients_of_torch_func_are_autograds_and_others_raise(case, window):
    q, k, v = inputs(9)
    encoding = make(case)

    def loss(q):
        return attention(q, k, v, encoding, window=window, impl="sdpa").square().sum()

    (expected,) = torch.autograd.grad(loss(q.requires_grad_()), q)
    q = q.detach()
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(loss, (q,), (q,))
    with pytest.raises(RuntimeError, match="not implemented"):
        torch.autograd.functional.hvp(loss, q, q)
