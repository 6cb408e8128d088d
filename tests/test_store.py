"""The stores of pages against plain dicts, and what a caller may do wrong."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import Clock, files, in_memory, opened, page_file

from labkit.errors import LabError, StoreError
from labkit.store import Lru

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tmp_path():
    with in_memory() as folder:
        yield folder


def test_the_store_needs_no_torch():
    code = "import labkit.store, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout
    assert told.split() == ["False", "False"]


# ---- models: what a dict in order of use would do -------------------------------------------

KEYS = st.sampled_from(["", "a", "b", "c", "ü\0☃"])
LIFETIME = 10
# None last: for ever is the simpler case, and the first choices are drawn most.
LIFETIMES = st.sampled_from([LIFETIME, LIFETIME + 1, None])
KINDS = ["put"] * 3 + ["get"] * 3 + ["wait"] * 2 + ["discard", "peek", "in"]
LRU_STEPS = st.lists(st.tuples(st.sampled_from([*KINDS, "expire"]), KEYS, st.integers(1, 9)),
                     min_size=20, max_size=60)


@settings(max_examples=200)
@given(LRU_STEPS, st.sampled_from([30, 20, 10, 8, 1, 0]), LIFETIMES)
def test_lru_against_a_dict(steps, budget, lifetime):
    clock, told = Clock(), []
    lru = Lru(budget, lifetime, clock, lambda *args: told.append(args))
    model = {}  # key: (value, size, last use), the least recently used first
    expected, count = [], Counter()

    def late(key):
        return lifetime is not None and clock.now - model[key][2] >= lifetime

    def went(key, reason):
        value, size, _ = model.pop(key)
        expected.append((key, value, size, reason))
        count[reason] += 1

    def sweep():
        for key in [key for key in model if late(key)]:
            went(key, "lifetime")

    for number, (kind, key, size) in enumerate(steps):
        there = key in model and not late(key)
        if kind == "put":
            assert lru.put(key, number, size) == (size <= budget)
            if size <= budget:
                sweep()
                model.pop(key, None)
                while sum(entry[1] for entry in model.values()) + size > budget:
                    went(next(iter(model)), "budget")
                model[key] = number, size, clock.now
        elif kind == "get":
            assert lru.get(key) == (model[key][0] if there else None)
            count["hits" if there else "misses"] += 1
            if there:
                value, kept, _ = model.pop(key)
                model[key] = value, kept, clock.now
            elif key in model:
                went(key, "lifetime")
        elif kind == "peek":
            assert lru.peek(key) == (model[key][0] if there else None)
        elif kind == "in":
            assert (key in lru) == there
        elif kind == "discard":
            assert lru.discard(key) == there
            model.pop(key, None)
        elif kind == "wait":
            clock.now += size
        else:
            before = len(model)
            sweep()
            assert lru.expire() == before - len(model)
        assert list(lru) == list(model) and len(lru) == len(model)
        assert lru.nbytes == sum(entry[1] for entry in model.values()) <= budget
        assert told == expected
    assert (lru.hits, lru.misses) == (count["hits"], count["misses"])
    assert (lru.evictions, lru.expired) == (count["budget"], count["lifetime"])


def test_lru_refuses_what_makes_no_sense():
    for options in ({"budget": -1}, {"budget": 1, "lifetime": 0}):
        with pytest.raises(StoreError, match="give"):
            Lru(**options)
    with pytest.raises(StoreError, match="0 or more"):
        Lru(1).put("a", None, -1)


# Payloads are few, so that keys share them; lengths up to more than the smallest budgets.
PAYLOADS = st.sampled_from([b"", b"x", b"y", b"page" * 3, b"other page" * 2, b"long" * 10])
BUDGETS = st.sampled_from([1000, 45, 33, 12, 1])
DISK_STEPS = st.lists(st.tuples(
    st.sampled_from(["put"] * 3 + ["get"] * 3 + ["wait"] * 2 + ["discard", "reopen"]), KEYS,
    PAYLOADS, st.sampled_from([b"", b"meta"]), st.integers(1, 9), BUDGETS,
), min_size=15, max_size=40)


@settings(max_examples=40)
@given(DISK_STEPS, BUDGETS, LIFETIMES)
def test_disk_store_against_a_dict(steps, budget, lifetime):
    clock = Clock(1000.0)
    model = {}  # key: (payload, meta, last use), the least recently used first
    count = Counter()

    def late(key):
        return lifetime is not None and clock.now - model[key][2] >= lifetime

    def held():
        return sum(len(payload) for payload in {entry[0] for entry in model.values()})

    def trim():
        while model:
            key = next(iter(model))
            if not late(key) and held() <= budget:
                break
            count["expired" if late(key) else "evicted"] += 1
            del model[key]

    with in_memory() as folder:
        store = opened(folder, budget=budget, lifetime=lifetime, clock=clock)
        for kind, key, payload, meta, seconds, another in steps:
            there = key in model and not late(key)
            if kind == "put":
                assert store.put(key, payload, meta) == (len(payload) <= budget)
                if len(payload) <= budget:
                    model.pop(key, None)
                    model[key] = payload, meta, clock.now
                    count["stored"] += 1
                    trim()
            elif kind == "get":
                assert store.get(key) == (model[key][0] if there else None)
                count["hits" if there else "misses"] += 1
                if there:
                    model[key] = *model.pop(key)[:2], clock.now
                elif key in model:
                    count["expired"] += 1
                    del model[key]
            elif kind == "discard":
                assert store.discard(key) == there
                model.pop(key, None)
            elif kind == "wait":
                clock.now += seconds
            else:
                store.close()
                assert vars(store.stats) == {name: count[name] for name in vars(store.stats)}
                count.clear()
                budget = another
                store = opened(folder, budget=budget, lifetime=lifetime, clock=clock)
                for name in [name for name in model if late(name)]:
                    count["expired"] += 1
                    del model[name]
                trim()
            alive = [(name, about, len(page)) for name, (page, about, _) in model.items()
                     if not late(name)]
            assert sorted(store.items()) == sorted(alive)
            for name in ("", "a", "b", "c", "ü\0☃", "never"):
                assert (name in store) == (name in model and not late(name))
                assert store.meta(name) == (model[name][1] if name in store else None)
            assert len(store) == len(model)
            assert store.nbytes == held() <= budget
            assert files(folder) == sorted(
                page_file(folder, page).name for page in {entry[0] for entry in model.values()})
        with opened(folder, budget=budget, lifetime=lifetime, clock=clock, writer=False) as reader:
            assert sorted(reader.items()) == sorted(alive)
            assert reader.nbytes == held() and len(reader) == len(model)
            for name in model:
                assert reader.get(name) == (None if late(name) else model[name][0])
        store.close()


# ---- what a caller may do wrong ---------------------------------------------------------------

def test_options_and_values_that_make_no_sense(tmp_path):
    for options in ({"budget": 0}, {"budget": -5}, {"lifetime": 0}, {"digest": ""}):
        with pytest.raises(StoreError, match="give"):
            opened(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
    with pytest.raises(StoreError, match="no store in .*new: open it as a writer"):
        opened(tmp_path / "new", writer=False)
    with opened(tmp_path, budget=10) as store:
        assert store.put("a", b"x" * 10) and not store.put("a", b"y" * 11)
        assert store.get("a") == b"x" * 10
        for arguments in ((7, b""), ("\ud800", b""), ("a", "text"), ("a", b"", None)):
            with pytest.raises(StoreError):
                store.put(*arguments)
        assert store.get("\ud800") is None and "\ud800" not in store and 7 not in store
        with opened(tmp_path, writer=False) as reader:
            for call in (lambda: reader.put("b", b""), lambda: reader.discard("a")):
                with pytest.raises(StoreError, match="open for reading: open it with writer=True"):
                    call()
    store.close()
    with pytest.raises(StoreError, match="closed: open it again"):
        store.get("a")
    assert issubclass(StoreError, LabError)


def test_another_models_folder_is_refused(tmp_path):
    with opened(tmp_path) as store:
        store.put("a", b"page")
    for writer in (True, False):
        with pytest.raises(StoreError, match="pages of another model.*name another folder"):
            opened(tmp_path, digest="another", writer=writer)
    with opened(tmp_path) as store:  # the refusal held no lock and changed nothing
        assert store.get("a") == b"page"


def test_a_folder_of_a_later_format_is_refused(tmp_path):
    opened(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db, db:
        db.execute("UPDATE about SET value = '2' WHERE name = 'format'")
    with pytest.raises(StoreError, match="has format 2, not 1"):
        opened(tmp_path)


def test_a_reader_that_comes_too_early(tmp_path):
    (tmp_path / "index.sqlite").touch()
    with pytest.raises(StoreError, match="still being made: try again"):
        opened(tmp_path, writer=False)
    opened(tmp_path).close()
    opened(tmp_path, writer=False).close()


def test_one_writer_at_a_time_any_number_of_readers(tmp_path):
    with opened(tmp_path) as store:
        with pytest.raises(StoreError, match="another writer .*open the store as a reader"):
            opened(tmp_path)
        with opened(tmp_path, writer=False) as one, opened(tmp_path, writer=False) as two:
            store.put("a", b"page")
            assert one.get("a") == two.get("a") == b"page"
            store.put("a", b"page 2")
            assert one.get("a") == b"page 2"
            store.discard("a")
            assert one.get("a") is None
            assert vars(one.stats) == {"hits": 2, "misses": 1, "corrupt": 0, "expired": 0,
                                       "evicted": 0, "stored": 0}
    opened(tmp_path).close()


def test_a_reader_looks_again_when_a_page_moves_under_its_hands(tmp_path, monkeypatch):
    with opened(tmp_path) as store, opened(tmp_path, writer=False) as reader:
        store.put("a", b"page")
        read = reader._files.read

        def late(hash, size):  # between the reader's row and its file the writer changes both
            monkeypatch.setattr(reader._files, "read", read)
            store.put("a", b"page 2")
            return read(hash, size)

        monkeypatch.setattr(reader._files, "read", late)
        assert reader.get("a") == b"page 2" and reader.stats.corrupt == 0


def test_uses_count_across_a_clock_that_is_set_back(tmp_path):
    clock = Clock(10_000.0)
    with opened(tmp_path, lifetime=LIFETIME, clock=clock) as store:
        store.put("a", b"page")
    clock.now = 50.0
    with opened(tmp_path, lifetime=LIFETIME, clock=clock) as store:
        clock.now += LIFETIME - 1
        assert "a" in store
        clock.now += 1
        assert "a" not in store and store.get("a") is None and store.stats.expired == 1


def test_a_touched_page_outlives_its_store_time(tmp_path):
    clock = Clock()
    with opened(tmp_path, lifetime=LIFETIME, clock=clock) as store:
        for key in "abc":
            store.put(key, key.encode())
        clock.now = 9
        store.get("a")
        store.get("b")
        clock.now = 12
        store.put("a", b"new")  # flushes the uses, sweeps c, which nobody used
        clock.now = 18
        store.get("b")  # noted when the store is closed
    with opened(tmp_path, lifetime=LIFETIME, clock=clock) as store:
        clock.now = 22
        assert sorted(key for key, _, _ in store.items()) == ["b"]
        clock.now = 28
        assert sorted(key for key, _, _ in store.items()) == []
