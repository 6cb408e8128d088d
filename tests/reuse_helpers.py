"""Models, texts and comparisons of whole states, for the tests of replay and reuse."""

from __future__ import annotations

import functools

import pytest
import torch

import labkit
from labkit.cache import Cache
from labkit.engine.session import Session
from labkit.mutants.models import random_ids, random_model, small_config
from labkit.mutants.rules import FP64, close


@functools.cache
def small(window=4):
    """7 layers, pairs in layer 1, single tokens in layer 4, pages of 4 tokens in the tests."""
    return random_model(small_config(sliding_window=window))


@functools.cache
def nano():
    """10 layers, W = 8, Full layers 2, 4 (pairs) and 6, the last KV source."""
    model = random_model(labkit.ModelConfig.preset("nano"), seed=3)
    model.cache_rounding = False
    return model


def text(model, length, seed=0):
    return random_ids(model.config, length, seed=seed)[0].tolist()


def session_of(model, ids, page=4):
    session = Session(model, page_tokens=page)
    if ids:
        session.prefill(ids)
    return session


def read_on(session, ids):
    return torch.cat([session.decode(i) for i in ids], dim=1)


def must_be_close(name, expected, found):
    wrong = close(name, expected, found, FP64)
    assert wrong is None, wrong


def window_in_order(cache: Cache, layer: int, b: int = 0) -> tuple[int, torch.Tensor]:
    """The first position of row b whose window vector exists, and the vectors from there on."""
    ring, n = cache.rings[layer], int(cache.lengths[b])
    first = max(int(ring.first[b]), n - ring.window, 0)
    slots = torch.arange(first, n) % ring.window
    return first, ring.rows[b, slots]


def same_state(expected: Cache, found: Cache, rows=((0, 0),)) -> None:
    """All that a cache remembers, of row a here and of row b there; void places left out."""
    c = expected.config
    for a, b in rows:
        n = int(expected.lengths[a])
        assert int(found.lengths[b]) == n and found.tokens[b] == expected.tokens[a]
        assert torch.equal(expected.look_back.rows[a], found.look_back.rows[b])
        for layer in range(len(expected.rings)):         # the draft's last
            first, vectors = window_in_order(expected, layer, a)
            other, theirs = window_in_order(found, layer, b)
            assert first == other, f"window {layer} begins at {other}, not {first}"
            must_be_close(f"window {layer}", vectors, theirs)
        for layer, tail in expected.tails.items():
            left = n % tail.ratio
            if left:
                must_be_close(f"remainder {layer}", tail.rows[a, -left:],
                              found.tails[layer].rows[b, -left:])
        for layer, store in expected.stores.items():
            count = n // c.compress_ratios[layer]
            assert store.counts[a] == found.stores[layer].counts[b] == count
            must_be_close(f"entries {layer}", store.values()[a, :count],
                          found.stores[layer].values()[b, :count])
            must_be_close(f"index keys {layer}", store.keys()[a, :count],
                          found.stores[layer].keys()[b, :count])


def global_rows(cache: Cache) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {layer: (s.values().clone(), s.keys().clone()) for layer, s in cache.stores.items()}


def untouched(before, cache: Cache) -> None:
    """What is still stored has the bits it had."""
    for layer, (values, keys) in before.items():
        store, n = cache.stores[layer], cache.stores[layer].counts[0]
        assert torch.equal(store.values()[:, :n], values[:, :n]), layer
        assert torch.equal(store.keys()[:, :n], keys[:, :n]), layer


class Interrupt:
    """Stands in for a method: Ctrl-C before or after it has done its work."""

    def __init__(self, plain, late):
        self.plain, self.late = plain, late

    def __call__(self, *args, **kwargs):
        if self.late:
            self.plain(*args, **kwargs)
        raise KeyboardInterrupt


def cut_short(call):
    with pytest.raises(KeyboardInterrupt):
        call()
