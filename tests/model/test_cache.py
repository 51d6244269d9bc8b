import pytest
import torch

from phasewise.encodings import ALiBiConfig, NoPEConfig, RoPEConfig
from phasewise.model import Cache
from phasewise.positions import Positions
from tests.model.small import ENCODINGS, ORIGINAL, model_of, tokens_of

LENGTH = 13
EXACT = 1e-12  # float64 models: the same products, summed in another order


def served(model, tokens, chunks, *, at=None):
    """Logits of tokens fed to a cache in chunks of the given sizes."""
    cache, pieces, start = Cache(), [], 0
    with torch.no_grad():
        for size in chunks:
            places = None if at is None else at.narrow(start, size)
            pieces.append(model(tokens[:, start : start + size], at=places, cache=cache))
            start += size
    assert start == tokens.shape[1] == cache.length
    return torch.cat(pieces, dim=1)


@torch.no_grad()
def full(model, tokens, at=None):
    return model(tokens, at=at)


CHUNKS = {
    "one by one": [1] * LENGTH,
    "all but one, then one": [LENGTH - 1, 1],
    "one, then the rest": [1, LENGTH - 1],
    "up to the trained length": [ORIGINAL, LENGTH - ORIGINAL],
    "one past the trained length": [ORIGINAL + 1, LENGTH - ORIGINAL - 1],
    "uneven": [3, 1, 5, 4],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_decoding_and_chunked_prefill_equal_one_full_pass(encoding, chunks):
    model, tokens = model_of(encoding), tokens_of(2, LENGTH)
    torch.testing.assert_close(served(model, tokens, chunks), full(model, tokens), rtol=0, atol=EXACT)


@pytest.mark.parametrize("window", [1, 4, (4, None)])
def test_decoding_equals_one_full_pass_under_a_window(window):
    model, tokens = model_of(RoPEConfig(), window=window), tokens_of(2, LENGTH)
    torch.testing.assert_close(served(model, tokens, [5] + [1] * 8), full(model, tokens), rtol=0, atol=EXACT)


def left_padded(lengths):
    return torch.arange(LENGTH)[None] >= LENGTH - torch.tensor(lengths)[:, None]


# Rows on both sides of the trained length, and one that ends exactly at it and one just past it.
LENGTHS = [LENGTH, 3, ORIGINAL, ORIGINAL + 1]


def test_left_padding_changes_nothing(encoding):
    model, tokens = model_of(encoding), tokens_of(len(LENGTHS), LENGTH)
    together = full(model, tokens, Positions.padded(left_padded(LENGTHS)))
    for row, length in enumerate(LENGTHS):
        alone = full(model, tokens[row : row + 1, LENGTH - length :])
        torch.testing.assert_close(together[row, -length:], alone[0], rtol=0, atol=EXACT)


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [8, 1, 1, 3]], ids=str)
def test_left_padded_rows_of_mixed_lengths_decode_as_each_alone(encoding, chunks):
    model, tokens = model_of(encoding), tokens_of(len(LENGTHS), LENGTH)
    together = served(model, tokens, chunks, at=Positions.padded(left_padded(LENGTHS)))
    for row, length in enumerate(LENGTHS):
        alone = full(model, tokens[row : row + 1, LENGTH - length :])
        torch.testing.assert_close(together[row, -length:], alone[0], rtol=0, atol=EXACT)


def test_a_prompt_with_places_is_continued_without_them():
    model, tokens, at = (
        model_of(RoPEConfig()),
        tokens_of(2, LENGTH),
        Positions.padded(left_padded([LENGTH, 9])),
    )
    cache = Cache()
    with torch.no_grad():
        model(tokens[:, :10], at=at.narrow(0, 10), cache=cache)
        continued = model(tokens[:, 10:], cache=cache)
    torch.testing.assert_close(continued, full(model, tokens, at)[:, 10:], rtol=0, atol=EXACT)
    assert cache.positions is not None
    assert torch.equal(cache.positions.index[:, -3:], at.index[:, -3:])


def test_places_may_begin_after_tokens_that_came_without():
    model, tokens = model_of(RoPEConfig()), tokens_of(2, LENGTH)
    cache = Cache()
    with torch.no_grad():
        first = model(tokens[:, :6], cache=cache)
        assert cache.positions is None
        second = model(tokens[:, 6:], at=Positions.arange(7, start=6), cache=cache)
    got = torch.cat([first, second], dim=1)
    torch.testing.assert_close(got, full(model, tokens), rtol=0, atol=EXACT)


def test_a_packed_row_decodes_document_by_document():
    model, tokens, at = model_of(ALiBiConfig()), tokens_of(1, LENGTH), Positions.packed([5, 8])
    got = served(model, tokens, [4, 3, 1, 5], at=at)
    torch.testing.assert_close(got, full(model, tokens, at), rtol=0, atol=EXACT)


def test_keys_are_held_as_projected_whatever_the_encoding():
    tokens = tokens_of(1, LENGTH)
    held = []
    for name in ("nope", "rope-geometric", "rope-longrope", "alibi"):
        model, cache = model_of(ENCODINGS[name], qk_norm=True), Cache()
        with torch.no_grad():
            model(tokens, cache=cache)
            x = model.blocks[0].attention_norm(model.embedding(tokens))
            attention = model.blocks[0].attention
            raw = attention.key_norm(attention.key(x).unflatten(-1, (-1, 8)).transpose(1, 2))
        held.append(cache._keys[0].first(LENGTH))
        assert torch.equal(held[-1], raw)


def test_a_pass_that_fails_leaves_the_cache_as_it_was():
    model, tokens = model_of((NoPEConfig(), RoPEConfig())), tokens_of(2, LENGTH)
    cache = Cache()
    with torch.no_grad():
        first = model(tokens[:, :5], cache=cache)
        output = model.blocks[1].attention.output
        stop = output.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            model(tokens_of(2, 7, seed=9), at=Positions.arange(7, start=3), cache=cache)
        stop.remove()
        assert cache.length == 5
        second = model(tokens[:, 5:], cache=cache)
    got = torch.cat([first, second], dim=1)
    torch.testing.assert_close(got, full(model, tokens), rtol=0, atol=EXACT)


def test_a_first_pass_that_fails_leaves_no_places_behind():
    model, tokens, cache = model_of(RoPEConfig()), tokens_of(2, LENGTH), Cache()
    stop = model.blocks[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        model(tokens, at=Positions.arange(LENGTH, start=3), cache=cache)
    stop.remove()
    with torch.no_grad():
        model(tokens[:, :5], cache=cache)
        assert cache.positions is None
        got = model(tokens[:, 5:], cache=cache)
    torch.testing.assert_close(got, full(model, tokens)[:, 5:], rtol=0, atol=EXACT)


@pytest.mark.usefixtures("nan_memory")
def test_memory_that_was_never_written_never_shows():
    model, tokens = model_of(RoPEConfig()), tokens_of(2, LENGTH)
    assert served(model, tokens, [1] * LENGTH).isfinite().all()


def test_copying_is_linear_in_what_is_held(monkeypatch):
    model, cache, copied = model_of(NoPEConfig(), layers=1), Cache(), []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, x: (copied.append(x.numel()), copy(to, x))[1])
    steps = 200
    with torch.no_grad():
        for _ in range(steps):
            model(tokens_of(1, 1), cache=cache)
    written = 2 * steps * 2 * 8  # keys and values, kv heads, head dim
    assert written <= sum(copied) <= 3 * written


def test_gradients_through_a_cache_are_refused():
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        model_of(NoPEConfig())(tokens_of(1, 3), cache=Cache())


@torch.no_grad()
def test_another_batch_or_dtype_than_is_held_is_refused():
    model, cache = model_of(NoPEConfig()), Cache()
    model(tokens_of(2, 3), cache=cache)
    with pytest.raises(ValueError, match="cannot append"):
        model(tokens_of(3, 1), cache=cache)
    with pytest.raises(ValueError, match="cannot append"):
        model.float()(tokens_of(2, 1), cache=cache)


def test_a_cache_of_a_shallower_model_is_refused():
    cache, tokens = Cache(), torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        model_of(NoPEConfig(), layers=1)(tokens, cache=cache)
        with pytest.raises(ValueError, match="another model's"):
            model_of(NoPEConfig(), layers=2)(tokens, cache=cache)


@torch.no_grad()
def test_tokens_that_a_shallower_model_put_in_between_are_no_layers_of_a_deeper_one():
    cache, deep, shallow = Cache(), model_of(NoPEConfig(), layers=2), model_of(NoPEConfig(), layers=1)
    for model in (deep, deep, shallow):  # the memory of the second layer would hold what was never written
        model(tokens_of(1, 3), cache=cache)
    with pytest.raises(ValueError, match=r"not seen all of the 9 tokens .* another model's; use a new Cache"):
        deep(tokens_of(1, 1), cache=cache)


def test_a_cache_of_another_library_is_none():
    with pytest.raises(ValueError, match=r"cache must be a Cache, but is dict; use phasewise.Cache\(\)"):
        model_of(NoPEConfig())(tokens_of(1, 3), cache={})


@pytest.mark.parametrize("keep", [0, -1, 1.5])
def test_keeping_no_logits_is_refused(keep):
    with pytest.raises(ValueError, match="at least 1"):
        model_of(NoPEConfig())(torch.zeros(1, 3, dtype=torch.int64), keep=keep)
