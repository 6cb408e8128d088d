"""What a replay gives: bounded by an independent way to the same logits, exact as never left."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from labkit.cache.store import GlobalStore
from labkit.config import ModelConfig
from labkit.engine.replay import decoder_tail, reach, replay_start
from labkit.engine.session import Session
from labkit.errors import InputError
from labkit.mutants.models import random_ids, random_model, small_config
from labkit.mutants.rules import FP64, close

PAGE = 4


@pytest.fixture(scope="module")
def model():
    return random_model(small_config())


@pytest.fixture(scope="module")
def ids(model):
    return random_ids(model.config, 48, 1, seed=6)


def bounded_by_masks(model, ids, known, start, monkeypatch):
    """One pass over all of ids in which queries from `start` on see no window key before it, and
    the entries of the first `known` tokens are those of an ordinary pass: logits from known on."""
    with torch.no_grad():
        ordinary = model.new_cache()
        model(ids[:, :known], cache=ordinary)
    stored = {layer: (store.values(), store.keys()) for layer, store in ordinary.stores.items()}
    kernels, append = model.kernels, GlobalStore.append

    def attend(q, window, entries, selected, sink, at):
        free = kernels.sparse_attention(q, window, entries, selected, sink, at)
        bound = kernels.sparse_attention(q, window, entries, selected, sink, at - start)
        return torch.where((torch.arange(q.shape[1]) >= start)[None, :, None, None], bound, free)

    cache = model.new_cache(page_tokens=200)
    layer_of = {id(store): layer for layer, store in cache.stores.items()}

    def append_and_put_back(self, kv, keys, first, complete):
        append(self, kv, keys, first, complete)
        old, old_keys = stored[layer_of[id(self)]]
        page = self.pages[0][0]
        page.kv[: old.shape[1]], page.keys[: old_keys.shape[1]] = old[0], old_keys[0]

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(GlobalStore, "append", append_and_put_back)
        patch.setattr(model, "kernels", SimpleNamespace(
            **{**vars(kernels), "sparse_attention": attend}))
        return model(ids, cache=cache).logits[:, known:]


@pytest.mark.parametrize("known", [5, 6, 7, 8, 9, 21, 22, 35, 40])
def test_bounded_replay_is_a_pass_with_a_lower_bound_for_window_keys(model, ids, known,
                                                                    monkeypatch):
    start = replay_start(model.config, known)
    assert start == known - model.config.sliding_window
    expected = bounded_by_masks(model, ids, known, start, monkeypatch)
    session = Session(model, page_tokens=PAGE)
    session.prefill(ids[:, : known + 3])
    session.crop(known)
    found = torch.cat([session.prefill(ids[:, known : known + 7]),
                       *(session.decode(i) for i in ids[0, known + 7 :])], dim=1)
    assert close("logits", expected, found, FP64) is None
    with torch.no_grad():  # and it is not what a full pass gives: the test can tell them apart
        assert close("logits", model(ids).logits[:, known:], found, FP64) is not None


@pytest.mark.parametrize("known", range(1, 48, 3))
def test_exact_replay_is_as_if_one_had_never_left(model, ids, known):
    session, alone = Session(model, page_tokens=PAGE), Session(model, page_tokens=PAGE)
    session.prefill(ids)
    alone.prefill(ids[:, :known])
    session.crop(known, "exact")
    assert session.ids == alone.ids
    for a, b in zip(session.cache.tails.values(), alone.cache.tails.values(), strict=True):
        assert known % a.ratio == 0 or close("remainder", b.rows, a.rows, FP64) is None
    assert torch.equal(session.cache.look_back.rows, alone.cache.look_back.rows)
    for layer, store in session.cache.stores.items():
        kept = alone.cache.stores[layer]
        assert store.counts == kept.counts
        assert close("entries", kept.values(), store.values(), FP64) is None
    rest = ids[:, known:] if known < 48 else ids[:, :1]
    assert close("logits", alone.prefill(rest), session.prefill(rest), FP64) is None


@pytest.mark.parametrize("cut", ["inside", "after"])
@pytest.mark.parametrize("chunk", [None, 1, 3, 4, 5, 30])
def test_an_exact_halo_gives_the_state_of_a_full_prefill(model, ids, cut, chunk):
    session, alone = Session(model), Session(model)
    full = alone.prefill(ids[:, :40], True)
    ced = session.prefill(ids[:, :40], True, "ced", halo="exact", cut=cut, chunk=chunk)
    assert close("last logits", full, ced, FP64) is None
    for i in ids[0, 40:]:
        assert close("decode", alone.decode(i), session.decode(i), FP64) is None
    near = Session(model).prefill(ids[:, :40], True, "ced", cut=cut, chunk=chunk)
    assert close("a window is not enough", full, near, FP64) is not None


@pytest.mark.parametrize("cut", ["inside", "after"])
def test_a_chunked_ced_prefill_equals_one_pass(model, ids, cut):
    whole = Session(model)
    expected = whole.prefill(ids[:, :40], True, "ced", cut=cut)
    after = [whole.decode(i) for i in ids[0, 40:]]
    for chunk in (1, 2, 3, 4, 5, 7, 36, 39, 40):
        session = Session(model)
        found = session.prefill(ids[:, :40], True, "ced", cut=cut, chunk=chunk)
        assert close(f"chunks of {chunk}", expected, found, FP64) is None
        for i, logits in zip(ids[0, 40:], after, strict=True):
            assert close("decode", logits, session.decode(i), FP64) is None


def test_the_cut_after_the_source_reads_that_layer_whole(model, ids):
    inside, after = (Session(model).prefill(ids, True, "ced", cut=cut)
                     for cut in ("inside", "after"))
    assert not torch.allclose(inside, after)


def test_how_far_layers_reach_at_the_released_sizes():
    config = ModelConfig.preset("flash")
    assert decoder_tail(config) == 128
    assert decoder_tail(config, "exact") == 2541 == 128 + 19 * 127
    assert decoder_tail(config, "exact", "after") == 2414
    assert reach(config, 40) == 5081
    assert [replay_start(config, n) for n in (0, 127, 128, 129, 255, 257)] == [0, 0, 0, 1, 127, 129]
    assert replay_start(config, 6000, "exact") == 919


def test_a_rewind_takes_back_any_number_of_tokens(model, ids):
    """From odd and even starts, across the ring: as if the rest had never been read."""
    for start in (1, 2, 3, 7, 10, 13):
        for left in range(7):
            session, alone = Session(model, page_tokens=2), Session(model, page_tokens=2)
            session.prefill(ids[:, :start])
            with torch.no_grad():
                model(ids[:, start : start + 6].flip(1), cache=session.cache, keep=True)
            session.cache.rewind(torch.tensor([start + left]))
            taken = ids[:, start : start + 6].flip(1)[:, :left]
            alone.prefill(torch.cat([ids[:, :start], taken], dim=1))
            assert session.ids == alone.ids
            for i in ids[0, 20:26]:
                assert close("logits", alone.decode(i), session.decode(i), FP64) is None


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
