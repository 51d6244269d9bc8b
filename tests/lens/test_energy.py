"""Energies against amplitudes fitted to scores over distances, and against loops over all pairs of tokens."""

import pytest
import torch

from phasewise.encodings import PoPE, RoPE
from phasewise.frequencies import Explicit, Geometric, Proportional
from phasewise.lens.energy import CHUNK, Meter
from phasewise.model.reading import Layer
from phasewise.positions import Positions
from tests.hf.tiny import MODELS, tiny

HEADS, KV_HEADS, WIDTH = 4, 2, 12


def amplitudes(encoding, rates, q, k):
    """A_c^2 [Hq, n] of a query [Hq, D] and a key [Hkv, D]: sinusoids fitted to scores over distances."""
    generator = torch.Generator().manual_seed(1)
    distances = torch.randint(0, 10**9, (8 * len(rates) + 8,), generator=generator)
    segment = torch.zeros(1, len(distances), dtype=torch.int64)
    q_at, k_at = Positions(distances[None], segment), Positions.arange(1)
    queries = q[None, :, None].expand(-1, -1, len(distances), -1)
    scores = encoding.scores(queries, k[None, :, None], q_at, k_at, scale=1.0)[0, :, :, 0]
    turns = distances[:, None].double() * rates
    basis = torch.cat([turns.cos(), turns.sin(), torch.ones_like(turns[:, :1])], 1)
    fitted = torch.linalg.lstsq(basis, scores.T).solution
    n = len(rates)
    return (fitted[:n].square() + fitted[n : 2 * n].square()).T


def fitted(encoding, rates, q, k):
    """The mean of fitted energies over all pairs of tokens, and over keys up to the query; q [Hq, T, D]."""
    length = q.shape[1]
    pairs = torch.stack(
        [
            torch.stack([amplitudes(encoding, rates, q[:, t], k[:, s]) for s in range(length)])
            for t in range(length)
        ]
    )
    causal = torch.stack([pairs[t, : t + 1].mean(0) for t in range(length)])
    return pairs.mean((0, 1)), causal.mean(0)


def measured(layer, q, k, **options):
    meter = Meter(layer, length=q.shape[2], **options)
    meter.add(q, k)
    return meter.energies()


def random(length=5, width=WIDTH, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, length, width, generator=generator, dtype=dtype) + 0.5
    return q, torch.randn(1, KV_HEADS, length, width, generator=generator, dtype=dtype) * 2


def pope():
    encoding = PoPE(num_heads=HEADS, head_dim=WIDTH, phase_init="uniform")
    return encoding.double()


@pytest.mark.parametrize(
    "encoding",
    [
        RoPE(head_dim=WIDTH),
        RoPE(head_dim=WIDTH, fraction=0.5),
        RoPE(head_dim=WIDTH, frequencies=Proportional(base=100.0, fraction=0.5)),
        RoPE(head_dim=WIDTH, frequencies=Explicit(values=(1.0, 0.5, 0.3, 0.2, 0.1, 0.05), attention=1.3)),
        pope(),
    ],
    ids=["rope", "partial", "proportional", "attention factor", "pope"],
)
def test_energies_are_the_squared_amplitudes_of_the_scores_over_distance(encoding):
    q, k = random()
    found = measured(Layer(0, encoding), q, k)
    turning = found.rates > 0
    mean, causal = fitted(encoding, found.rates[turning], q[0], k[0])
    assert torch.allclose(found.mean[:, turning], mean.detach(), rtol=1e-6)
    assert torch.allclose(found.causal[:, turning], causal.detach(), rtol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_energies_of_a_hugging_face_family_are_the_amplitudes_of_its_scores(name):
    pytest.importorskip("transformers", reason="reading checkpoints needs transformers")
    from phasewise.hf.reading import HFReader

    layers = []
    HFReader(tiny(name)).read(torch.tensor([[5, 9, 11]]), lambda *read: layers.append(read))
    for layer, q, k in layers:
        found = measured(layer, q, k)
        turning = found.rates > 0
        mean, causal = fitted(layer.encoding, found.rates[turning], q[0].double(), k[0].double())
        assert torch.allclose(found.mean[:, turning], mean, rtol=1e-4)
        assert torch.allclose(found.causal[:, turning], causal, rtol=1e-4)


def test_amplitudes_do_not_change_with_rotation():
    q, k = random(length=9)
    encoding = RoPE(head_dim=WIDTH)
    at = Positions.arange(9, start=1000)
    turned_q, turned_k = encoding.factors(q, k, at, at)
    still, turned = measured(Layer(0, encoding), q, k), measured(Layer(0, encoding), turned_q, turned_k)
    assert torch.allclose(still.mean, turned.mean)
    assert torch.allclose(still.causal, turned.causal)


def test_rows_longer_than_a_chunk_and_several_rows_equal_loops():
    encoding = RoPE(head_dim=4)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, 1, length, 4, generator=generator) for length in (CHUNK + 3, 2, 7)]
    meter = Meter(Layer(0, encoding), length=CHUNK)
    causal, tokens = torch.zeros(2, dtype=torch.float64), 0
    for row in rows:
        meter.add(row, row.flip(2))
        energy = row[0, 0].double().unflatten(-1, (2, 2)).square().sum(1)
        keys = energy.flip(0)
        causal += sum(energy[t] * keys[: t + 1].mean(0) for t in range(len(energy)))
        tokens += len(energy)
    assert torch.allclose(meter.energies().causal[0], causal / tokens, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_weighted_energies_follow_the_attention_paid(window, softcap):
    q, k = random(length=8)
    layer = Layer(0, RoPE(head_dim=WIDTH), scale=0.7, window=window, softcap=softcap)
    found = measured(layer, q, k, queries=8)
    at = Positions.arange(8)
    scores = layer.encoding.scores(q, k, at, at, scale=0.7)[0]
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    energy = torch.zeros(HEADS, WIDTH // 2, dtype=torch.float64)
    for head in range(HEADS):
        key = k[0, head // 2].unflatten(-1, (2, -1)).square().sum(1)
        for t in range(8):
            first = 0 if window is None else max(0, t - window + 1)
            weights = scores[head, t, first : t + 1].softmax(0)
            query = q[0, head, t].unflatten(-1, (2, -1)).square().sum(0)
            energy[head] += query * (weights[:, None] * key[first : t + 1]).sum(0) / 8
    assert torch.allclose(found.weighted, energy)


def test_coherent_part_is_all_of_constant_content_and_none_of_centred_content():
    encoding = RoPE(head_dim=4, frequencies=Geometric(base=100.0))
    constant = torch.ones(1, 1, 50, 4)
    found = measured(Layer(0, encoding), constant, constant)
    assert torch.allclose(found.coherent, found.mean)
    signs = torch.tensor([1.0, -1.0]).repeat(25)[None, None, :, None]
    assert measured(Layer(0, encoding), constant * signs, constant).coherent.abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_wide_whatever_the_dtype(dtype):
    q = torch.full((1, 1, 4096, 4), 1 + 2**-6, dtype=dtype)
    found = measured(Layer(0, RoPE(head_dim=4)), q, q)
    exact = (2 * (1 + 2**-6) ** 2) ** 2
    assert torch.allclose(found.mean, torch.full((1, 2), exact, dtype=torch.float64), rtol=1e-6)
    assert torch.allclose(found.causal, torch.full((1, 2), exact, dtype=torch.float64), rtol=1e-6)
