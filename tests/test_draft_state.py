"""The draft's windows are part of the state: kept, restored, replayed, cut and lost with the rest.

A draft is only as good as the features that its windows hold. So beside the state itself, what is
compared here is what the draft says from it.
"""

from __future__ import annotations

import pytest
import torch
from draft_state_helpers import (
    close_drafts,
    drafted,
    drafting,
    each,
    features,
    off,
    rounding,
    same_drafts,
    speculate,
    variation,
)
from reuse_helpers import Interrupt, cut_short, must_be_close, read_on, same_state, session_of, text
from test_ced_prefill import tail_of_a_full_pass
from test_replay import replayed_another_way

from labkit.cache.blocks import fill, full_blocks, window_state
from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.replay import reach, replay_start
from labkit.engine.session import Session
from labkit.errors import InputError
from labkit.model.transformer import Transformer
from labkit.mutants.rules import FP64, close

PAGE = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(cache, ids):
    session = Session(cache.model, cache.form, cache.page_tokens, draft=cache.draft)
    session.prefill(ids)
    cache.keep(session)
    return session


# ---------------------------------------------------------------------------- full hits
@pytest.mark.parametrize("form", ["plain", "packed", "fp8", "bf16"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 12, 29])
def test_a_full_hit_restores_the_draft_s_windows_bit_for_bit(form, length):
    """In float64 without rounding (plain) and in all forms of the store."""
    model = drafting() if form == "plain" else rounding()
    ids, new = text(model, length), text(model, 2, seed=2)         # less than a window
    cache = PrefixCache(model, page_tokens=PAGE, form=form)
    kept(cache, ids)
    cold = Session(model, form, PAGE)
    cold.prefill(ids)
    expected = cold.prefill(new)
    for _ in range(2):  # the state that was lent is as it was
        hit, logits, found = cache.prefill(ids + new, last_only=False)
        assert (found.kind, found.known) == ("full", length)
        assert torch.equal(logits, expected)
        for a, b in zip(cold.cache.rings, hit.cache.rings, strict=True):
            assert torch.equal(a.rows, b.rows) and torch.equal(a.first, b.first)
        same_drafts(cold, hit)
        branch = cold.fork()
        assert speculate(branch) == speculate(hit)
        same_drafts(branch, hit)


def test_a_full_hit_drafts_what_one_pass_over_the_text_drafts():
    model = drafting()
    ids = text(model, 40)
    cache = PrefixCache(model, page_tokens=PAGE)
    kept(cache, ids[:31])
    hit, _, found = cache.prefill(ids)
    assert found.kind == "full"
    alone = session_of(model, ids)
    same_state(alone.cache, hit.cache)
    close_drafts(alone, hit)


# ---------------------------------------------------------------------------- global-only hits
@pytest.mark.parametrize("replay", ["bounded", "exact"])
@pytest.mark.parametrize("length", [5, 8, 9, 16, 23, 24, 27, 28, 33, 40])
def test_a_global_only_hit_refills_the_draft_s_windows(length, replay, monkeypatch):
    """The texts part at `length`: what is known before it has lost its windows. W features are
    there again at once; bounded, they are those of a pass with cut windows."""
    model = drafting()
    W, ids = model.config.sliding_window, text(model, 44)
    cache = PrefixCache(model, page_tokens=PAGE, replay=replay)
    kept(cache, ids)
    other = [*ids[:length], (ids[length] + 1) % model.config.vocab_size]
    hit, _, found = cache.prefill(other)
    alone = session_of(model, other)
    start = replay_start(model.config, length, replay)
    if not start:  # no more is known than would be read again
        assert found.kind == "cold"
        close_drafts(alone, hit)
        return
    assert (found.kind, found.known, found.replayed) == ("global-only", length, length - start)
    assert features(hit) == features(alone) == [W, W]
    assert all(int(ring.first) == start for ring in hit.cache.draft_windows)
    if replay == "exact":
        close_drafts(alone, hit)
        return
    by_hand = replayed_another_way(model, ids[:length], start, monkeypatch)
    by_hand.prefill(other[length:])
    same_state(by_hand.cache, hit.cache)
    close_drafts(by_hand, hit)
    assert off(alone, hit) > 1e-6


def test_windows_that_expired_are_refilled_and_those_that_did_not_are_exact():
    model = drafting()
    ids = text(model, 32)
    alone = session_of(model, [*ids, 3])
    seen = {}
    for replay in ("bounded", "exact"):
        clock = Clock()
        cache = PrefixCache(model, page_tokens=PAGE, replay=replay, clock=clock)
        kept(cache, ids)
        for wait, kind in ((299.0, "full"), (301.0, "global-only")):
            clock.now += wait
            hit, _, found = cache.prefill([*ids, 3])
            assert found.kind == kind and features(hit) == [4, 4]
            seen[replay, kind] = off(alone, hit)
    print(f"drafts after a hit against cold ones, of the span: {seen}")
    assert seen.pop(("bounded", "global-only")) > 1e-6 > 1e-9 > max(seen.values())


def test_features_from_a_cut_window_are_worth_more_than_none():
    """Why a draft is good again at once: its window is full, if of features from less context.
    Mean over texts, against the cold session's draft."""
    model, again, empty = drafting(16), [], []
    for seed in range(12):
        ids = text(model, 100, seed)
        alone, cropped = session_of(model, ids), session_of(model, ids + [1, 2, 3])
        cropped.crop(100)
        without = alone.fork()
        for ring in without.cache.draft_windows:
            ring.first = without.cache.lengths
        assert features(cropped) == [16, 16] and features(without) == [0, 0]
        again.append(variation(alone, cropped))
        empty.append(variation(alone, without))
    means = [sum(x) / len(x) for x in (again, empty)]
    print(f"total variation from the cold draft: bounded replay {means[0]:.4f}, "
          f"no features {means[1]:.4f}")
    assert 0 < means[0] < 0.75 * means[1]


# ---------------------------------------------------------------------------- crop, snapshot, fork
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9, 16, 23, 24, 31])
def test_crops(length, monkeypatch):
    model = drafting()
    ids, after = text(model, 36), text(model, 6, seed=3)
    source = session_of(model, ids)
    alone = session_of(model, ids[:length])
    for replay in ("bounded", "exact"):
        session = source.fork()
        session.crop(length, replay)
        assert features(session) == [min(4, length)] * 2
        if replay == "exact" or length <= 4:
            close_drafts(alone, session)
            twin = alone.fork()
            must_be_close("logits", read_on(twin, after), read_on(session, after))
            close_drafts(twin, session)
        else:
            start = replay_start(model.config, length)
            by_hand = replayed_another_way(model, ids[:length], start, monkeypatch)
            same_state(by_hand.cache, session.cache)
            close_drafts(by_hand, session)
            assert off(alone, session) > 1e-6
    same_state(session_of(model, ids).cache, source.cache)
    session = source.fork()
    session.crop(0)
    assert features(session) == [0, 0] and len(session.cache.draft_windows) == 2


def test_snapshots_bring_the_draft_back_as_often_as_wanted():
    model = drafting()
    session = session_of(model, text(model, 14))
    saved, before = session.snapshot(), drafted(session)
    expected = speculate(session.fork())
    for seed in (2, 3):
        session.prefill(text(model, 9, seed))
        speculate(session, seed=seed)
        session.restore(saved)
        assert all(torch.equal(a, b) for _, a, b in each(before, drafted(session)))
        assert speculate(session) == expected
        session.restore(saved)


def test_branches_draft_apart():
    model = drafting()
    ids, ways = text(model, 13), [text(model, 9, seed) for seed in (5, 6)]
    one = session_of(model, ids)
    two = one.fork()
    for step in range(9):
        for session, way in zip((one, two), ways, strict=True):
            session.decode(way[step])
    for session, way in zip((one, two), ways, strict=True):
        alone = session_of(model, ids)
        read_on(alone, way)
        same_drafts(alone, session)
    assert off(one, two) > 1e-3


# ---------------------------------------------------------------------------- CED prefill
@pytest.mark.parametrize("cut", ["inside", "after"])
@pytest.mark.parametrize("length", [5, 13, 28])
def test_after_a_cut_prefill_the_draft_reads_the_tail_s_features(length, cut, monkeypatch):
    """W features of a pass whose decoder never saw what lies before the cut."""
    model = drafting()
    W = model.config.sliding_window
    ids, after = (torch.tensor([text(model, n, seed=n)]) for n in (length, 1))
    _, by_hand = tail_of_a_full_pass(model, ids, after, monkeypatch, cut)
    expected = Session(model)
    expected.cache = by_hand
    full, ced = session_of(model, ids[0].tolist()), Session(model)
    ced.prefill(ids, mode="ced", cut=cut)
    assert features(ced) == [W, W]
    assert all(int(ring.first) == length - W for ring in ced.cache.draft_windows)
    full.prefill(after)
    ced.prefill(after)
    assert features(ced) == features(expected) == [W, W]
    close_drafts(expected, ced)
    assert off(full, ced) > 1e-6
    exact = Session(model)
    exact.prefill(ids, mode="ced", cut=cut, halo="exact")
    assert features(exact) == [W, W]
    exact.prefill(after)
    close_drafts(full, exact)
    # Three decoder layers: in an exact halo all features are kept as far as they are read.
    assert all(int(r.first) == max(0, length - reach(model.config, 3 - (cut == "after")))
               for r in exact.cache.draft_windows)


@pytest.mark.parametrize("cut", ["inside", "after"])
@pytest.mark.parametrize("halo", ["window", "exact"])
def test_a_chunked_cut_prefill_leaves_the_same_draft(halo, cut):
    model = drafting()
    for before, length in ((0, 4), (0, 9), (13, 30)):
        ids = text(model, before + length, seed=length)
        whole = session_of(model, ids[:before])
        whole.prefill(ids[before:], mode="ced", halo=halo, cut=cut)
        for chunk in (1, 3, 4, 5, 1000):
            parts = session_of(model, ids[:before])
            parts.prefill(ids[before:], mode="ced", halo=halo, cut=cut, chunk=chunk)
            same_state(whole.cache, parts.cache)
            close_drafts(whole, parts)


@pytest.mark.parametrize("cut", ["inside", "after"])
def test_a_prefill_that_stops_before_its_last_part_leaves_no_features(cut):
    """Ctrl-C between two parts of a cut prefill: the decoder has seen none of the first."""
    model = drafting()
    session = session_of(model, text(model, 13))
    assert features(session) == [4, 4]
    parts = []

    def once(*args):
        parts.append(args)
        if len(parts) == 2:
            raise KeyboardInterrupt

    handle = model.register_forward_pre_hook(once)
    try:
        cut_short(lambda: session.prefill(text(model, 20, 1), mode="ced", cut=cut, chunk=6))
    finally:
        handle.remove()
    assert session.length == 19 and features(session) == [0, 0]
    for n, known in ((1, 1), (2, 3), (1, 4), (5, 4)):
        session.prefill(text(model, n, seed=n))
        assert features(session) == [known, known]
    assert torch.isfinite(drafted(session).base_logits).all()


# ---------------------------------------------------------------------------- interrupts
@pytest.mark.parametrize("module", ["mtp.0.main_proj", "mtp.0.attn.wkv", "mtp.1.attn.wkv"])
def test_ctrl_c_while_features_are_taken_in_changes_nothing(module):
    model = drafting()
    ids = text(model, 13)
    session, twin = session_of(model, ids), session_of(model, ids)
    for new in (text(model, 9, seed=5), [7]):
        place = model.get_submodule(module)
        handle = place.register_forward_hook(Interrupt(None, False))
        try:
            cut_short(lambda n=new: session.prefill(n))
        finally:
            handle.remove()
        assert session.ids == ids
        same_drafts(twin, session)
    assert speculate(session) == speculate(twin)
    same_drafts(twin, session)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_ctrl_c_inside_the_commit_of_a_draft_s_window_is_made_good(late, monkeypatch):
    model = drafting()
    ids = text(model, 13)
    for stage in range(2):
        for new in (text(model, 9, seed=5), [7]):
            session = session_of(model, ids)
            ring = session.cache.draft_windows[stage]
            with monkeypatch.context() as patch:
                patch.setattr(ring, "commit", Interrupt(ring.commit, late))
                cut_short(lambda s=session, n=new: s.prefill(n))
            twin = session_of(model, ids)
            twin.prefill(new)
            same_drafts(twin, session)


# ---------------------------------------------------------------------------- with and without
def test_a_prefix_cache_and_its_sessions_have_a_draft_or_have_none():
    model = drafting()
    ids = text(model, 20)
    for draft in (True, False):
        cache = PrefixCache(model, page_tokens=PAGE, draft=draft)
        other = Session(model, page_tokens=PAGE, draft=not draft)
        other.prefill(ids)
        with pytest.raises(InputError, match=f"make both with draft={draft}"):
            cache.keep(other)
        assert cache.nbytes()["windows"] == cache.nbytes()["device"] == 0  # nothing was kept
        kept(cache, ids)
        hit, logits, found = cache.prefill([*ids, 3])
        assert found.kind == "full" and bool(hit.cache.draft_windows) == draft
        must_be_close("logits", session_of(model, ids).prefill([3]), logits)
    assert PrefixCache(model).draft
    bare = Transformer(model.config, model.engram_classes, draft=False)
    assert not PrefixCache(bare).draft


def test_states_with_and_without_a_draft_do_not_mix():
    model = drafting()
    ids = text(model, 10)
    sessions = [Session(model, page_tokens=PAGE, draft=draft) for draft in (True, False)]
    for session in sessions:
        session.prefill(ids)
    for one, two in (sessions, sessions[::-1]):
        with pytest.raises(InputError, match="windows of the draft, the cache"):
            fill(two.cache.empty(), ids, full_blocks(one.cache), window_state(one.cache))
        with pytest.raises(InputError, match="make the session with draft="):
            one.restore(two.snapshot())
        assert one.ids == ids
    with_, without = (window_state(s.cache).nbytes for s in sessions)
    assert with_ - without == sessions[0].nbytes()["draft"] > 0
    assert close("logits", *(s.decode(3) for s in sessions), FP64) is None


def test_pages_do_not_depend_on_the_draft():
    """A folder that was written with the draft's windows serves without them, and back."""
    model = drafting()
    digests = {PrefixCache(model, page_tokens=PAGE, draft=draft).digest for draft in (True, False)}
    assert len(digests) == 1
