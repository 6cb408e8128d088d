"""Sequences join a batch and leave it: each reads on as if it had always been alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reuse_helpers import Interrupt, cut_short, must_be_close, same_state, small, text

from labkit.cache import Cache
from labkit.cache.rows import gather, join, select
from labkit.cache.store import GlobalStore
from labkit.errors import InputError
from labkit.mutants import golden, rules
from labkit.mutants.models import random_ids, random_model, small_config
from labkit.mutants.properties_reuse import later
from labkit.mutants.schedules import in_ragged_chunks, one_pass
from labkit.numerics.rows import FORMS

PAGE = 4


@torch.no_grad()
def filled(model, texts, form=None, **options):
    """A cache whose rows hold these texts, of any lengths."""
    cache = model.new_cache(len(texts), form, PAGE)
    width = max(map(len, texts))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in texts])
    model(ids, torch.tensor([len(row) for row in texts]), cache=cache, **options)
    return cache


@torch.no_grad()
def read(model, cache, new, **options):
    """The pass that takes in the lists `new`, one a row -> live logits [n,V] of each row."""
    width = max(map(len, new))
    ids = torch.tensor([row + [1] * (width - len(row)) for row in new])
    logits = model(ids, torch.tensor([len(row) for row in new]), cache=cache, **options).logits
    return [logits[b, : len(row)] for b, row in enumerate(new)]


def alone(model, ids):
    return filled(model, [ids])


@torch.no_grad()
def must_read_as(model, cache, texts, new):
    """Row b holds texts[b]; after the lists `new` it gives what one pass over all would give."""
    for b, (row, found) in enumerate(zip(texts, read(model, cache, new), strict=True)):
        whole = model(torch.tensor([row + new[b]])).logits[0, len(row):]
        must_be_close(f"row {b}", whole, found)


def bits(cache: Cache, b: int):
    """What row b holds, as stored."""
    recent = [getattr(part, name)[b] for part in cache._recent() for name in part.per_sequence]
    pages = [part[: store.counts[b] - PAGE // ratio * n]
             for layer, store in cache.stores.items()
             for ratio in (cache.config.compress_ratios[layer],)
             for n, page in enumerate(store.pages[b]) for part in (page.kv, page.keys)]
    return recent + pages, cache.tokens[b], int(cache.lengths[b])


def same_bits(one, other):
    return one[1:] == other[1:] and all(map(torch.equal, one[0], other[0]))


# ---------------------------------------------------------------------------- reading on
@st.composite
def batches(draw):
    """Texts grouped into caches, ragged passes, rows that stay, ragged passes of those."""
    groups = draw(st.lists(st.lists(st.integers(1, 19), min_size=1, max_size=2),
                           min_size=1, max_size=3))
    rows = sum(map(len, groups))

    def passes(n):
        return draw(st.lists(st.lists(st.integers(1, 6), min_size=n, max_size=n),
                             min_size=1, max_size=2))

    first = passes(rows)
    stay = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    return groups, first, stay, passes(len(stay))


def told(numbers, seed):
    """A text of so many ids, another for each seed."""
    return text(small(), numbers, seed)


def more(counts, seed):
    """Passes of ragged counts as lists of new ids: of pass p, row b."""
    return [[told(n, 100 * seed + 10 * p + b) for b, n in enumerate(row)]
            for p, row in enumerate(counts)]


@given(batches())
def test_joined_rows_read_on_as_if_alone_and_so_do_those_that_stay(batch):
    groups, first, stay, second = batch
    model, number = small(), iter(range(100))
    texts = [[told(n, next(number)) for n in group] for group in groups]
    sources = [filled(model, group) for group in texts]
    rows = [row for group in texts for row in group]
    cache = join(sources)
    assert cache.batch == len(rows) and cache.tokens == rows
    held = list(rows)
    for new in more(first, 1):
        must_read_as(model, cache, held, new)
        held = [row + n for row, n in zip(held, new, strict=True)]
    left = select(cache, stay)
    after = [held[row] for row in stay]
    for new in more(second, 2):
        must_read_as(model, left, after, new)
        after = [row + n for row, n in zip(after, new, strict=True)]
    # Nobody feels what became of the others.
    for b, row in enumerate(after):
        same_state(alone(model, row), left, [(0, b)])
    for b, row in enumerate(held):
        same_state(alone(model, row), cache, [(0, b)])
    for group, source in zip(texts, sources, strict=True):
        for b, row in enumerate(group):
            same_state(alone(model, row), source, [(0, b)])
        must_read_as(model, source, group, more([[3] * len(group)], 3)[0])


@given(st.lists(st.integers(1, 17), min_size=2, max_size=4), st.data())
def test_every_tensor_and_selection_of_joined_rows_is_that_of_one_pass(lengths, data):
    model = small()
    counts = data.draw(st.lists(st.lists(st.integers(1, 5), min_size=len(lengths),
                                         max_size=len(lengths)), min_size=1, max_size=2))
    totals = [n + sum(c[b] for c in counts) for b, n in enumerate(lengths)]
    texts = [told(n, seed) for seed, n in enumerate(totals)]
    cache = join([filled(model, [row[:n]]) for row, n in zip(texts, lengths, strict=True)])
    width = max(t - n for t, n in zip(totals, lengths, strict=True))
    new = torch.tensor([row[n:] + [0] * (width - len(row) + n)
                        for row, n in zip(texts, lengths, strict=True)])
    for row, n, found in zip(texts, lengths, in_ragged_chunks(model, new, counts, cache),
                             strict=True):
        expected = later(one_pass(model, torch.tensor([row])), n)
        assert any(name.endswith("topk_indices") for name in found)
        wrong = rules.same_run(expected, found, rules.FP64)
        assert wrong is None, wrong


@pytest.mark.parametrize("form", FORMS)
def test_rows_keep_their_bits_in_every_form(form):
    model = random_model(small_config(), dtype=torch.float32, cache_rounding=True)
    texts = [[told(n, n) for n in group] for group in ((3, 18), (9,), (1,))]
    sources = [filled(model, group, form) for group in texts]
    own = [bits(source, b) for source in sources for b in range(source.batch)]
    cache = join(sources)
    assert all(same_bits(own[b], bits(cache, b)) for b in range(4))
    left = select(cache, [2, 0, 2])
    assert all(same_bits(own[b], bits(left, at)) for at, b in enumerate((2, 0, 2)))
    assert not same_bits(own[1], bits(left, 0))
    both = gather([left, sources[0]], [4, 0, 1])
    assert all(same_bits(own[b], bits(both, at)) for at, b in enumerate((1, 2, 0)))
    # Read on together: what fp32 noise may do to rounded values, and no more.
    new = [told(5, 7), told(2, 8), told(4, 9)]
    for b, found in zip((1, 2, 0), read(model, both, new), strict=True):
        one = select(cache, [b])
        (expected,) = read(model, one, [new[(1, 2, 0).index(b)]])
        wrong = rules.mostly("logits", expected, found)
        assert wrong is None, wrong
    assert all(same_bits(own[b], bits(cache, b)) for b in range(4))


def test_a_row_that_was_entered_in_the_middle_keeps_its_beginning():
    """A cut prefill leaves windows that begin late, beside rows that have all of theirs."""
    model, W = small(), small().config.sliding_window
    ids, other, new = told(23, 1), told(9, 2), [told(3, 3), told(5, 4)]
    cut = filled(model, [ids], tail=W)
    assert int(cut.windows[-1].first[0]) == len(ids) - W
    cache = join([filled(model, [other]), cut])
    assert [ring.first.tolist() for ring in cache.windows][-1] == [0, len(ids) - W]
    found = read(model, cache, new)
    for b, source in enumerate((filled(model, [other]), filled(model, [ids], tail=W))):
        must_be_close(f"row {b}", read(model, source, [new[b]])[0], found[b])
        same_state(source, select(cache, [b]))


def test_rows_that_joined_draft_as_if_alone():
    """The draft's windows come and go with the rest; they are of features, one ring a stage."""
    model = golden.in_float64(golden.model("text"))
    ids = golden.case("text").ids
    texts = [ids[0, :5].tolist(), ids[1, :20].tolist(), ids[0, 7:16].tolist()]
    cache = join([filled(model, texts[:2]), filled(model, texts[2:])])
    read(model, cache, [[3], [4, 5, 6], [7, 8]], keep=True)
    cache.rewind(torch.tensor([6, 21, 10]))
    left = select(cache, [2, 0])
    anchors = torch.tensor([9, 11])

    @torch.no_grad()
    def block(cache, rows):
        windows = [ring.read(cache.lengths) for ring in cache.draft_windows]
        assert len(windows) == 3
        return model.draft(anchors[rows], cache.lengths, windows, 5).base_logits

    found = block(left, slice(None))
    for at, (row, new) in enumerate(((texts[2], 7), (texts[0], 3))):
        must_be_close("draft", block(alone(model, [*row, new]), slice(at, at + 1))[0], found[at])


# ---------------------------------------------------------------------------- going back
@given(st.lists(st.tuples(st.integers(1, 13), st.integers(1, 6), st.integers(0, 6)),
                min_size=1, max_size=4))
def test_a_ragged_pass_of_joined_rows_is_rewound(rows):
    """(past, read, kept): each row by its own number, then they part."""
    model = small()
    texts = [told(n, seed) for seed, (n, _, _) in enumerate(rows)]
    new = [told(n, 50 + seed) for seed, (_, n, _) in enumerate(rows)]
    kept = [row[: min(k, len(row))] for row, (_, _, k) in zip(new, rows, strict=True)]
    cache = join([filled(model, [row]) for row in texts])
    read(model, cache, new, keep=True)
    cache.rewind(torch.tensor([len(t) + len(k) for t, k in zip(texts, kept, strict=True)]))
    held = [t + k for t, k in zip(texts, kept, strict=True)]
    for b in reversed(range(len(rows))):
        one = select(cache, [b])
        same_state(alone(model, held[b]), one)
        must_read_as(model, one, [held[b]], [told(7, 60 + b)])
    must_read_as(model, cache, held, [told(4, 70 + b) for b in range(len(rows))])


@pytest.mark.parametrize("kept", range(6))
def test_a_source_can_still_be_rewound_and_the_other_cannot(kept):
    """Also within a page that both hold: what the source then writes is not the other's."""
    model = small()
    texts, new = [told(6, 1), told(11, 2)], [told(5, 3), told(5, 4)]
    cache = filled(model, texts)
    read(model, cache, new, keep=True)
    twin = select(cache, [1, 0])
    with pytest.raises(InputError, match="keep=True"):
        twin.rewind(twin.lengths - 1)
    cache.rewind(torch.tensor([6 + kept, 11 + kept]))
    must_read_as(model, cache, [t + n[:kept] for t, n in zip(texts, new, strict=True)],
                 [told(9, 5), told(9, 6)])
    must_read_as(model, twin, [texts[1] + new[1], texts[0] + new[0]], [told(9, 7), told(9, 8)])


# ---------------------------------------------------------------------------- interrupts
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_ctrl_c_while_rows_join_leaves_the_sources_as_they_were(late, monkeypatch):
    model = small()
    texts = [told(5, 1), told(14, 2)]
    sources = [filled(model, [row]) for row in texts]
    kinds = {type(part) for part in (*sources[0]._recent(), *sources[0].stores.values())}
    assert len(kinds) == 4
    for kind in kinds:
        with monkeypatch.context() as patch:
            patch.setattr(kind, "gathered", Interrupt(kind.gathered, late))
            cut_short(lambda: join(sources))
    cache = join(sources)
    must_read_as(model, cache, texts, [told(9, 3), told(2, 4)])
    for row, source in zip(texts, sources, strict=True):
        same_state(alone(model, row), source)
        must_read_as(model, source, [row], [told(6, 5)])


@pytest.mark.parametrize("layer", range(7))
def test_ctrl_c_in_a_pass_of_joined_rows_changes_no_row(layer, monkeypatch):
    model = small()
    texts = [told(5, 1), told(14, 2), told(3, 3)]
    cache = join([filled(model, texts[:2]), filled(model, texts[2:])])
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[layer].attn, "forward",
                      Interrupt(model.layers[layer].attn.forward, True))
        cut_short(lambda: read(model, cache, [told(9, 4), told(1, 5), told(6, 6)]))
    for b, row in enumerate(texts):
        same_state(alone(model, row), cache, [(0, b)])
        same_state(alone(model, row), select(cache, [b]))
    must_read_as(model, cache, texts, [told(2, 7), told(8, 8), told(1, 9)])


def test_a_commit_that_was_cut_short_is_finished_before_rows_join(monkeypatch):
    model, ids, new = small(), told(6, 1), told(3, 2)
    source = filled(model, [ids])
    store = source.stores[4]
    with monkeypatch.context() as patch:
        patch.setattr(store, "commit", Interrupt(store.commit, False))
        cut_short(lambda: read(model, source, [new]))
    cache = join([filled(model, [told(2, 3)]), source])
    assert cache.tokens[1] == ids + new
    same_state(alone(model, ids + new), cache, [(0, 1)])


# ---------------------------------------------------------------------------- memory
def places(store: GlobalStore, b: int):
    return [page.kv.data_ptr() for page in store.pages[b]]


def test_pages_are_shared_and_only_a_last_page_is_copied_once():
    model = small()
    texts = [told(13, 1), told(6, 2)]
    sources = [filled(model, [row]) for row in texts]
    cache = join(sources)
    for layer, store in cache.stores.items():
        for b, source in enumerate(sources):
            assert places(store, b) == places(source.stores[layer], 0)
    steps = [[[1], [2]], [[3], [4]], [[5], [6]]]
    for number, new in enumerate(steps):
        before = {layer: [places(s, b) for b in (0, 1)] for layer, s in cache.stores.items()}
        read(model, cache, new)
        for layer, store in cache.stores.items():
            ratio = model.config.compress_ratios[layer]
            for b in (0, 1):
                now, length = places(store, b), len(texts[b]) + number
                full = length // ratio // store.page_entries
                assert now[:full] == before[layer][b][:full]
                partial = length // ratio % store.page_entries > 0
                own = now[full:][:1] != places(sources[b].stores[layer], 0)[full:][:1]
                # From the row's first write on, the page that was shared is its own.
                written = (length + 1) // ratio > len(texts[b]) // ratio
                if partial and len(texts[b]) // ratio // store.page_entries == full:
                    assert own == written, (layer, b, number)


def test_recent_rows_take_as_many_bytes_as_there_are_rows():
    model = small()
    caches = [filled(model, [told(n, n)]) for n in (3, 17, 9)]
    one, three = caches[0].nbytes(), join(caches).nbytes()
    for part in ("window", "remainder", "engram"):
        assert three[part] == 3 * one[part] > 0
    assert select(join(caches), [1]).nbytes()["window"] == one["window"]


# ---------------------------------------------------------------------------- bad input
def test_what_cannot_become_one_cache_is_refused():
    model = small()
    one = model.new_cache()
    rounded = random_model(small_config(), dtype=torch.float32, cache_rounding=True)
    for first, other, field in (
            (one, random_model(small_config(hc_mult=2)).new_cache(), "config"),
            (one, random_model(small_config(), dtype=torch.float32).new_cache(), "dtype"),
            (one, model.new_cache(page_tokens=PAGE), "page_tokens"),
            (rounded.new_cache(form="bf16"), rounded.new_cache(), "form"),
            (rounded.new_cache(form="plain"), random_model(
                small_config(), dtype=torch.float32).new_cache(), "rounding"),
            (one, model.new_cache(stale_index_keys=True), "stale_index_keys"),
            (golden.model("text").new_cache(), golden.model("text").new_cache(draft=False),
             "draft")):
        with pytest.raises(InputError, match=f"differ in {field}"):
            join([first, other])
    with pytest.raises(InputError, match="no cache"):
        join([])
    for rows, told_ in (([], "no row"), ([1], "no row 1: the rows are 0..0"), ([-1], "no row -1"),
                        ([0.0], "no row 0.0")):
        with pytest.raises(InputError, match=told_):
            select(one, rows)


def test_the_stale_slot_joins_only_where_it_holds_the_same_layer_s_keys():
    model = small()

    def cache(length):
        made = model.new_cache(page_tokens=PAGE, stale_index_keys=True)
        if length:
            with torch.no_grad():
                model(random_ids(model.config, length), cache=made)
        return made

    both = join([cache(8), cache(6)])
    assert both._slot is both.stores[4]
    with pytest.raises(InputError, match="stale slot"):
        join([cache(8), cache(0)])
