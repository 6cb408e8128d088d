"""Prefix reuse: kinds of hit, their cost, what is lost when, and that nothing stops the service."""

from __future__ import annotations

import warnings

import pytest
import torch

from labkit.cache.blocks import WindowState
from labkit.engine.prefix_cache import PrefixCache, model_digest
from labkit.engine.session import Session
from labkit.errors import InputError, StoreError
from labkit.mutants.models import DRAFT, random_ids, random_model, small_config
from labkit.mutants.rules import FP64, close
from labkit.store import DiskStore

PAGE = 4


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def model():
    return random_model(small_config())


@pytest.fixture(scope="module")
def ids(model):
    return random_ids(model.config, 60, 1, seed=1)[0].tolist()


def kept(model, ids, cache, mode="full"):
    """Read ids in a session of its own and keep it."""
    session = Session(model, cache.form, cache.page_tokens)
    session.prefill(ids, mode=mode)
    cache.keep(session)
    return session


def same_as_alone(model, ids, logits):
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[:, -1:]
    return close("last logits", expected, logits[:, -1:], FP64)


# The window is 128 and a page holds 128 tokens, as released: hits around both.
WIDE = dict(sliding_window=128, num_hidden_layers=3, compress_ratios=(0, 2, 1),
            kv_source_layer_ids=(1, 2), index_source_layer_ids=(1, 2),
            candidate_source_layer_id=2, engram_layer_ids=(1,))


@pytest.mark.parametrize("length", [1, 126, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385])
def test_hits_at_every_edge_of_windows_and_pages(length):
    model = random_model(small_config(**WIDE))
    text = random_ids(model.config, length + 41, 1, seed=length)[0].tolist()
    clock = Clock()
    with torch.no_grad():
        whole = model(torch.tensor([text])).logits
    cache = PrefixCache(model, replay="exact", clock=clock, window_lifetime=60)
    kept(model, text[:length], cache)
    session, logits, hit = cache.prefill(text, last_only=False)
    assert (hit.kind, hit.known, hit.replayed, hit.computed) == ("full", length, 0, 41)
    assert close("logits behind a full hit", whole[:, length:], logits, FP64) is None
    clock.now += 61  # the windows are gone, the pages stay
    session, logits, hit = cache.prefill(text, last_only=False)
    pages = length // 128 * 128
    if pages <= 128:  # as little is read again as the window holds: nothing would be saved
        assert (hit.kind, hit.known, hit.computed) == ("cold", 0, len(text))
    else:
        # Three layers reach back 128 + 2 * 127 tokens, more than these prompts have.
        back = min(pages, 128 + 2 * 127)
        assert (hit.kind, hit.known) == (("cold", 0) if back == pages else ("global-only", pages))
    assert close("last logits", whole[:, -1:], logits[:, -1:], FP64) is None
    bounded = PrefixCache(model, clock=clock, window_lifetime=60)
    kept(model, text[:length], bounded)
    clock.now += 61
    _, logits, hit = bounded.prefill(text, last_only=False)
    if pages > 128:
        assert (hit.kind, hit.known, hit.replayed) == ("global-only", pages, 128)
        assert hit.computed == 128 + len(text) - pages
    else:
        assert hit.kind == "cold"


def test_a_page_serves_texts_that_part_inside_it(model, ids):
    cache = PrefixCache(model, page_tokens=PAGE, replay="exact")
    kept(model, ids[:40], cache)
    for parting in range(23, 40):  # 22 tokens back are read again
        other = ids[:parting] + [(ids[parting] + 1) % 64, 3, 9]
        session, logits, hit = cache.prefill(other)
        assert (hit.kind, hit.known) == ("global-only", parting)
        assert same_as_alone(model, other, logits) is None
        assert same_as_alone(model, [*other, 8], session.decode(8)) is None


def test_entries_of_a_hit_are_not_computed_again(model, ids):
    """Also where the replay starts inside a pair: they are the stored rows, bit for bit."""
    cache = PrefixCache(model, page_tokens=PAGE)
    first = kept(model, ids[:40], cache)
    for length in range(5, 40):
        session, _, hit = cache.prefill([*ids[:length], (ids[length] + 1) % 64])
        assert (hit.kind, hit.known, hit.replayed) == ("global-only", length, 4)
        for layer, store in session.cache.stores.items():
            n = length // model.config.compress_ratios[layer]
            stored = first.cache.stores[layer]
            assert torch.equal(store.values()[:, :n], stored.values()[:, :n])
            assert torch.equal(store.keys()[:, :n], stored.keys()[:, :n])


def test_a_lent_page_is_never_written_into(model, ids):
    """A page is full, kept, then taken back by a rewind and filled with something else."""
    cache = PrefixCache(model, page_tokens=PAGE, replay="exact")
    session = Session(model, page_tokens=PAGE)
    session.prefill(ids[:26])
    with torch.no_grad():
        model(torch.tensor([ids[26:32]]), cache=session.cache, keep=True)
    cache.keep(session)
    session.cache.rewind(torch.tensor([29]))
    session.prefill([(i + 1) % 64 for i in ids[29:34]])
    _, logits, hit = cache.prefill(ids[:32] + [4])
    assert hit.known == 32 and same_as_alone(model, ids[:32] + [4], logits) is None


def test_what_was_read_by_ced_serves_ced(model, ids):
    cache = PrefixCache(model, page_tokens=PAGE)
    kept(model, ids[:40], cache, mode="ced")
    session, logits, hit = cache.prefill(ids, mode="ced")
    alone = Session(model)
    alone.prefill(ids[:40], mode="ced")
    assert hit.kind == "full"
    assert close("logits", alone.prefill(ids[40:], True, "ced"), logits, FP64) is None


def test_windows_last_minutes_and_pages_days(model, ids):
    clock = Clock()
    cache = PrefixCache(model, page_tokens=PAGE, clock=clock)
    kept(model, ids[:40], cache)
    seen = []
    for wait in (299, 301, 71 * 3600, 73 * 3600):
        clock.now += wait
        seen.append(cache.prefill(ids)[2].kind)
    assert seen == ["full", "global-only", "global-only", "cold"]
    assert dict(cache.hits) == {"full": 1, "global-only": 2, "cold": 1}


def test_the_window_pool_is_a_tenth_of_the_stated_memory(model, ids):
    probe = PrefixCache(model, page_tokens=PAGE)
    kept(model, ids[:40], probe)
    size = probe.nbytes()["windows"]
    for memory, expected in ((10 * size, "full"), (10 * size - 10, "global-only")):
        cache = PrefixCache(model, page_tokens=PAGE, host_memory=memory)
        kept(model, ids[:40], cache)
        assert cache.prefill(ids)[2].kind == expected and cache.nbytes()["windows"] <= memory / 10
    cache = PrefixCache(model, page_tokens=PAGE, host_memory=10 * size)
    kept(model, ids[:40], cache)
    kept(model, ids[1:41], cache)  # the older state makes room
    assert cache.prefill(ids)[2].kind == "global-only"
    assert cache.prefill(ids[1:])[2].kind == "full"


def test_tiers_evict_the_least_recently_used_and_promote(model, ids):
    probe = PrefixCache(model, page_tokens=PAGE)
    kept(model, ids[:PAGE], probe)
    block = probe.nbytes()["device"]
    cache = PrefixCache(model, page_tokens=PAGE, replay="exact", device=4 * block, host=3 * block,
                        host_memory=0)
    kept(model, ids[:40], cache)  # ten blocks: four stay, three go to the host, three are lost
    assert cache.nbytes() == {"device": 4 * block, "host": 3 * block, "disk": 0, "windows": 0}
    assert cache.tiers.stats.lost == 3
    # The first blocks are the ones that are lost, and without them nothing can be used.
    assert cache.prefill(ids)[2].kind == "cold"
    cache = PrefixCache(model, page_tokens=PAGE, replay="exact", device=4 * block, host=6 * block,
                        host_memory=0)
    kept(model, ids[:40], cache)
    _, logits, hit = cache.prefill(ids)
    assert (hit.kind, hit.tiers) == ("global-only", {"host": 10}) or sum(hit.tiers.values()) == 10
    assert same_as_alone(model, ids, logits) is None


@pytest.mark.parametrize("device,host,disk", [(0, 0, False), (1, 1, True), (100, 1 << 20, False)])
def test_budgets_below_one_page_serve_all_the_same(model, ids, device, host, disk, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with PrefixCache(model, page_tokens=PAGE, replay="exact", device=device, host=host,
                         host_memory=0, disk=str(tmp_path) if disk else None,
                         disk_budget=10) as cache:
            kept(model, ids[:40], cache)
            _, logits, hit = cache.prefill(ids)
            assert same_as_alone(model, ids, logits) is None
            assert hit.kind == ("global-only" if host > 1000 else "cold")


# ------------------------------------------------------------------------------ disk
def test_a_new_process_finds_the_pages(model, ids, tmp_path):
    other = ids[:24] + [(i + 1) % 64 for i in ids[24:48]]
    with PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path), replay="exact") as cache:
        kept(model, ids[:40], cache)
        kept(model, other, cache)
    with PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path), replay="exact") as cache:
        for text, known in ((ids, 40), ([*other, 1], 48), (ids[:30] + [5], 30)):
            _, logits, hit = cache.prefill(text)
            assert (hit.kind, hit.known) == ("global-only", known)
            assert same_as_alone(model, text, logits) is None
        assert cache.tiers.stats.disk == 16  # ten of one text, six more of the other


def test_a_spoilt_page_is_a_miss(model, ids, tmp_path):
    with PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path), replay="exact") as cache:
        kept(model, ids[:40], cache)
    for file in sorted(tmp_path.rglob("*.page"))[::2]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
    known = []
    while not known or known[-1] < 40:  # a reader stops at the first, so they are mended in turn
        with PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path), replay="exact") as cache:
            session, logits, hit = cache.prefill(ids)
            assert same_as_alone(model, ids, logits) is None
            assert known == [] or hit.known >= known[-1]
            assert hit.known >= 40 or cache.tiers.disk.stats.corrupt == 1
            known.append(hit.known)
            assert len(known) <= 6
            cache.keep(session)


def test_a_folder_of_another_model_is_refused(model, ids, tmp_path):
    PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path)).close()
    other = random_model(small_config(), seed=1)
    with pytest.raises(StoreError):
        PrefixCache(other, page_tokens=PAGE, disk=str(tmp_path))
    with pytest.raises(StoreError):
        PrefixCache(model, page_tokens=2 * PAGE, disk=str(tmp_path))


def test_two_writers_are_refused(model, tmp_path):
    with PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path)), pytest.raises(StoreError):
        PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path))


@pytest.mark.parametrize("method", ["put", "get", "__contains__"])
def test_a_disk_that_refuses_costs_a_computation_not_an_answer(model, ids, method, tmp_path,
                                                               monkeypatch):
    with PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path), replay="exact") as cache:
        kept(model, ids[:40], cache)
    with PrefixCache(model, page_tokens=PAGE, disk=str(tmp_path), replay="exact") as cache:
        def refuse(self, *args):
            raise StoreError("the disk is full: make room")
        monkeypatch.setattr(DiskStore, method, refuse)
        with pytest.warns(UserWarning, match="the disk is full.*computed again"):
            session, logits, _ = cache.prefill(ids)
            cache.keep(session)
            assert same_as_alone(model, ids, logits) is None
            cache.keep(kept(model, ids[3:50], cache))
        assert cache.tiers.stats.refused > 0
        _, logits, hit = cache.prefill([*ids, 1])  # memory still serves
        assert hit.kind == "full" and same_as_alone(model, [*ids, 1], logits) is None


def test_the_digest_tells_models_vocabularies_and_forms_apart(model):
    cache = model.new_cache()
    seen = {model_digest(model, cache), model_digest(model, model.new_cache(page_tokens=2))}
    assert model_digest(random_model(small_config()), cache) in seen  # the same again
    for changed in (random_model(small_config(), seed=1),
                    random_model(small_config(rope_theta=1e4 + 1)),
                    random_model(small_config(), dtype=torch.float32)):
        seen.add(model_digest(changed, changed.new_cache()))
    swapped = random_model(small_config())
    swapped.engram_classes = swapped.engram_classes.flip(0)
    seen.add(model_digest(swapped, cache))
    with torch.no_grad():
        swapped = random_model(small_config())
        swapped.layers[3].ffn.experts[2].w1.weight[1, 1] += 1e-3
    seen.add(model_digest(swapped, cache))
    assert len(seen) == 7


def test_pages_outlive_a_draft_that_is_trained_anew():
    drafted, again = random_model(small_config(**DRAFT)), random_model(small_config(**DRAFT))
    with torch.no_grad():
        for p in again.mtp.parameters():
            p.add_(1e-2)
    cache = drafted.new_cache()
    assert model_digest(drafted, cache) == model_digest(again, cache)


def test_bad_input_is_refused(model, ids):
    with pytest.raises(InputError, match="bounded|exact"):
        PrefixCache(model, replay="none")
    cache = PrefixCache(model, page_tokens=PAGE)
    with pytest.raises(InputError, match="empty"):
        cache.prefill([])
    with pytest.raises(InputError, match="another model"):
        cache.keep(Session(random_model(small_config())))
    with pytest.raises(InputError, match="make both alike"):
        cache.keep(Session(model, page_tokens=2 * PAGE))
    with pytest.raises(InputError, match="multiple of 2"):
        PrefixCache(model, page_tokens=3)
    with pytest.raises(InputError, match="vocabulary"):
        cache.prefill([10_000])


def test_keeping_copies_nothing(model, ids):
    cache = PrefixCache(model, page_tokens=PAGE)
    session = kept(model, ids[:41], cache)
    held = {page.kv.data_ptr() for store in session.cache.stores.values()
            for page in store.pages[0]}
    for _, logits, hit in [cache.prefill(ids[:41] + [2])]:
        assert hit.kind == "full" and logits.shape[1] == 1
    other, _, _ = cache.prefill(ids[:41] + [2])
    shared = [page.kv.data_ptr() in held for store in other.cache.stores.values()
              for page in store.pages[0]]
    assert sum(shared) >= 2 * 10 and not all(shared)  # the last page was copied for writing
    state = cache.pool.get(next(iter(cache.pool._states)))
    assert isinstance(state, WindowState) and state.length == 41
