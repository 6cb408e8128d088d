"""What the crash tests run in processes of their own, and kill. Imports no torch, to start fast.

`store_child.py write FOLDER BUDGET FIRST` writes, replaces and discards pages until it is killed.
Before each change it prints "> KEY VERSION", and "KEY VERSION" when the store has returned.

`store_child.py lines` dies before every line of the store's code that a change runs, one process
a line, and prints how many times what was promised held: one line per kind of change.
"""

import functools
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

from labkit.store import DiskStore

DIGEST = "model, tokenizer, format"
# These stores sync thousands of times and ask nothing of the disk: keep them in memory, if we can.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
DISCARDED = -1  # the version of a key that was taken out


@functools.cache
def payload(key: str, version: int) -> bytes:
    """What a key holds in a version; every fifth version is the same bytes for all keys."""
    draw = random.Random(f"shared {version}" if version % 5 == 4 else f"{key} {version}")
    return draw.randbytes(draw.choice([1, 1000, 20_000, 114_000]))


def meta(key: str, version: int) -> bytes:
    return f"{key}/{version}".encode()


def plan(number: int) -> tuple[str, int]:
    """The change of a number: (key, version)."""
    draw = random.Random(number)
    kind = draw.random()
    if kind < 0.15 and number > 10:
        return f"page {draw.randrange(number)}", DISCARDED
    if kind < 0.4 and number > 10:
        return f"page {draw.randrange(number)}", number
    return f"page {number}", number


def change(store: DiskStore, key: str, version: int) -> None:
    if version == DISCARDED:
        store.discard(key)
    else:
        assert store.put(key, payload(key, version), meta(key, version))


def write(folder: str, budget: str, first: str) -> None:
    number = int(first)
    with DiskStore(folder, DIGEST, budget=int(budget)) as store:
        while True:
            key, version = plan(number)
            print(">", key, version, flush=True)
            change(store, key, version)
            print(key, version, flush=True)
            number += 1


# ---- dying before each line -------------------------------------------------------------

STORE = os.sep + os.path.join("labkit", "store") + os.sep
BUDGET = 4000  # as much as the pages of `prepare` have


def die_before(line: int):
    """A trace function that kills this process before it runs the `line`-th line of the store."""
    ran = 0

    def trace(frame, event, arg):
        nonlocal ran
        if STORE not in frame.f_code.co_filename:
            return None
        if event == "line":
            if ran == line:
                os.kill(os.getpid(), signal.SIGKILL)
            ran += 1
        return trace

    return trace


def prepare(folder: Path) -> dict[str, int]:
    """A store with a few pages, two of them sharing a file; {key: version}."""
    kept = {"a": 1, "b": 4, "c": 4, "d": 2, "e": 3}
    with DiskStore(folder, DIGEST, budget=BUDGET) as store:
        for key, version in kept.items():
            change(store, key, version)
        assert sorted(key for key, _, _ in store.items()) == sorted(kept)
    return kept


def run_put(folder):  # replaces, evicts, and notes uses
    store = DiskStore(folder, DIGEST, budget=BUDGET)
    store.get("a")
    store.get("d")
    sys.settrace(TRACE)
    change(store, "c", 13)
    sys.settrace(None)
    assert store.stats.evicted == 1 and "b" not in store


def run_discard(folder):
    store = DiskStore(folder, DIGEST, budget=BUDGET)
    sys.settrace(TRACE)
    change(store, "d", DISCARDED)


def run_open_and_close(folder):  # sweeps leftovers, evicts for a smaller budget
    for name in ("00" * 32 + ".page", "00" * 32 + ".tmp"):
        path = Path(folder, "pages", "00", name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left over")
    sys.settrace(TRACE)
    store = DiskStore(folder, DIGEST, budget=BUDGET // 2)
    store.get("e")
    store.close()
    sys.settrace(None)
    assert store.stats.evicted == 3


def run_new(folder):  # the first put into a folder that does not exist yet
    shutil.rmtree(folder)
    sys.settrace(TRACE)
    change(DiskStore(folder, DIGEST, budget=BUDGET), "c", 13)


def run_damaged(folder):  # the index is set aside
    Path(folder, "index.sqlite").write_bytes(b"no index" * 999)
    sys.settrace(TRACE)
    change(DiskStore(folder, DIGEST, budget=BUDGET), "c", 13)


TRACE = None
# What runs; the keys that may change, evicted ones included; the versions c may have.
CHANGES = {
    "put": (run_put, "b", {4, 13}),
    "discard": (run_discard, "d", {4}),
    "open and close": (run_open_and_close, "abc", {4}),
    "first put": (run_new, "abcde", {13}),
    "damaged index": (run_damaged, "abcde", {4, 13}),
}


def survives(folder: Path, kept: dict[str, int], may_change: str, versions: set[int]) -> None:
    """Open what a kill left; AssertionError unless all promises hold."""
    with DiskStore(folder, DIGEST, budget=BUDGET) as store:
        held = {}
        for key in kept:
            allowed = [(payload(key, v), meta(key, v))
                       for v in (versions if key == "c" else {kept[key]})]
            about, held[key] = store.meta(key), store.get(key)
            if held[key] is None:
                assert key in may_change, f"{key} was lost"
            else:
                assert (held[key], about) in allowed, f"{key} has wrong bytes"
        assert store.stats.corrupt == 0, "a row had no page"
        files = {p.name for p in Path(folder, "pages").rglob("*") if p.is_file()}
        assert len(files) == len({page for page in held.values() if page is not None}), files
        assert all(name.endswith(".page") for name in files), files
        change(store, "f", 0)
        assert store.get("f") == payload("f", 0)


def lines() -> None:
    global TRACE
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=MEMORY) as work:
        base = Path(work, "base")
        kept = prepare(base)
        for name, (run, may_change, versions) in CHANGES.items():
            line, finished = 0, False
            while not finished:
                folder = Path(work, "store")
                shutil.copytree(base, folder)
                child = os.fork()
                if child == 0:
                    TRACE = die_before(line)
                    run(folder)
                    os._exit(0)
                _, status = os.waitpid(child, 0)
                finished = os.WIFEXITED(status)
                assert finished or os.WTERMSIG(status) == signal.SIGKILL
                assert not finished or os.WEXITSTATUS(status) == 0
                try:
                    survives(folder, kept, may_change, versions)
                except Exception as error:
                    raise AssertionError(f"{name}, killed before its line {line}") from error
                shutil.rmtree(folder)
                line += not finished
            print(f"{name}: {line} lines", flush=True)


if __name__ == "__main__":
    {"write": write, "lines": lines}[sys.argv[1]](*sys.argv[2:])
