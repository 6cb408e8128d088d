"""Pages on disk under keys: what `put` acknowledged survives a kill at any point.

A folder holds `pages/ab/<hash>.page`, the payloads named by their hash; `index.sqlite`, which
says what key has which page; and `writer.lock`. A page file is in place before the row that
names it is committed, and the row is gone before the file is removed, so at any moment every row
has its file. What a kill leaves over are files without a row; the next writer sweeps them.
"""

from __future__ import annotations

import errno
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import filelock

from labkit.errors import StoreError
from labkit.store.index import BrokenIndex, Index, Row, set_aside
from labkit.store.pages import PageFiles, content_hash, make_folder, sync_folder

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class StoreStats:
    """What happened since the store was opened.

    Every `get` is a hit or a miss. `corrupt`, `expired` and `evicted` count the entries that went
    for that reason (a reader, who removes nothing, counts how often it met one).
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    expired: int = 0
    evicted: int = 0
    stored: int = 0


def _whole(
    method: Callable[Concatenate[DiskStore, P], T],
) -> Callable[Concatenate[DiskStore, P], T]:
    """A public method: refused when closed, done on an empty index when the old one is damaged."""

    @functools.wraps(method)
    def run(self: DiskStore, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._closed:
            raise StoreError(f"the store {self.folder} was closed: open it again")
        with self._refusals():
            try:
                return method(self, *args, **kwargs)
            except BrokenIndex as error:
                self._index.close()
                self._start_empty(error)
            return method(self, *args, **kwargs)

    return run


class DiskStore:
    """Payloads under keys in a folder, for one writer and any number of readers at a time.

    folder    made where it is missing (by a writer)
    digest    says to which model, tokenizer and page format the pages belong; a folder made with
              another one is refused
    budget    bytes of payload; the least recently used pages go first. The index, and the page
              that is just being written, come on top
    lifetime  seconds from a page's last use until it counts as absent; None: for ever
    writer    False: read only, beside a running writer or on a read-only medium. What a reader
              reads does not count as use
    clock     tells the time in seconds

    A page that is missing, cut or altered is a miss, never wrong bytes. StoreError, in one
    sentence, for what the caller can mend; the store is then as before and stays usable. Any
    thread may call, but only one at a time.
    """

    def __init__(self, folder: str | Path, digest: str, *, budget: int,
                 lifetime: float | None = 72 * 3600, writer: bool = True,
                 clock: Callable[[], float] = time.time) -> None:
        if not isinstance(digest, str) or not digest:
            raise StoreError(f"the digest of a store is {digest!r}: give a text that names model, "
                             f"tokenizer and page format")
        if budget <= 0:
            raise StoreError(f"the budget of a store is {budget} bytes: give at least one page's")
        if lifetime is not None and not lifetime > 0:
            raise StoreError(f"the lifetime of a store is {lifetime} s: give more than 0, or None")
        self.folder, self.digest = Path(folder), digest
        self.budget, self.lifetime, self.writer = budget, lifetime, writer
        self.stats = StoreStats()
        self._clock = clock
        self._files = PageFiles(self.folder / "pages")
        self._path = self.folder / "index.sqlite"
        # Uses that are not in the index yet, so that reading costs no write: time and turn.
        self._uses: dict[str, tuple[float, int]] = {}
        self._turn = 0
        self._bytes = 0
        self._closed = True
        with self._refusals():
            if writer:
                make_folder(self._files.folder)
                self._lock = self._locked()
            try:
                self._open()
            except BrokenIndex as error:
                self._start_empty(error)
            except BaseException:
                self._unlock()
                raise
        self._closed = False

    def close(self) -> None:
        """Note the last uses and let the next writer in; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._uses:
                with suppress(StoreError):  # they only steer what is evicted first
                    with self._index.transaction():
                        self._index.touch(self._uses)
        finally:
            self._index.close()
            self._unlock()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- what a caller does ---------------------------------------------------------------

    @_whole
    def put(self, key: str, payload: bytes, meta: bytes = b"") -> bool:
        """Keep a page under `key`, in place of what it had; True when it is safe on the disk.

        False if the page alone exceeds the budget; everything is then as before.
        """
        self._may_write()
        if not isinstance(key, str) or not _encodes(key):
            raise StoreError(f"the key {key!r} is no text: give a string that UTF-8 can hold")
        if not isinstance(payload, bytes) or not isinstance(meta, bytes):
            raise StoreError(f"payload and meta of the page {key!r} must be bytes, not "
                             f"{type(payload).__name__} and {type(meta).__name__}")
        size = len(payload)
        if size > self.budget:
            return False
        hash, now = content_hash(payload), float(self._clock())
        try:
            # A file that a row names has been synced; it is trusted as far as it can be read.
            if not self._index.holds(hash) or self._files.read(hash, size) is None:
                self._files.write(hash, payload)
            with self._change() as gone:
                self._index.touch(self._uses)
                self._uses = {}
                if (old := self._index.find(key)) is not None:
                    self._delete(old, gone)
                if not self._index.holds(hash):
                    self._bytes += size
                self._turn += 1
                self._index.insert(Row.sealed(key, meta, hash, size, now, self._turn))
                self._trim(now, gone)
                self.stats.stored += 1
        except BaseException:
            with suppress(StoreError):
                if not self._index.holds(hash):
                    self._files.remove(hash)
            raise
        return True

    @_whole
    def get(self, key: str) -> bytes | None:
        """The payload, every byte checked against its hash; None on a miss."""
        row, fresh, fault = None, self._find(key), ""
        # A reader's row may be old news by the time it looks for the file: then look again.
        while fresh is not None and fresh != row:
            row, now = fresh, float(self._clock())
            if fault := self._fault(row, now):
                break
            payload = self._files.read(row.hash, row.size)
            if payload is not None:
                self.stats.hits += 1
                if self.writer:
                    self._turn += 1
                    self._uses[key] = (now, self._turn)
                return payload
            fresh, fault = self._find(key), "corrupt"
        self._miss(fresh, fault)
        return None

    @_whole
    def meta(self, key: str) -> bytes | None:
        """What `put` was given beside the payload; None if the key is absent. No use, no count."""
        row = self._find(key)
        return None if row is None or self._fault(row, self._clock()) else row.meta

    @_whole
    def items(self) -> Iterator[tuple[str, bytes, int]]:
        """(key, meta, bytes of payload) of all pages that have not expired, as of this call."""
        now = self._clock()
        rows = (row for row in self._index.rows() if not self._fault(row, now))
        return iter([(row.key, row.meta, row.size) for row in rows])

    @_whole
    def discard(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        self._may_write()
        row = self._find(key)
        if row is None:
            return False
        fault = self._fault(row, self._clock())
        self._forget(row)
        return not fault

    @_whole
    def __contains__(self, key: object) -> bool:
        row = self._find(key) if isinstance(key, str) else None
        return row is not None and not self._fault(row, self._clock())

    @_whole
    def __len__(self) -> int:
        """Keys in the index, expired ones that were not swept yet included."""
        return self._index.count()

    @property
    def nbytes(self) -> int:
        """Bytes of payload on disk; a page that several keys share counts once."""
        return self._nbytes()

    @_whole
    def _nbytes(self) -> int:
        return self._bytes if self.writer else self._index.nbytes()

    # ---- rows and files -------------------------------------------------------------------

    def _find(self, key: str) -> Row | None:
        return self._index.find(key) if _encodes(key) else None

    def _fault(self, row: Row, now: float) -> str:
        """Why a row counts as absent: "corrupt", "expired", or "" if it does not."""
        if not row.sound:
            return "corrupt"
        used = self._uses.get(row.key, (row.used,))[0]
        return "expired" if self.lifetime is not None and now - used >= self.lifetime else ""

    def _miss(self, row: Row | None, fault: str) -> None:
        """Count a miss; a writer drops the row that is to blame."""
        if row is not None and self.writer:
            try:
                self._forget(row)
            except BrokenIndex:
                raise
            except StoreError:
                pass  # a full disk takes no deletion either: the row stays and misses again
        if row is not None:
            self._count(fault)
        self.stats.misses += 1

    @contextmanager
    def _change(self) -> Iterator[list[str]]:
        """A transaction, and all that must be undone with it.

        Its body collects hashes of deleted rows; their files go when the rows are gone for good.
        """
        gone: list[str] = []
        before = self._bytes, self._uses, vars(self.stats).copy()
        try:
            with self._index.transaction():
                yield gone
                gone = [hash for hash in gone if not self._index.holds(hash)]
        except BaseException:
            self._bytes, self._uses, stats = before
            vars(self.stats).update(stats)
            raise
        for hash in gone:
            self._files.remove(hash)

    def _delete(self, row: Row, gone: list[str]) -> None:
        self._index.delete(row.key)
        if not row.sound:  # it lies about its page: count anew, and leave the file to a sweep
            self._bytes = self._index.nbytes()
        elif not self._index.holds(row.hash):
            self._bytes -= row.size
            gone.append(row.hash)

    def _forget(self, row: Row) -> None:
        with self._change() as gone:
            self._delete(row, gone)
        self._uses.pop(row.key, None)

    def _trim(self, now: float, gone: list[str]) -> None:
        """Delete what expired, then the oldest until the budget holds."""
        while (row := self._index.oldest()) is not None:
            fault = self._fault(row, now)
            if not fault and self._bytes <= self.budget:
                break
            self._delete(row, gone)
            self._count(fault or "evicted")

    def _count(self, reason: str) -> None:
        setattr(self.stats, reason, getattr(self.stats, reason) + 1)

    # ---- opening --------------------------------------------------------------------------

    def _locked(self) -> filelock.BaseFileLock:
        lock = filelock.FileLock(self.folder / "writer.lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise StoreError(f"another writer has the store {self.folder} open: close that one "
                             f"first, or open the store as a reader (writer=False)") from None
        return lock

    def _unlock(self) -> None:
        if self.writer:
            self._lock.release()

    def _open(self) -> None:
        """Open the index; a writer drops what is damaged or expired, and files without a row."""
        self._index = Index(self._path, self.digest, self.writer)
        if not self.writer:
            return
        try:
            sync_folder(self.folder)
            now = float(self._clock())
            with self._change() as gone:
                self._index.not_after(now)
                faults = {}
                for row in self._index.rows():
                    if fault := self._fault(row, now):
                        faults[row.key] = fault
                    else:
                        self._turn = max(self._turn, row.turn)
                for key, fault in faults.items():
                    self._index.delete(key)
                    self._count(fault)
                self._bytes = self._index.nbytes()
                self._trim(now, gone)
            self._files.sweep(self._index.hashes())
        except BaseException:
            self._index.close()
            raise

    def _start_empty(self, error: BrokenIndex) -> None:
        """Set a damaged index aside and open a new one; a reader gives up."""
        try:
            if not self.writer:
                raise StoreError(f"{error}: open the store as a writer, which starts it anew"
                                 ) from error
            name = set_aside(self._path).name
            self._uses = {}
            self._open()
            warnings.warn(f"{error}; it was renamed to {name}, and the store starts empty",
                          RuntimeWarning, stacklevel=3)
        except BaseException:
            self._closed = True
            self._unlock()
            raise

    def _may_write(self) -> None:
        if not self.writer:
            raise StoreError(f"the store {self.folder} is open for reading: open it with "
                             f"writer=True to change it")

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """What the system refuses, as one sentence with a remedy."""
        try:
            yield
        except OSError as error:
            told = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                remedy = "free some space, and give the store a smaller budget"
            elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                remedy = ("give yourself the right to write, name another folder, or open it as a "
                          "reader (writer=False)")
            else:
                remedy = "check the disk"
            raise StoreError(f"the store {self.folder}: {told}; {remedy}") from error


def _encodes(key: str) -> bool:
    """Whether UTF-8 can hold the text (a lone surrogate it cannot)."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
