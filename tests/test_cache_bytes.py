"""Bytes of a cache at the released sizes: counted in storages, fed row by row, no model built."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
import torch

import labkit
from labkit.cache import Cache
from labkit.mutants.models import DRAFT, random_ids, random_model, small_config

# Bytes of one entry with its index key, of a token in all stores, of one layer's window (and of
# one stage's of the draft).
FORMS = {"packed": (356, 890, 67_584), "fp8": (660, 1_650, 67_584), "bf16": (1_280, 3_200, 131_072)}


@pytest.fixture(scope="module")
def flash():
    return labkit.ModelConfig.preset("flash")


def feed(cache: Cache, count: int) -> None:
    """A pass of `count` tokens with random rows in place of a model's."""
    c, start = cache.config, cache.lengths
    new = torch.tensor([count])
    cache.begin()
    for ring in cache.rings:
        ring.take_in(torch.randn(1, count, c.head_dim), start, new)
    for layer, tail in cache.tails.items():
        groups = tail.groups(torch.randn(1, count, 2 * c.head_dim), start, new)
        assert groups.shape[1] >= (int(start) + count) // 2 - int(start) // 2, layer
    for layer, store in cache.stores.items():
        ratio = c.compress_ratios[layer]
        complete = (start + count) // ratio - start // ratio
        G = -(-count // ratio)
        store.append(torch.randn(1, G, c.head_dim), torch.randn(1, G, c.index_head_dim),
                     start // ratio, complete)
    cache.look_back.extend(torch.ones(1, count, dtype=torch.int64), start, new)
    cache.commit(torch.ones(1, count, dtype=torch.int64), new)


def storages(thing: object, skip: tuple[str, ...] = (), seen: set[int] | None = None,
             ) -> dict[int, int]:
    """Address and bytes of every distinct storage that can be reached from `thing`."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return {}
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        place = thing.untyped_storage()
        return {place.data_ptr(): place.nbytes()}
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple, set)):
        parts = list(thing)
    elif is_dataclass(thing) and not isinstance(thing, type):
        parts = [getattr(thing, f.name) for f in fields(thing)]
    else:
        parts = [v for k, v in getattr(thing, "__dict__", {}).items() if k not in skip]
    found: dict[int, int] = {}
    for part in parts:
        found |= storages(part, skip, seen)
    return found


# Positions and lengths, 8 bytes a row: no part of the state that a text fills.
POINTERS = ("lengths", "first", "_first", "_start")


def filled(cache: Cache) -> int:
    found = cache.nbytes()
    return found["global_kv"] + found["index_keys"]


@pytest.mark.parametrize("form", FORMS)
def test_bytes_of_a_token_at_the_released_sizes(flash, form):
    entry, token, window = FORMS[form]
    cache = Cache(flash, form=form)
    assert {n: s.page_entries for n, s in cache.stores.items()} == {2: 64, 8: 64, 14: 64, 20: 128}
    *encoder, decoder = sorted(cache.stores)
    assert decoder == 20 == flash.encoder_layers
    page = {layer: s.page_entries * entry for layer, s in cache.stores.items()}
    measured, at = {0: filled(cache)}, 0
    for count in (1, 1, 1, 126, 1, 64, 63, 128, 33, 94):  # 512 tokens, odd lengths between
        feed(cache, count)
        at += count
        measured[at] = filled(cache)
        by_layer = {layer: sum(f for _, f, _ in s.nbytes()) for layer, s in cache.stores.items()}
        # A ratio-2 entry appears with every second token.
        assert by_layer[decoder] == at * entry, at
        assert all(by_layer[layer] == at // 2 * entry for layer in encoder), at
        for layer, store in cache.stores.items():
            reserved = sum(held - used for _, used, held in store.nbytes())
            assert 0 <= reserved < page[layer], (layer, at)
        found = cache.nbytes()
        assert found["window"] == flash.num_hidden_layers * window and found["draft"] == 0
        assert sum(found.values()) == sum(storages(cache, POINTERS).values()), at
    assert at == 512
    slope = (measured[512] - measured[2]) / (512 - 2)
    both = {n: sum(f for layer in group for _, f, _ in cache.stores[layer].nbytes()) / 512
            for n, group in (("encoder", encoder), ("layer 20", [decoder]))}
    print(f"{form}: {slope} B a token, {both}, window {window} B a layer")
    assert slope == token
    assert both == {"encoder": 3 * entry / 2, "layer 20": entry}
    if form == "packed":
        assert slope == 890.0 and both == {"encoder": 534.0, "layer 20": 356.0}
    # A token more than an even length brings layer 20's entry only, the next one all four.
    feed(cache, 1)
    assert filled(cache) - measured[512] == entry
    feed(cache, 1)
    assert filled(cache) - measured[512] == 2 * token


@pytest.mark.parametrize("form", [*FORMS, "plain"])
def test_windows_of_the_draft_weigh_the_same_for_any_text(flash, form):
    """Three stages, so many bytes a request; nothing else weighs more for it."""
    window = FORMS[form][2] if form in FORMS else 128 * 512 * 4         # plain: fp32
    bare, cache = Cache(flash, form=form), Cache(flash, form=form, draft=True)
    assert len(cache.draft_windows) == 3
    for count in (0, 1, 127, 1, 1, 130):
        for each in (bare, cache):
            if count:
                feed(each, count)
        without, found = bare.nbytes(), cache.nbytes()
        assert found == {**without, "draft": 3 * window}, count
        assert found["draft"] == sum(storages(cache.draft_windows, POINTERS).values())
        assert sum(found.values()) == sum(storages(cache, POINTERS).values()), count
    print(f"{form}: {found['draft']} B of draft windows a request, {window} a stage")
    if form == "packed":
        assert found["draft"] == 3 * 67_584 == 202_752


def test_pages_are_filled_before_another_begins(flash):
    cache = Cache(flash)
    feed(cache, 256)
    assert cache.nbytes()["reserved"] == 0
    assert all(len(s.pages[0]) == 2 for s in cache.stores.values())
    feed(cache, 1)
    assert [len(s.pages[0]) for s in cache.stores.values()] == [2, 2, 2, 3]


@pytest.mark.parametrize("form", [*FORMS, "plain"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("draft", [{}, DRAFT], ids=["bare", "draft"])
def test_a_model_s_passes_leave_nothing_else_behind(form, batch, draft):
    """After real passes too: no joined rows, no decoded copies, no row twice."""
    config = small_config(**draft)
    model = random_model(config, dtype=torch.float32, cache_rounding=True)
    cache = model.new_cache(batch, form, 8)
    lengths = torch.tensor([9, 3, 7])[:batch]
    with torch.no_grad():
        for seed in range(4):
            model(random_ids(config, 9, batch, seed), lengths, cache=cache)
            model(random_ids(config, 1, batch, seed), cache=cache)
            found = cache.nbytes()
            assert sum(found.values()) == sum(storages(cache, POINTERS).values())
            # Two stages of the draft, seven layers.
            assert found["draft"] * 7 == (found["window"] * 2 if draft else 0)


@pytest.mark.parametrize("draft", [False, True])
def test_a_fork_weighs_its_windows_only_once_it_goes_on(flash, draft):
    """Both together hold one set of pages; after a step of one, its last pages twice."""
    cache = Cache(flash, draft=draft)
    feed(cache, 300)
    alone = sum(storages(cache, POINTERS).values())
    twin = cache.fork()
    assert sum(storages([cache, twin], POINTERS).values()) == alone
    feed(twin, 1)
    both = sum(storages([cache, twin], POINTERS).values())
    recent = sum(part.nbytes for part in (*twin.rings, *twin.tails.values(), twin.look_back))
    last = cache.stores[20].pages[0][-1]  # token 301 completes no pair: this store alone writes
    assert both - alone == recent + last.kv.nbytes + last.keys.nbytes
    print(f"fork of 300 tokens: +{both - alone} B after one step, {alone} B before")
