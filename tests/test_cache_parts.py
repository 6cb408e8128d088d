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
from labkit.numerics.rows import FORMS, RowCodec


def plain(width):
    return RowCodec(width, "fp8", "plain", torch.float32, rounding=False)


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
    ring = WindowRing(2, W, plain(3), torch.device("cpu"))
    start = [0, 0]
    for T, *counts in passes:
        new = numbered(T, counts, start, 3)
        ring.begin()
        both, since = ring.take_in(new, torch.tensor(start), torch.tensor(counts))
        assert since.tolist() == start
        ring.commit()
        assert both.shape == (2, W + T, 3)
        for b in range(2):
            for j in range(W + counts[b]):
                position = start[b] - W + j
                if position >= 0:
                    assert both[b, j].tolist() == [b * 1000 + position] * 3
            start[b] += counts[b]
            for position in range(max(0, start[b] - W), start[b]):
                assert ring.rows[b, position % W].tolist() == [b * 1000 + position] * 3


@given(PASSES, st.integers(2, 5))
def test_compressor_tail(passes, ratio):
    tail = Tail(2, ratio, 2, torch.float32, torch.device("cpu"))
    start, groups = [0, 0], [[], []]
    for T, *counts in passes:
        new = numbered(T, counts, start, 2)
        tail.begin()
        found = tail.groups(new, torch.tensor(start), torch.tensor(counts))
        tail.commit()
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
    lambda G: st.tuples(st.just(G), st.integers(0, G), st.integers(0, G))), min_size=1, max_size=8),
    st.integers(1, 5))
def test_global_store(passes, page):
    store = GlobalStore(2, page, plain(4), plain(2), torch.device("cpu"))
    kept = [[], []]
    for G, *fresh in passes:
        start = [len(kept[0]), len(kept[1])]
        new = numbered(G, fresh, start, 4)
        store.begin()
        store.append(new, new[..., :2] * 10, torch.tensor(start), torch.tensor(fresh))
        for b in range(2):
            kept[b] += new[b, : fresh[b]].tolist()
        store.commit([len(k) for k in kept], 1)
        assert store.length == max(len(k) for k in kept) == store.values().shape[1]
        for b in range(2):
            n = len(kept[b])
            assert store.counts[b] == n and len(store.pages[b]) == -(-n // page)
            assert store.values()[b, :n].tolist() == kept[b]
            assert not store.values()[b, n:].any()
            assert store.keys()[b, :n].tolist() == [[10 * v for v in row[:2]] for row in kept[b]]
            at = n // 2
            assert store.keys(at, n)[b, : n - at].tolist() == store.keys()[b, at:n].tolist()


def test_reading_a_selection_decodes_no_more_than_that():
    """Few queries, many entries: the same values as from all of them."""
    store = GlobalStore(1, 16, RowCodec(32, "nvfp4", "packed", torch.float32),
                        RowCodec(32, "mxfp4", "packed", torch.float32), torch.device("cpu"))
    new = torch.randn(1, 100, 32)
    store.append(new, new, torch.tensor([0]), torch.tensor([100]))
    selection = torch.tensor([[[3, 40, 99, -1], [0, 1, 41, 77]]])
    entries, places = store.read(selection)
    assert entries.shape[1] == 8 and (places[selection < 0] == -1).all()
    everything = store.values()
    assert torch.equal(entries[0][places[selection >= 0]], everything[0][selection[selection >= 0]])
    assert store.read(selection)[0] is everything  # decoded already: nothing is gathered


def test_a_pass_that_is_not_committed_leaves_nothing():
    store = GlobalStore(1, 4, plain(4), plain(2), torch.device("cpu"))
    old, new = torch.ones(1, 3, 4), torch.full((1, 6, 4), 2.0)
    for values, end in ((old, True), (new, False)):
        store.begin()
        store.append(values, values[..., :2], torch.tensor([store.counts[0]]),
                     torch.tensor([values.shape[1]]))
        if end:
            store.commit([3], 1)
    store.begin()
    assert store.counts == [3] and torch.equal(store.values(), old)


def test_pages_are_shared_until_somebody_writes():
    store = GlobalStore(1, 4, plain(4), plain(2), torch.device("cpu"))
    rows = torch.arange(24.0).reshape(1, 6, 4)
    store.append(rows, rows[..., :2], torch.tensor([0]), torch.tensor([6]))
    store.commit([6], 1)
    twin = store.fork()
    places = [page.kv.data_ptr() for page in store.pages[0]]
    assert [page.kv.data_ptr() for page in twin.pages[0]] == places
    for one, value in ((twin, 7.0), (store, 8.0)):
        new = torch.full((1, 1, 4), value)
        one.append(new, new[..., :2], torch.tensor([6]), torch.tensor([1]))
        one.commit([7], 1)
    for one, value in ((twin, 7.0), (store, 8.0)):
        assert torch.equal(one.values()[:, :6], rows) and (one.values()[:, 6] == value).all()
        assert one.pages[0][0].kv.data_ptr() == places[0] != one.pages[0][1].kv.data_ptr()


def test_a_full_page_that_is_cropped_into_is_copied_before_writing():
    store = GlobalStore(1, 4, plain(4), plain(2), torch.device("cpu"))
    rows = torch.arange(16.0).reshape(1, 4, 4)
    store.append(rows, rows[..., :2], torch.tensor([0]), torch.tensor([4]))
    store.commit([4], 1)
    lent = store.pages[0][0]  # full pages are handed out as they are
    store.crop([2])
    new = torch.full((1, 1, 4), 9.0)
    store.append(new, new[..., :2], torch.tensor([2]), torch.tensor([1]))
    assert torch.equal(lent.kv, rows[0]) and (store.values()[0, 2] == 9).all()


@pytest.mark.parametrize("form", FORMS)
def test_nbytes_counts_what_is_allocated(form):
    config = small_config()
    model = random_model(config, dtype=torch.float32, cache_rounding=True)
    cache = model.new_cache(form=form, page_tokens=8)
    empty = cache.nbytes()
    assert empty["global_kv"] == empty["index_keys"] == empty["reserved"] == 0
    with torch.no_grad():
        model(random_ids(config, 40), cache=cache)
        model(random_ids(config, 1), cache=cache)
    found = cache.nbytes()
    entries = 41 // 2 + 41
    row = {"packed": (18, 17, 33), "fp8": (33, 33, 33), "bf16": (64, 64, 64),
           "plain": (128, 128, 128)}[form]
    assert found["global_kv"] == entries * row[0] and found["index_keys"] == entries * row[1]
    assert found["window"] == 7 * config.sliding_window * row[2] == empty["window"]
    assert found["remainder"] == 1 * 2 * config.head_dim * 4
    assert found["engram"] == (config.engram_max_ngram_size - 1) * 8
    # Layer 1's 20 entries fill five pages; of layer 4's sixth page seven are free.
    assert found["reserved"] == 7 * (row[0] + row[1])
    tensors = [ring.rows for ring in cache.windows] + [tail.rows for tail in cache.tails.values()]
    tensors += [part for store in cache.stores.values() for page in store.pages[0]
                for part in (page.kv, page.keys)] + [cache.look_back.rows]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(found.values()) == sum(held.values())


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
    assert (cache.look_back.rows == -1).all()
    assert sorted(cache.stores) == [2, 4, 6] and sorted(cache.tails) == [2, 4]
    assert len(cache.windows) == 10
