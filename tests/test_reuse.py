"""Forks, rewinds and interrupts: a sequence's state is its own, and all or nothing."""

from __future__ import annotations

import pytest
import torch
from reuse_helpers import (
    Interrupt,
    cut_short,
    must_be_close,
    nano,
    read_on,
    same_state,
    session_of,
    small,
    text,
)

from labkit.cache import Cache, GlobalStore
from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.session import Session
from labkit.errors import InputError
from labkit.mutants.models import random_ids, random_model, small_config


# ---------------------------------------------------------------------------- forks
def places(cache: Cache) -> dict[int, list[int]]:
    return {layer: [p.kv.data_ptr() for p in s.pages[0]] for layer, s in cache.stores.items()}


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13, 31])
def test_branches_do_not_feel_each_other_and_share_their_pages(length):
    model = nano()
    ids = text(model, length)
    one = session_of(model, ids)
    two = one.fork()
    before = places(one.cache)
    assert places(two.cache) == before
    ways = [text(model, 9, seed) for seed in (5, 6)]
    logits = [[], []]
    for step in range(9):
        for session, way, out in zip((one, two), ways, logits, strict=True):
            out.append(session.decode(way[step]))
            if step:
                continue
            for layer, store in session.cache.stores.items():
                ratio, now = model.config.compress_ratios[layer], places(session.cache)[layer]
                held, full = length // ratio, length // ratio // store.page_entries
                assert now[:full] == before[layer][:full], "full pages are shared for good"
                wrote = (length + 1) // ratio > held
                copied = [a != b for a, b in zip(now[full:], before[layer][full:], strict=False)]
                assert copied == [wrote] * (held % store.page_entries > 0), layer
    for way, out in zip(ways, logits, strict=True):
        must_be_close("logits", read_on(session_of(model, ids), way), torch.cat(out, dim=1))


# ---------------------------------------------------------------------------- rewind
@pytest.mark.parametrize("config", [
    small_config(), small_config(engram_layer_ids=()), small_config(sliding_window=1),
    small_config(compress_ratios=(0, 3, 3, 3, 2, 2, 2))],
    ids=["small", "without Engram", "W = 1", "ratios 3 and 2"])
def test_a_rewound_pass_never_read_the_rest(config):
    """From even and odd places, over the ends of ring, pairs and pages."""
    model, T = random_model(config), 11
    after = torch.tensor([text(model, 6, seed=8)])
    for start in (0, 1, 6, 13):
        ids = random_ids(config, start + T, seed=start)
        for kept in range(T + 1):
            caches = [model.new_cache(page_tokens=6) for _ in range(2)]
            with torch.no_grad():
                for cache, extra in zip(caches, (kept, T), strict=True):
                    if start:
                        model(ids[:, :start], cache=cache)
                    if extra:
                        model(ids[:, start : start + extra], cache=cache, keep=True)
                never, found = caches
                found.rewind(torch.tensor([start + T - (T - kept) // 2]))  # in two steps
                found.rewind(torch.tensor([start + kept]))
                same_state(never, found)
                must_be_close(f"{start}+{kept}", model(after, cache=never).logits,
                              model(after, cache=found).logits)
            same_state(never, found)


def test_rows_are_rewound_each_by_its_own_number():
    model = small()
    starts, counts, kept = [3, 8, 1], [9, 4, 6], [2, 4, 0]
    ids, more = random_ids(model.config, 9, 3, seed=1), random_ids(model.config, 9, 3, seed=2)
    cache = model.new_cache(3, page_tokens=4)
    after = random_ids(model.config, 5, 3, seed=3)
    with torch.no_grad():
        model(ids, torch.tensor(starts), cache=cache)
        model(more, torch.tensor(counts), cache=cache, keep=True)
        cache.rewind(torch.tensor(starts) + torch.tensor(kept))
        found = model(after, cache=cache).logits
        for b in range(3):
            alone = model.new_cache(page_tokens=4)
            row = torch.cat([ids[b, : starts[b]], more[b, : kept[b]]])
            model(row[None], cache=alone)
            must_be_close(f"row {b}", model(after[b : b + 1], cache=alone).logits[0], found[b])
            same_state(alone, cache, [(0, b)])


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_ctrl_c_inside_a_rewind_is_made_good(late, monkeypatch):
    model = small()
    ids, after = random_ids(model.config, 17), text(model, 6, seed=8)
    for part in range(11):
        session, never = (Session(model, page_tokens=4) for _ in range(2))
        never.prefill(ids[:, :11])
        session.prefill(ids[:, :9])
        cache = session.cache
        with torch.no_grad():
            model(ids[:, 9:], cache=cache, keep=True)
        chosen = [*cache._recent(), *cache.stores.values()][part]
        name = "crop" if isinstance(chosen, GlobalStore) else "rewind"
        with monkeypatch.context() as patch:
            patch.setattr(chosen, name, Interrupt(getattr(chosen, name), late))
            cut_short(lambda c=cache: c.rewind(torch.tensor([11])))
        assert session.ids == never.ids
        same_state(never.cache, cache)
        must_be_close("logits", read_on(never, after), read_on(session, after))


def test_rewind_refuses_what_was_not_kept():
    model = small()
    ids = random_ids(model.config, 6)
    cache = model.new_cache()
    with torch.no_grad():
        model(ids, cache=cache, keep=True)
        for bad in ([7], [-1], [1, 1]):
            with pytest.raises(InputError, match="cannot go back"):
                cache.rewind(torch.tensor(bad))
        model(ids, cache=cache)
        with pytest.raises(InputError, match="keep=True"):
            cache.rewind(torch.tensor([8]))
        with pytest.raises(InputError, match="leave out tail"):
            model(ids, cache=cache, keep=True, tail=4)


# ---------------------------------------------------------------------------- interrupts
@pytest.mark.parametrize("layer", range(7))
@pytest.mark.parametrize("site", ["attn", "ffn"])
def test_ctrl_c_in_any_layer_changes_nothing(layer, site, monkeypatch):
    model = small()
    for before in (0, 3, 13):
        ids, after = text(model, before), text(model, 12, seed=6)
        session = session_of(model, ids)
        for mode in ("full", "ced"):
            with monkeypatch.context() as patch:
                module = getattr(model.layers[layer], site)
                patch.setattr(module, "forward", Interrupt(module.forward, True))
                cut_short(lambda s=session, m=mode: s.prefill(text(model, 23, seed=5), mode=m))
        full = session_of(model, ids)
        assert session.ids == ids
        same_state(full.cache, session.cache)
        must_be_close("logits", read_on(full, after), read_on(session, after))
        same_state(full.cache, session.cache)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_ctrl_c_inside_the_commit_is_made_good(late, monkeypatch):
    """At every part in turn, during a long pass and a step, and twice in a row."""
    model = small()
    ids, after = text(model, 13), text(model, 9, seed=6)
    number = len([*Session(model).cache._recent(), *Session(model).cache.stores])
    assert number == 7 + 1 + 1 + 2
    for part in range(number):
        for new in (text(model, 15, seed=5), [7]):
            session = session_of(model, ids)
            parts = [*session.cache._recent(), *session.cache.stores.values()]
            with monkeypatch.context() as patch:
                patch.setattr(parts[part], "commit", Interrupt(parts[part].commit, late))
                cut_short(lambda s=session, n=new: s.prefill(n))
                cut_short(lambda s=session: s.length)
            assert session.ids == ids + new
            full = session_of(model, ids + new)
            same_state(full.cache, session.cache)
            must_be_close("logits", read_on(full, after), read_on(session, after))


def test_what_an_interrupted_pass_has_paged_is_nobody_s():
    """A long prefill is cut short after it has filled pages; then two branches go on apart."""
    model = small()
    ids = text(model, 3)
    session = session_of(model, ids)
    hook = model.layers[6].register_forward_hook(Interrupt(None, False))
    cut_short(lambda: session.prefill(text(model, 30, seed=5)))
    hook.remove()
    twin = session.fork()
    ways = [text(model, 21, seed) for seed in (1, 2)]
    logits = [branch.prefill(way) for branch, way in zip((session, twin), ways, strict=True)]
    for branch, way, found in zip((session, twin), ways, logits, strict=True):
        full = session_of(model, ids)
        must_be_close("logits", full.prefill(way), found)
        same_state(full.cache, branch.cache)
        must_be_close("more", read_on(full, [1, 2, 3]), read_on(branch, [1, 2, 3]))


def test_a_prefix_cache_keeps_no_page_of_an_interrupted_pass():
    model = small()
    ids = text(model, 7)
    session = session_of(model, ids)
    hook = model.layers[6].register_forward_hook(Interrupt(None, False))
    cut_short(lambda: session.prefill(text(model, 30, seed=5)))
    hook.remove()
    cache = PrefixCache(model, page_tokens=4)
    cache.keep(session)
    more = text(model, 8, seed=3)
    hit, logits, found = cache.prefill(ids + more, last_only=False)
    assert found.kind == "full"
    full = session_of(model, ids)
    must_be_close("logits", full.prefill(more)[:, -logits.shape[1]:], logits)
    same_state(full.cache, hit.cache)
    cache.close()
