"""Crops and cut prefills: what is read again, and what comes out of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reuse_helpers import (
    global_rows,
    must_be_close,
    nano,
    read_on,
    same_state,
    session_of,
    small,
    text,
    untouched,
    window_in_order,
)

from labkit.cache import Cache, GlobalStore
from labkit.config import ModelConfig
from labkit.engine.replay import decoder_tail, reach, replay_start
from labkit.engine.session import Session
from labkit.errors import InputError
from labkit.model.attention import Attention
from labkit.mutants.rules import FP64, close


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
    for ring in found.cache.rings:
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


# ---------------------------------------------------------------------------- reach, refusals
@pytest.fixture(scope="module")
def model():
    return small()


@pytest.fixture(scope="module")
def ids(model):
    return torch.tensor([text(model, 48)])


def test_how_far_layers_reach_at_the_released_sizes():
    config = ModelConfig.preset("flash")
    assert decoder_tail(config) == 128
    assert decoder_tail(config, "exact") == 2541 == 128 + 19 * 127
    assert decoder_tail(config, "exact", "after") == 2414
    assert reach(config, 40) == 5081
    assert [replay_start(config, n) for n in (0, 127, 128, 129, 255, 257)] == [0, 0, 0, 1, 127, 129]
    assert replay_start(config, 6000, "exact") == 919


def test_the_cut_after_the_source_reads_that_layer_whole(model, ids):
    inside, after = (Session(model).prefill(ids, True, "ced", cut=cut)
                     for cut in ("inside", "after"))
    assert not torch.allclose(inside, after)


def test_bad_input_is_refused_and_changes_nothing(model, ids):
    session = Session(model)
    session.prefill(ids[:, :20])
    for call, says in (
            (lambda: session.crop(21), "holds 20"), (lambda: session.crop(-1), "at least 0"),
            (lambda: session.crop(5, "half"), "bounded"),
            (lambda: session.prefill(ids, mode="ced", halo="half"), "'window' or 'exact'"),
            (lambda: session.prefill(ids, mode="ced", cut="before"), "'inside' or 'after'"),
            (lambda: session.prefill(ids, chunk=0), "at least 1"),
            (lambda: session.cache.rewind(torch.tensor([19])), "kept nothing"),
            (lambda: model(ids, cache=session.cache, tail=4, keep=True), "leave out tail"),
            (lambda: model(ids, cache=session.cache, tail=-1), "0 or more"),
    ):
        with pytest.raises(InputError, match=says):
            call()
        assert session.length == 20
    with torch.no_grad():
        model(ids[:, 20:24], cache=session.cache, keep=True)
    with pytest.raises(InputError, match="from .20. to .24."):
        session.cache.rewind(torch.tensor([19]))
    session.crop(0)
    assert session.length == 0 and session.nbytes()["global_kv"] == 0
    assert close("logits", model(ids[:, :9]).logits, session.prefill(ids[:, :9]), FP64) is None
