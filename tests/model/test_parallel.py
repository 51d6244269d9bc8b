"""Rows shared by processes give what one process gives: logits, loss and every gradient."""

import gc
import weakref
from functools import lru_cache
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from phasewise.model import Cache
from phasewise.model.layout import Layout
from phasewise.model.parallel import Sharding
from phasewise.positions import Positions
from tests.model.sharded import CASES, PROCESSES, built, drawn, gradients, loss_of, process
from tests.model.small import ENCODINGS, model_of, tokens_of

TOLERANCE = {"atol": 1e-11, "rtol": 1e-9}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four processes found."""
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(process, args=(str(folder),), nprocs=PROCESSES)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@lru_cache
def alone(name, layout):
    tokens, targets, at = drawn(layout)
    model = built(name, layout)
    logits = model(tokens, at=at)
    loss = loss_of(logits, targets, scored=int((targets != -100).sum()))
    loss.backward()
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients(model)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_processes_that_share_rows_equal_one(found, case):
    name, _order, layout, _size = case
    expected = alone(name, layout)
    for of_rank in found:
        assert of_rank[case].keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                of_rank[case][key], value, **TOLERANCE, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_data_parallelism_beside_it_equals_one_process(found, wrapped):
    expected = {key: value for key, value in alone("pope-geometric", "plain").items() if key != "logits"}
    for of_rank in found:
        assert of_rank[wrapped].keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(of_rank[wrapped][key], value, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["again", "kept"])
def test_a_repeat_and_kept_keys_give_the_same_bits(found, other):
    for of_rank in found:
        for key, value in of_rank["pope-geometric", "zigzag", "packed", 4].items():
            assert torch.equal(of_rank[other][key], value)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("context",))
    dist.destroy_process_group()


def test_every_process_attends_to_equally_many_pairs_in_zigzag_order():
    owned = [Layout(rank, 4).chunks for rank in range(4)]
    assert owned == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert len({sum(chunk + 1 for chunk in chunks) for chunks in owned}) == 1


def alive(storages, most):
    """How many there are, `most` of them or after ten seconds: gloo's thread lets go a moment after it is done."""
    end = monotonic() + 10
    while (count := sum(storage() is not None for storage in storages)) > most and monotonic() < end:
        sleep(0.001)
    return count


def test_only_one_layers_gathered_keys_and_values_are_alive_at_a_time(mesh, monkeypatch):
    gathered, most = [], 0
    gather = Sharding.gather

    def watched(self, part, *, dim):
        nonlocal most
        whole = gather(self, part, dim=dim)
        gathered.append(weakref.ref(whole.untyped_storage()))
        most = max(most, alive(gathered, 2))
        return whole

    monkeypatch.setattr(Sharding, "gather", watched)
    model = model_of(ENCODINGS["nope"], layers=3, kv_heads=4)
    loss = model(tokens_of(1, 8), sharding=Sharding.over(mesh)).sum()
    assert (len(gathered), most) == (6, 2)
    gc.collect()  # whatever refers to itself
    assert alive(gathered, 0) == 0
    loss.backward()
    assert (len(gathered), most) == (12, 2)
    gc.collect()  # whatever refers to itself
    assert alive(gathered, 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rope-geometric", "pope-geometric", "tapa", "alibi"])
def test_gpu_kernels_take_gathered_keys_as_they_lie_and_keep_none_of_them(mesh, monkeypatch, name):
    alive, gather = [], Sharding.gather

    def watched(self, part, *, dim):
        whole = gather(self, part, dim=dim)
        alive.append(weakref.ref(whole.untyped_storage()))
        return whole

    monkeypatch.setattr(Sharding, "gather", watched)
    found = []
    for sharding in (None, Sharding.over(mesh)):
        model = model_of(ENCODINGS[name], dtype=torch.float32)
        logits = model(tokens_of(1, 32), sharding=sharding, impl="triton")
        gc.collect()  # the interpreter's launches refer to themselves
        assert not any(storage() is not None for storage in alive)
        logits.square().sum().backward()
        found.append({"logits": logits.detach(), **gradients(model)})
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=2e-5, atol=2e-5 * float(value.abs().max()))


@pytest.mark.parametrize(
    ("order", "length", "message"),
    [
        ("zigzag", 12, "12 places do not divide into 8 chunks, 2 for each of 4 .* multiple of 8, as 8"),
        ("contiguous", 3, "3 places do not divide into 4 chunks, 1 for each of 4 .* multiple of 4, as 4"),
    ],
)
def test_uneven_lengths_are_refused(order, length, message):
    with pytest.raises(ValueError, match=message):
        Layout(0, 4, order).split(Positions.arange(length))


def test_unknown_orders_axes_and_a_cache_are_refused(mesh):
    with pytest.raises(ValueError, match="unknown order 'ring'; choose from zigzag, contiguous"):
        Sharding.over(mesh, order="ring")
    with pytest.raises(ValueError, match="no axis 'data'; it has context"):
        Sharding.over(mesh, "data")
    with pytest.raises(ValueError, match="leave out cache or sharding"):
        model_of(ENCODINGS["nope"])(tokens_of(1, 4), cache=Cache(), sharding=Sharding.over(mesh))
