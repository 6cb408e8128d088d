"""The parts of a cache against plain Python lists, fed unevenly over many passes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.cache import Cache
from labkit.cache.store import GlobalStore
from labkit.cache.tail import Tail
from labkit.cache.window import WindowRing
from labkit.config import ModelConfig
from labkit.mutants.models import random_ids, random_model, small_config

# Passes over a batch of two rows: (T, live tokens of row 0, of row 1).
PASSES = st.lists(
    st.integers(1, 9).flatmap(
        lambda T: st.tuples(st.just(T), st.integers(1, T), st.integers(1, T))),
    min_size=1, max_size=6)


def numbered(T, counts, starts, width):
    """[2,T,width] in which row b's live token at position p is b*1000 + p; padding is -1."""
    out = torch.full((2, T, width), -1.0)
    for b in range(2):
        for t in range(counts[b]):
            out[b, t] = b * 1000 + starts[b] + t
    return out


@given(PASSES, st.integers(1, 7))
def test_window_ring(passes, W):
    ring = WindowRing(2, W, 3, torch.float32, torch.device("cpu"))
    start = [0, 0]
    for T, *counts in passes:
        new = numbered(T, counts, start, 3)
        both = ring.extend(new, torch.tensor(start), torch.tensor(counts))
        assert both.shape == (2, W + T, 3)
        for b in range(2):
            for j in range(W + counts[b]):
                position = start[b] - W + j
                if position >= 0:
                    assert both[b, j].tolist() == [b * 1000 + position] * 3
            start[b] += counts[b]
            for position in range(max(0, start[b] - W), start[b]):
                assert ring.buffer[b, position % W].tolist() == [b * 1000 + position] * 3


@given(PASSES, st.integers(2, 5))
def test_compressor_tail(passes, ratio):
    tail = Tail(2, ratio, 2, torch.float32, torch.device("cpu"))
    start, groups = [0, 0], [[], []]
    for T, *counts in passes:
        new = numbered(T, counts, start, 2)
        found = tail.extend(new, torch.tensor(start), torch.tensor(counts))
        assert found.shape[2:] == (ratio, 2)
        for b in range(2):
            complete = (start[b] + counts[b]) // ratio - start[b] // ratio
            assert complete <= found.shape[1]
            groups[b] += found[b, :complete, :, 0].tolist()
            start[b] += counts[b]
    for b in range(2):
        whole = [b * 1000.0 + p for p in range(start[b] // ratio * ratio)]
        assert groups[b] == [whole[g : g + ratio] for g in range(0, len(whole), ratio)]


@given(st.lists(st.integers(0, 5).flatmap(
    lambda G: st.tuples(st.just(G), st.integers(0, G), st.integers(0, G))), min_size=1, max_size=8))
def test_global_store(passes):
    store = GlobalStore(2, torch.device("cpu"))
    kept = [[], []]
    for G, *fresh in passes:
        start = [len(kept[0]), len(kept[1])]
        new = numbered(G, fresh, start, 4)
        store.append(new, new[..., :2] * 10, torch.tensor(fresh))
        for b in range(2):
            kept[b] += new[b, : fresh[b]].tolist()
        assert store.length == max(len(k) for k in kept) == store.kv.shape[1]
        for b in range(2):
            assert store.count[b] == len(kept[b])
            assert store.kv[b, : len(kept[b])].tolist() == kept[b]
            assert store.index_keys[b, : len(kept[b])].tolist() == [
                [10 * v for v in row[:2]] for row in kept[b]]


def test_a_store_grows_by_doubling_not_by_every_entry():
    store = GlobalStore(1, torch.device("cpu"))
    one, moved, place = torch.zeros(1, 1, 4), 0, None
    for _ in range(1000):
        store.append(one, one, torch.tensor([1]))
        moved += place is not None and store._kv.data_ptr() != place
        place = store._kv.data_ptr()
    assert store.length == 1000 and moved <= 8


def test_nbytes_counts_what_is_allocated():
    config = small_config()
    model = random_model(config, dtype=torch.float32)
    cache = model.new_cache()
    empty = cache.nbytes()
    assert empty["global_kv"] == empty["index_keys"] == 0
    with torch.no_grad():
        model(random_ids(config, 40), cache=cache)
        model(random_ids(config, 1), cache=cache)
    found = cache.nbytes()
    entries = 41 // 2 + 41
    assert found["global_kv"] == entries * config.head_dim * 4
    assert found["index_keys"] == entries * config.index_head_dim * 4
    assert found["window"] == 7 * config.sliding_window * config.head_dim * 4 == empty["window"]
    assert found["remainder"] == 1 * 2 * config.head_dim * 4
    assert found["engram"] == (config.engram_max_ngram_size - 1) * 8
    held = set()
    total = 0
    for part in (*cache.windows, *cache.stores.values(), *cache.tails.values(), cache):
        for name, value in vars(part).items():
            if torch.is_tensor(value) and name not in ("count", "lengths"):
                storage = value.untyped_storage()
                if storage.data_ptr() not in held:
                    held.add(storage.data_ptr())
                    total += storage.nbytes()
    assert sum(found.values()) == total


def test_window_bytes_stay_and_global_bytes_grow_with_the_text():
    config = small_config()
    model = random_model(config, dtype=torch.float32)
    sizes = []
    for length in (32, 64, 128):
        cache = model.new_cache()
        with torch.no_grad():
            model(random_ids(config, length), cache=cache)
        sizes.append(cache.nbytes())
    assert sizes[0]["window"] == sizes[1]["window"] == sizes[2]["window"]
    assert sizes[2]["global_kv"] == 2 * sizes[1]["global_kv"] == 4 * sizes[0]["global_kv"]


@pytest.mark.parametrize("batch", (1, 3))
def test_a_fresh_cache_is_an_empty_past(batch):
    cache = Cache(ModelConfig.preset("nano"), batch)
    assert cache.batch == batch and not cache.lengths.any()
    assert (cache.classes == -1).all()
    assert sorted(cache.stores) == [2, 4, 6] and sorted(cache.tails) == [2, 4]
    assert len(cache.windows) == 10


def test_a_snapshot_holds_no_memory_of_the_original():
    config = small_config()
    model = random_model(config)
    cache = model.new_cache()
    with torch.no_grad():
        model(random_ids(config, 9), cache=cache)
        model(random_ids(config, 1), cache=cache)
    saved = cache.snapshot()

    def storages(c):
        parts = (*c.windows, *c.stores.values(), *c.tails.values(), c)
        return {value.untyped_storage().data_ptr() for part in parts
                for value in vars(part).values() if torch.is_tensor(value)}

    assert not storages(cache) & storages(saved)
