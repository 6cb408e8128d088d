"""Other pasts: crop, fork, rewind, halo and interrupt against passes that never did any of it.

float64 without cache rounding, so that every comparison is exact to 1e-9 of the span.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

import labkit
from labkit.cache import Cache, GlobalStore
from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.replay import reach, replay_start
from labkit.engine.session import Session
from labkit.errors import InputError
from labkit.model.attention import Attention
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
    ring, n = cache.windows[layer], int(cache.lengths[b])
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
        for layer in range(c.num_hidden_layers):
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


# ---------------------------------------------------------------------------- crop, exact
@pytest.mark.parametrize("make", [small, nano])
def test_an_exact_replay_at_every_length_is_the_full_run(make):
    """small: 22 tokens back, so replays begin at 1, 2, 3, ... : odd ones inside a pair."""
    model, total = make(), 46
    ids, after = text(model, total), text(model, 7, seed=9)
    source = session_of(model, ids)
    stored = global_rows(source.cache)
    starts = set()
    for length in range(total + 1) if make is small else (0, 1, 8, 9, 16, 37, 44, 45, 46):
        session = source.fork()
        session.crop(length, "exact")
        starts.add(replay_start(model.config, length, "exact"))
        assert session.ids == ids[:length]
        untouched(stored, session.cache)
        full = session_of(model, ids[:length])
        same_state_after_replay(full.cache, session.cache)
        must_be_close(f"logits after {length}", read_on(full, after), read_on(session, after))
        same_state_after_replay(full.cache, session.cache)
    if make is small:
        assert {0, 1, 2, 3, total - reach(model.config, 7)} <= starts
    untouched(stored, source.cache)  # the source of all these forks has felt nothing


def same_state_after_replay(full: Cache, found: Cache) -> None:
    """`first` may lie higher than 0, but not inside the window."""
    n = int(full.lengths[0])
    assert all(int(r.first[0]) <= max(0, n - r.window) for r in found.windows)
    same_state(full, found)


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 893, 901])
def test_an_exact_replay_with_the_released_window(length):
    model = small(128)  # 7 layers: 890 tokens are read again
    ids, after = text(model, length + 60), text(model, 3, seed=4)
    session = session_of(model, ids, None)
    stored = global_rows(session.cache)
    session.crop(length, "exact")
    untouched(stored, session.cache)
    assert replay_start(model.config, length, "exact") == max(0, length - 890)
    full = session_of(model, ids[:length], None)
    same_state_after_replay(full.cache, session.cache)
    must_be_close("logits", read_on(full, after), read_on(session, after))


# ---------------------------------------------------------------------------- crop, bounded
def replayed_another_way(model, ids, start, monkeypatch) -> Session:
    """All layers read all tokens, but for queries from `start` on no window key before it exists,
    and whatever is stored is what the full run has stored."""
    full = session_of(model, ids, None)
    values = {layer: (s.values(), s.keys()) for layer, s in full.cache.stores.items()}
    found = Session(model)
    owners = {id(s): layer for layer, s in found.cache.stores.items()}
    kernels, attend, append = model.kernels, Attention.forward, GlobalStore.append

    def cut_off(q, window, entries, selected, sink, at):
        before = kernels.sparse_attention(q, window, entries, selected, sink, at)
        after = kernels.sparse_attention(q, window, entries, selected, sink, at - start)
        return torch.cat([before[:, :start], after[:, start:]], dim=1)

    def forward(self, x, run, published=False):
        run.kernels = SimpleNamespace(**{**vars(kernels), "sparse_attention": cut_off})
        return attend(self, x, run, published)

    def append_stored(self, kv, keys, first, complete):
        kv, keys = values[owners[id(self)]]
        append(self, kv, keys, first, complete)

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "forward", forward)
        patch.setattr(GlobalStore, "append", append_stored)
        found.prefill(ids)
    for ring in found.cache.windows:
        ring.first = torch.tensor([start])
    return found


@pytest.mark.parametrize("window, lengths", [
    (4, [1, 3, 4, 5, 6, 7, 8, 9, 12, 13, 30, 31]), (128, [127, 128, 129, 255, 256, 257])])
def test_a_bounded_replay_is_a_pass_with_cut_windows(window, lengths, monkeypatch):
    model = small(window)
    ids, after = text(model, max(lengths) + 5), text(model, 9, seed=2)
    source = session_of(model, ids)
    stored = global_rows(source.cache)
    differences = {}
    for length in lengths:
        start = replay_start(model.config, length)
        assert start == max(0, length - window)
        session = source.fork()
        session.crop(length)  # bounded is the default
        untouched(stored, session.cache)
        other = replayed_another_way(model, ids[:length], start, monkeypatch)
        same_state(other.cache, session.cache)
        found, expected = read_on(session, after), read_on(other, after)
        must_be_close(f"logits after {length}", expected, found)
        same_state(other.cache, session.cache)
        full = read_on(session_of(model, ids[:length]), after)
        differences[length] = float((found - full).abs().max() / full.abs().max())
    print(f"W {window}: bounded against full, of the span: {differences}")
    # Nothing is lost where the text is no longer than the window; afterwards something is.
    assert all((d > 1e-6) == (n > window) for n, d in differences.items())


def test_crop_to_nothing_and_beyond():
    model = small()
    session = session_of(model, text(model, 9))
    twin = session.fork()
    for bad in (10, -1, 2.0, True, "3"):
        with pytest.raises(InputError):
            session.crop(bad)
    with pytest.raises(InputError, match="choose 'bounded' or 'exact'"):
        session.crop(3, "half")
    session.crop(9)
    assert torch.equal(session.decode(3), twin.decode(3))
    session.crop(0)
    assert session.length == 0 and session.ids == []
    ids = text(model, 11, seed=3)
    must_be_close("logits", session_of(model, []).prefill(ids), session.prefill(ids))


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


# ---------------------------------------------------------------------------- CED prefill
@pytest.mark.parametrize("cut", ["inside", "after"])
@pytest.mark.parametrize("halo", ["window", "exact"])
def test_a_chunked_ced_prefill_is_the_unchunked_one(halo, cut):
    model = nano()
    W = model.config.sliding_window
    after = text(model, W + 1, seed=7)
    for before, length in ((0, 8), (0, 9), (13, 38)):
        ids = text(model, before + length, seed=length)
        whole = session_of(model, ids[:before])
        expected = whole.prefill(ids[before:], mode="ced", halo=halo, cut=cut)
        afterwards = read_on(whole.fork(), after)
        for chunk in (1, 3, W - 1, W, W + 1, 1000):
            parts = session_of(model, ids[:before])
            found = parts.prefill(ids[before:], mode="ced", halo=halo, cut=cut, chunk=chunk)
            last = min(expected.shape[1], found.shape[1])
            must_be_close(f"tail, chunk {chunk}", expected[:, -last:], found[:, -last:])
            assert found.shape == expected.shape
            same_state(whole.cache, parts.cache)
            must_be_close(f"after, chunk {chunk}", afterwards, read_on(parts, after))


@pytest.mark.parametrize("cut", ["inside", "after"])
def test_an_exact_halo_is_the_full_prefill_and_the_window_is_not(cut):
    model = nano()
    W, ids, after = model.config.sliding_window, text(model, 61), text(model, 20, seed=1)
    runs = {}
    for mode, halo in (("full", "window"), ("ced", "exact"), ("ced", "window")):
        session = Session(model)
        logits = session.prefill(ids, mode=mode, halo=halo, cut=cut)
        runs[mode, halo] = logits, read_on(session, after), session
    full, exact, window = runs.values()
    assert exact[0].shape[1] == reach(model.config, 4 - (cut == "after")) < 61
    assert window[0].shape[1] == W
    # The windows are exact in all W places, and so is what the last of these tokens gives.
    must_be_close("the last logits", full[0][:, -1:], exact[0][:, -1:])
    must_be_close("all decode steps", full[1], exact[1])
    same_state(full[2].cache, exact[2].cache)
    off = [float((full[i][:, -n:] - window[i][:, -n:]).abs().max() / full[i].abs().max())
           for i, n in ((0, 1), (0, W), (1, 20))]
    print(f"window halo, cut {cut}: last, tail, decode steps off by {off} of the span")
    assert min(off) > 1e-4


def test_one_token_less_than_the_exact_halo_is_not_exact():
    model = nano()
    ids = torch.tensor([text(model, 61)])
    size = reach(model.config, 4)
    rings = []
    with torch.no_grad():
        for tail in (None, size, size - 1):
            cache = model.new_cache()
            model(ids, cache=cache, tail=tail)
            rings.append(window_in_order(cache, 9)[1])
    must_be_close("the last layer's window", rings[0], rings[1])
    assert close("the last layer's window", rings[0], rings[2], FP64) is not None


# ---------------------------------------------------------------------------- interrupts
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
