"""What a disk can do to a store: damage, fill up, be read-only, stop at any moment."""

import contextlib
import errno
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from store_helpers import files, in_memory, opened, page_file

from labkit.errors import StoreError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tmp_path():
    with in_memory() as folder:
        yield folder

# ---- damage ---------------------------------------------------------------------------------

DAMAGES = {
    "removed": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a flipped bit": lambda path: flip(path, 8 * 500 + 3),
    "another page": lambda path: path.write_bytes(b"o" * 1000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_page_is_a_miss(tmp_path, damage):
    page = random.Random(0).randbytes(1000)
    with opened(tmp_path) as store:
        for key in ("a", "same page"):
            store.put(key, page)
        store.put("b", b"sound")
        DAMAGES[damage](page_file(tmp_path, page))
        with opened(tmp_path, writer=False) as reader:
            assert reader.get("a") is None and reader.get("b") == b"sound"
            assert (reader.stats.corrupt, reader.stats.misses) == (1, 1) and "a" in reader
        assert store.get("a") is None and "a" not in store
        assert store.get("same page") is None and store.get("b") == b"sound"
        assert (store.stats.corrupt, store.stats.misses) == (2, 2)
        assert store.nbytes == 5 and len(store) == 1
        if damage != "a folder":
            assert files(tmp_path) == [page_file(tmp_path, b"sound").name]
            assert store.put("a", page) and store.get("a") == page


def test_a_damaged_page_is_written_anew(tmp_path):
    with opened(tmp_path) as store:
        store.put("a", b"page")
        page_file(tmp_path, b"page").write_bytes(b"gape")
        store.put("b", b"page")
        assert store.get("a") == store.get("b") == b"page" and store.stats.corrupt == 0


ASKED = {str(number): f"payload {number} ".encode() * 20 for number in range(8)}


def served(folder, tally, writer):
    """Ask a store for everything it was given; AssertionError if anything is wrong."""
    try:
        with opened(folder, writer=writer) as store:
            for key, payload in ASKED.items():
                about, page = store.meta(key), store.get(key)
                assert page in (None, payload) and about in (None, b"meta of " + key.encode())
                tally["right" if page else "missed"] += 1
            known = {(key, b"meta of " + key.encode(), len(page)) for key, page in ASKED.items()}
            assert set(store.items()) <= known
            if writer:
                assert store.put("0", ASKED["0"]) and store.get("0") == ASKED["0"]
    except StoreError as error:
        assert str(tmp_name(folder)) in str(error)
        tally["refused"] += 1


def tmp_name(folder):
    return Path(folder).name


@pytest.mark.filterwarnings("ignore:.*starts empty")
@pytest.mark.parametrize("killed", [False, True], ids=["index", "index with its log"])
def test_a_damaged_index_gives_misses_or_an_error(tmp_path, killed):
    base, copy = tmp_path / "base", tmp_path / "copy"
    store = opened(base)
    for key, payload in ASKED.items():
        store.put(key, payload, b"meta of " + key.encode())
    if not killed:
        store.close()
    draw, tally = random.Random(0), Counter()
    names = [path.name for path in base.glob("index.sqlite*") if not path.name.endswith("-shm")]
    assert len(names) == 1 + killed
    for trial in range(150):
        for writer in (False, True):
            shutil.copytree(base, copy, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
            path = copy / names[trial % len(names)]
            data = path.read_bytes()
            if trial % 10 == 9:
                path.write_bytes(data[: draw.randrange(len(data))])
            else:  # where something is written: most of a page of an index is empty
                written = [place for place, value in enumerate(data) if value]
                for byte in draw.sample(written, 1 + trial % 3):
                    flip(path, 8 * byte + draw.randrange(8))
            served(copy, tally, writer)
            shutil.rmtree(copy)
    store.close()
    print(f"{dict(tally)} after 300 damages to {', '.join(names)}")
    assert tally["right"] > 300 and tally["missed"] > 100


def test_a_row_that_took_another_key_is_noticed(tmp_path):
    """SQLite has no checksums: a flipped bit in a key would hand out another key's page."""
    with opened(tmp_path) as store:
        store.put("1", b"of 1", b"meta")
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db, db:
        db.execute("UPDATE pages SET key = '0'")
    with opened(tmp_path, writer=False) as reader:
        assert reader.get("0") is None and reader.meta("0") is None and "0" not in reader
        assert list(reader.items()) == [] and reader.stats.corrupt == 1
    with opened(tmp_path) as store:
        assert store.stats.corrupt == 1 and len(store) == store.nbytes == 0
        assert files(tmp_path) == []


@pytest.mark.parametrize("ruin", ["garbage", "another database"])
def test_a_broken_index_is_set_aside(tmp_path, ruin):
    for number in (1, 2):
        with opened(tmp_path) as store:
            store.put("a", b"page")
        path = tmp_path / "index.sqlite"
        if ruin == "garbage":
            path.write_bytes(b"no index " * 1000)
        else:
            path.unlink()
            with contextlib.closing(sqlite3.connect(path)) as db, db:
                db.execute("CREATE TABLE pages (x)")
        with pytest.raises(StoreError, match="open the store as a writer, which starts it anew"):
            opened(tmp_path, writer=False)
        with pytest.warns(RuntimeWarning, match=f"index.broken-{number}, and the store starts"):
            store = opened(tmp_path)
        with store:
            assert list(store.items()) == [] and store.get("a") is None and files(tmp_path) == []
            assert store.put("a", b"new") and store.get("a") == b"new"
        assert (tmp_path / f"index.broken-{number}").exists()


def alter(folder, old, new, then="SELECT 1"):
    """Change the text of the index's schema, as flipped bits would, and use it once."""
    for statement in (f"UPDATE sqlite_master SET sql = replace(sql, '{old}', '{new}')", then):
        with contextlib.closing(sqlite3.connect(folder / "index.sqlite")) as db, db:
            db.execute("PRAGMA writable_schema = ON")
            db.execute(statement)


@pytest.mark.parametrize("change", ["type of keys", "type of times", "rows out of turn"])
def test_an_index_whose_tables_were_altered_is_set_aside(tmp_path, change):
    with opened(tmp_path, clock=lambda: 5.0) as store:
        store.put("0", b"page")
    if change == "type of keys":  # they would become numbers
        alter(tmp_path, "key TEXT", "key TEXD")
    elif change == "type of times":  # whole ones would become integers
        alter(tmp_path, "stored REAL", "stored SEAL")
    else:  # rows would never be evicted, since only the index of turns lacks them
        alter(tmp_path, "(turn)", "(turn) WHERE 0", "REINDEX pages_turn")
        alter(tmp_path, "(turn) WHERE 0", "(turn)")
    with pytest.warns(RuntimeWarning, match="starts empty"):
        store = opened(tmp_path)
    with store:
        assert store.put("0", b"page") and store.get("0") == b"page"


@pytest.mark.parametrize("call, empty", [
    (lambda store: store.get("a"), None), (lambda store: store.meta("a"), None),
    (lambda store: store.put("a", b"new"), True), (lambda store: store.discard("a"), False),
    (lambda store: "a" in store, False), (lambda store: len(store), 0),
    (lambda store: list(store.items()), [])])
def test_an_index_that_breaks_while_it_is_open(tmp_path, call, empty):
    with opened(tmp_path) as store, opened(tmp_path, writer=False) as reader:
        store.put("a", b"page")
        assert reader.get("a") == b"page"
        with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db, db:
            db.execute("DROP TABLE pages")
        with pytest.raises(StoreError, match="damaged.*open the store as a writer"):
            reader.get("a")
        idle = sqlite3.connect(tmp_path / "index.sqlite")
        idle.execute("SELECT * FROM about").fetchone()
        with pytest.warns(RuntimeWarning, match="starts empty"):
            assert call(store) == empty
        assert (tmp_path / "index.broken-1-wal").exists()  # idle's, not to be shared with the new
        assert store.put("b", b"page") and store.get("b") == b"page" and store.stats.corrupt == 0
        idle.close()
        assert store.get("b") == b"page"


def test_a_log_without_its_index_is_not_taken_for_the_new_ones(tmp_path):
    with opened(tmp_path) as store:
        store.put("a", b"page")
        log = (tmp_path / "index.sqlite-wal").read_bytes()
    (tmp_path / "index.sqlite").unlink()
    (tmp_path / "index.sqlite-wal").write_bytes(log)
    with opened(tmp_path) as store:
        assert len(store) == 0 and store.get("a") is None and files(tmp_path) == []
        assert store.put("b", b"page")
    with opened(tmp_path) as store:
        assert [key for key, _, _ in store.items()] == ["b"]


def test_leftovers_of_a_kill_are_swept_and_nothing_else(tmp_path):
    with opened(tmp_path) as store:
        store.put("a", b"page")
    ours, not_ours = tmp_path / "pages" / "ab", tmp_path / "pages" / "mine"
    not_ours.mkdir()
    ours.mkdir(exist_ok=True)
    for folder in (ours, not_ours):
        for name in ("ab" * 32 + ".page", "ab" * 32 + ".tmp", "notes.txt"):
            (folder / name).write_bytes(b"")
    with opened(tmp_path, writer=False):
        assert len(files(tmp_path)) == 7
    with opened(tmp_path) as store:
        assert store.get("a") == b"page"
    assert sorted(path.name for path in ours.iterdir()) == ["notes.txt"]
    assert len(list(not_ours.iterdir())) == 3


# ---- full and read-only -----------------------------------------------------------------------

@pytest.mark.parametrize("code, remedy", [(errno.ENOSPC, "free some space"), (errno.EIO, "check"),
                                          (errno.EROFS, "right to write")])
@pytest.mark.parametrize("name", ["fsync", "replace", "open"])
def test_a_put_that_the_system_refuses_changes_nothing(tmp_path, monkeypatch, name, code, remedy):
    with opened(tmp_path, budget=10) as store:
        store.put("a", b"page a")
        store.get("a")
        before = files(tmp_path)

        def refuse(*args, **kwargs):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(f"os.{name}", refuse)
            with pytest.raises(StoreError, match=remedy):
                store.put("a", b"page 2")
            with pytest.raises(StoreError, match=remedy):
                store.put("b", b"page b")
        assert files(tmp_path) == before and (len(store), store.nbytes) == (1, 6)
        assert store.get("a") == b"page a" and vars(store.stats)["stored"] == 1
        assert store.put("b", b"page b") and store.get("b") == b"page b"
        assert "a" not in store and store.nbytes == 6 and store.stats.evicted == 1


def test_a_put_that_fails_among_its_evictions_changes_nothing(tmp_path, monkeypatch):
    with opened(tmp_path, budget=4) as store:
        for key in "abcd":
            store.put(key, key.encode())
        store.get("a")
        stats, names, delete = vars(store.stats).copy(), files(tmp_path), store._index.delete

        def refuse(key):
            if key == "c":
                raise StoreError("the disk is full")
            delete(key)

        with monkeypatch.context() as patch:
            patch.setattr(store._index, "delete", refuse)
            with pytest.raises(StoreError):
                store.put("e", b"eee")
        assert vars(store.stats) == stats and files(tmp_path) == names
        assert len(store) == store.nbytes == 4
        assert store.put("e", b"eee")  # a was used last
        assert [key for key in "abcde" if key in store] == ["a", "e"]
        assert store.stats.evicted == 3 and store.nbytes == 4


def test_an_index_on_a_full_disk(tmp_path):
    with opened(tmp_path, budget=10) as store:
        store.put("a", b"page a")
        db = store._index._db
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
        stats, names = vars(store.stats).copy(), files(tmp_path)
        with pytest.raises(StoreError, match="full: free some space"):
            store.put("b", b"page b", bytes(100_000))
        assert vars(store.stats) == stats and files(tmp_path) == names and store.nbytes == 6
        assert store.get("a") == b"page a" and "b" not in store
        db.execute("PRAGMA max_page_count = 1000000")
        assert store.put("b", b"page b", bytes(100_000)) and "a" not in store


FULL = """
import resource, sys
from labkit.store import DiskStore
from labkit.errors import StoreError
with DiskStore(sys.argv[1], "d", budget=10**9) as store:
    assert store.put("a", b"a" * 1000)
    full = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
    refused = 0
    for number in range(400):
        try:
            store.put(f"b{number}", b"%d" % number * 900, bytes(200))
        except StoreError as error:
            refused += 1
            assert "\\n" not in str(error), error
    assert refused > 100, refused
    assert store.get("a") == b"a" * 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert store.put("c", b"c" * 100_000) and store.get("c") == b"c" * 100_000
    for number in range(400):
        assert store.get(f"b{number}") in (None, b"%d" % number * 900)
    print(refused, len(store), store.stats.corrupt)
"""


@pytest.mark.parametrize("limit", [500, 2000, 50_000, 200_000])
def test_writes_that_stop_half_way(tmp_path, limit):
    pytest.importorskip("resource", reason="limits of a file's size are POSIX's")
    told = subprocess.run([sys.executable, "-c", FULL, tmp_path, str(limit)], text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert told.returncode == 0, told.stderr
    refused, held, corrupt = map(int, told.stdout.split())
    print(f"files of at most {limit} bytes: {refused} of 400 puts refused, {held} pages held")
    assert corrupt == 0
    with opened(tmp_path, digest="d") as store:
        assert len(store) == held == len(files(tmp_path))


@contextlib.contextmanager
def read_only(folder):
    """A folder that nobody may write to, root included: root asks as somebody else meanwhile."""
    if os.name == "nt":
        pytest.skip("chmod takes no rights from a folder on Windows")
    paths = [folder, *folder.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("state", ["closed", "killed", "a writer is there"])
def test_a_read_only_folder_serves_readers_and_refuses_writers(tmp_path, state):
    folder = tmp_path / "store"
    store = opened(folder)
    store.put("a", b"page")
    if state != "a writer is there":
        store.put("b", b"later")
        if state == "killed":
            shutil.copytree(folder, folder.parent / "copy")
        store.close()
    if state == "killed":
        shutil.rmtree(folder)
        (folder.parent / "copy").rename(folder)
    with read_only(folder):
        if state != "a writer is there":
            with pytest.raises(StoreError, match=r"writ.*reader \(writer=False\)"):
                opened(folder)
        with opened(folder, writer=False) as reader:
            assert reader.get("a") == b"page"
            assert (reader.get("b") == b"later") == (state != "a writer is there")
    store.close()
    with opened(folder) as store:
        assert store.get("a") == b"page"


def test_a_read_only_folder_whose_log_cannot_be_read(tmp_path):
    """Rows in the log may be newer than those in the index: better no answer than an old one."""
    folder, copy = tmp_path / "store", tmp_path / "copy"
    with opened(folder) as store:
        store.put("a", b"page")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm"))
    with read_only(copy):
        with pytest.raises(StoreError, match="permissions"):
            opened(copy, writer=False)
    with opened(copy) as store:
        assert store.get("a") == b"page"


# ---- what is on the disk when ---------------------------------------------------------------

@pytest.mark.skipif(os.name == "nt", reason="Windows syncs no folders")
def test_a_page_is_on_the_disk_before_its_row(tmp_path, monkeypatch):
    """Power may fail at any moment: file, then name, then row, each synced before the next."""
    log, real_fsync, real_replace = [], os.fsync, os.replace
    with opened(tmp_path) as store, opened(tmp_path, writer=False) as reader:

        def fsync(handle):
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            size = path.stat().st_size if path.is_file() else None
            log.append(("sync", path.relative_to(tmp_path.resolve()), size, "a" in reader))
            real_fsync(handle)

        def replace(source, target):
            log.append(("replace", Path(target).relative_to(tmp_path), None, "a" in reader))
            real_replace(source, target)

        if not Path("/proc/self/fd").exists():
            pytest.skip("needs /proc to tell which file is synced")
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", replace)
        payload = b"page" * 1000
        store.put("a", payload)
        assert "a" in reader
        page = page_file("", payload)
        assert log == [
            ("sync", Path("pages"), None, False),  # the name of the new folder
            ("sync", page.with_suffix(".tmp"), 4000, False),
            ("replace", page, None, False),
            ("sync", page.parent, None, False),
        ]
        # The row: SQLite syncs its log at every commit (2 = FULL).
        assert store._index._db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert store._index._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        log.clear()
        for _ in range(10):
            assert store.get("a") == payload
        assert log == [], "reading synced"
