"""A writer killed at any point loses nothing that it acknowledged, and leaves nothing wrong.

The writers are processes of their own (tests/store_child.py). SIGKILL leaves the system running:
that data would also outlive a power cut is shown by the order of syncs, in test_store_disk.py.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from store_child import DIGEST, DISCARDED, meta, payload, plan

from labkit.errors import StoreError
from labkit.store import DiskStore

HERE = Path(__file__).parent
KILLS = 100
PLENTY = 10**12
START: dict[str, float] = {}  # seconds until the last writer's first change

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")


def child(*arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, HERE / "store_child.py", *map(str, arguments)], stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(HERE.parent)})


def killed_writer(folder: Path, budget: int, first: int, draw: random.Random,
                  most: int) -> list[list[str]]:
    """What a writer printed, word by word, until it was killed at a random moment.

    Moments are drawn in changes, at most `most`, not in seconds: disks differ a hundredfold.
    """
    begin = time.perf_counter()
    writer = child("write", folder, budget, first)
    told = []
    if draw.random() < 0.2:  # perhaps before it has opened the store
        time.sleep(draw.uniform(0, 1.2) * START.get("seconds", 0.1))
    else:
        told.append(writer.stdout.readline())
        now = time.perf_counter()
        START["seconds"], begin = now - begin, now
        lines = draw.randint(1, 2 * most)
        told += [writer.stdout.readline() for _ in range(lines)]
        a_change = 2 * (time.perf_counter() - begin) / lines
        time.sleep(draw.uniform(0, 2) * a_change)
    assert writer.poll() is None, "the writer ended by itself"
    writer.kill()
    told += writer.stdout.readlines()
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    return [line.split() for line in told if line.endswith("\n")]


def follow(told: list[list[str]], versions: dict[str, int]) -> tuple[int, tuple[str, int] | None]:
    """Note what was acknowledged; (changes acknowledged, the change that the kill cut short)."""
    done, open_change = 0, None
    for line in told:
        key, version = " ".join(line[-3:-1]), int(line[-1])
        if line[0] == ">":
            open_change = key, version
        else:
            assert open_change == (key, version)
            versions[key], open_change = version, None
            done += 1
    return done, open_change


def leftovers(folder: Path) -> tuple[set[str], set[str]]:
    """Names of page files and of temporary files."""
    names = {path.name for path in (folder / "pages").rglob("*") if path.is_file()}
    pages = {name for name in names if name.endswith(".page")}
    return pages, names - pages


def is_version(store: DiskStore, key: str, version: int) -> bool:
    """Whether a key holds a version, payload and meta, or nothing if that is its version."""
    if version == DISCARDED:
        return key not in store and store.get(key) is None and store.meta(key) is None
    return store.get(key) == payload(key, version) and store.meta(key) == meta(key, version)


def test_a_hundred_kills_lose_nothing_acknowledged(tmp_path):
    draw, folder = random.Random(0), tmp_path / "store"
    versions: dict[str, int] = {}  # what each key must hold
    number = puts = cut = in_write = 0
    start = time.perf_counter()
    for _ in range(KILLS):
        told = killed_writer(folder, PLENTY, number, draw, most=20)
        done, open_change = follow(told, versions)
        pages, temporary = leftovers(folder)
        puts += done
        cut += open_change is not None
        with DiskStore(folder, DIGEST, budget=PLENTY) as store:
            if open_change is not None:
                key, version = open_change
                if is_version(store, key, version):  # done, though not acknowledged
                    versions[key] = version
                    done += 1
            wrong = [key for key, version in versions.items()
                     if not is_version(store, key, version)]
            assert wrong == [], f"lost or wrong after {puts} acknowledged changes"
            held = {key for key, version in versions.items() if version != DISCARDED}
            assert {key for key, _, _ in store.items()} == held
            assert store.stats.corrupt == store.stats.evicted == 0
            swept, none = leftovers(folder)
            assert none == set()
            shared = len({payload(key, versions[key]) for key in held})
            assert len(swept) == shared
            in_write += bool(temporary) or bool(pages - swept)
        number += done + 1
    print(f"{KILLS} kills: {puts} changes acknowledged, {len(held)} pages kept, "
          f"{store.stats.hits} read in the last check; {cut} kills within a change, {in_write} of "
          f"them left a file without a row; {time.perf_counter() - start:.1f} s")
    assert puts > 5 * KILLS and cut > KILLS / 4 and in_write > 3


def test_kills_while_pages_are_evicted(tmp_path):
    draw, folder = random.Random(1), tmp_path / "store"
    budget = 1_000_000
    versions: dict[str, set[int]] = {}
    number = puts = served = 0
    for _ in range(KILLS // 4):
        told = killed_writer(folder, budget, number, draw, most=30)
        last: dict[str, int] = {}
        done, open_change = follow(told, last)
        for key, version in last.items():
            versions[key] = {version}
        if open_change is not None:
            versions.setdefault(open_change[0], {DISCARDED}).add(open_change[1])
        puts += done
        with DiskStore(folder, DIGEST, budget=budget) as store:
            for key, allowed in versions.items():
                about, page = store.meta(key), store.get(key)
                if page is None:
                    versions[key] = {DISCARDED}
                    continue
                found = [v for v in allowed - {DISCARDED}
                         if (payload(key, v), meta(key, v)) == (page, about)]
                assert len(found) == 1, f"{key} has wrong bytes"
                versions[key] = set(found)
                served += 1
            assert store.stats.corrupt == 0
            pages, temporary = leftovers(folder)
            assert temporary == set()
            assert sum(p.stat().st_size for p in (folder / "pages").rglob("*.page")) \
                == store.nbytes <= budget
        number += done + 1
    print(f"{KILLS // 4} kills: {puts} changes acknowledged, {served} pages served, all right; "
          f"{number} numbers used, {len(store_keys(versions))} keys held at the end")
    assert puts > KILLS and served > KILLS
    assert len(store_keys(versions)) < len(versions) / 2, "hardly anything was evicted"


def store_keys(versions: dict[str, set[int]]) -> list[str]:
    return [key for key, allowed in versions.items() if allowed != {DISCARDED}]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_before_any_line_of_the_store():
    start = time.perf_counter()
    lines = child("lines")
    told = lines.stdout.read()
    lines.stdout.close()
    assert lines.wait() == 0
    print(f"{told}{time.perf_counter() - start:.1f} s")
    counts = [int(line.split(": ")[1].split()[0]) for line in told.splitlines()]
    assert len(counts) == 5 and min(counts) > 50


def test_a_second_writer_is_refused_and_a_reader_sees_what_is_acknowledged(tmp_path):
    planned = defaultdict(list)
    for number in range(20_000):  # more than the writer can be ahead, by what a pipe holds
        key, version = plan(number)
        planned[key].append((number, version))
    writer = child("write", tmp_path, PLENTY, 0)
    seen = checks = 0
    try:
        assert writer.stdout.readline().split()[0] == ">"
        with pytest.raises(StoreError, match="another writer.*close that one first"):
            DiskStore(tmp_path, DIGEST, budget=PLENTY)
        with DiskStore(tmp_path, DIGEST, budget=PLENTY, writer=False) as reader:
            while checks < 200:
                line = writer.stdout.readline().split()
                if line[0] == ">":
                    continue
                key, version = " ".join(line[-3:-1]), int(line[-1])
                # By now the writer may have changed the key again, as the plan says.
                allowed = [v for n, v in planned[key] if n >= checks]
                assert allowed[0] == version
                page = reader.get(key)
                if page is None:
                    assert DISCARDED in allowed, f"{key} was acknowledged, the reader lacks it"
                else:
                    assert page in [payload(key, v) for v in allowed if v != DISCARDED]
                checks += 1
                seen += page is not None
            assert reader.stats.corrupt == 0
    finally:
        writer.kill()
        writer.stdout.close()
        writer.wait()
    print(f"{seen} pages read of {checks} acknowledged changes")
    assert seen > 100
    DiskStore(tmp_path, DIGEST, budget=PLENTY).close()  # the lock died with its holder
