"""The index of a disk store: which key has which page, in SQLite."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from labkit.errors import StoreError

FORMAT = "1"
SCHEMA = [
    "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "CREATE TABLE pages (key TEXT PRIMARY KEY, meta BLOB, hash TEXT, size INTEGER, stored REAL, "
    "used REAL, turn INTEGER, seal BLOB) WITHOUT ROWID",
    "CREATE INDEX pages_hash ON pages (hash)",
    "CREATE INDEX pages_turn ON pages (turn)",
]
COLUMNS = "key, meta, hash, size, stored, used, turn, seal"
# SQLite's codes for a world that refuses (full, read-only, locked ...), not for a damaged file.
REFUSED = {
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS, sqlite3.SQLITE_AUTH,
}
PATIENCE = 10.0  # seconds to wait while another connection opens, closes or recovers the log


class BrokenIndex(StoreError):
    """The file is no index, or a damaged one."""

    def __init__(self, path: Path, why: object) -> None:
        super().__init__(f"the index {path} is damaged ({' '.join(str(why).split())})")


class Row(NamedTuple):
    """One key's page; `turn` orders the uses, since a clock may stand still or go back."""

    key: str
    meta: bytes
    hash: str
    size: int
    stored: float
    used: float
    turn: int
    seal: bytes

    @classmethod
    def sealed(cls, key: str, meta: bytes, hash: str, size: int, now: float, turn: int) -> Row:
        return cls(key, meta, hash, size, now, now, turn, _seal(key, meta, hash, size, now))

    @property
    def sound(self) -> bool:
        """Whether the row is as it was written: SQLite would not notice a flipped bit in it."""
        types = (str, bytes, str, int, float, float, int, bytes)
        if not all(isinstance(value, kind) for value, kind in zip(self, types, strict=True)):
            return False
        return self.seal == _seal(self.key, self.meta, self.hash, self.size, self.stored)


def _seal(key: str, meta: bytes, hash: str, size: int, stored: float) -> bytes:
    """Checksum of all that does not change in a row's life."""
    # ascii() writes the five unambiguously, in the same way in every version of Python.
    text = ascii((key, meta, hash, size, stored))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Index:
    """An open index. BrokenIndex for a damaged file, StoreError where the system refuses."""

    def __init__(self, path: Path, digest: str, writer: bool) -> None:
        self.path = path
        self._db = self._write() if writer else self._read()
        try:
            with self._telling():
                if writer:
                    self._prepare(digest)
                self._check(digest)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()

    # ---- opening ------------------------------------------------------------------------

    def _connect(self, mode: str) -> sqlite3.Connection:
        # No transactions but our own; any thread, one at a time.
        return sqlite3.connect(f"{self.path.absolute().as_uri()}?{mode}", uri=True,
                               timeout=PATIENCE, isolation_level=None, check_same_thread=False)

    def _write(self) -> sqlite3.Connection:
        with self._telling():
            return self._connect("mode=rwc")

    def _read(self) -> sqlite3.Connection:
        if not self.path.exists():
            raise StoreError(f"there is no store in {self.path.parent}: open it as a writer first")
        try:
            return self._reading("mode=ro")
        except BrokenIndex:
            raise
        except StoreError:
            # On a read-only medium SQLite cannot put its lock file beside the index. Nobody else
            # can write there either, so it may read without; only a log would be overlooked.
            log = _beside(self.path, "-wal")
            if log.exists() and log.stat().st_size:
                raise
            return self._reading("mode=ro&immutable=1")

    def _reading(self, mode: str) -> sqlite3.Connection:
        with self._telling():
            db = self._connect(mode)
            try:
                db.execute("SELECT 1 FROM sqlite_master").fetchone()  # the first to touch the file
            except BaseException:
                db.close()
                raise
            return db

    def _prepare(self, digest: str) -> None:
        db = self._db
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a commit returns when it is on the disk
        if db.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
            with self.transaction():
                for statement in SCHEMA:
                    db.execute(statement)
                db.executemany("INSERT INTO about VALUES (?, ?)",
                               [("digest", digest), ("format", FORMAT)])
        # A page beside its place in a tree would never be evicted.
        found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise BrokenIndex(self.path, found)

    def _check(self, digest: str) -> None:
        folder = self.path.parent
        schema = {text for (text,) in self._db.execute("SELECT sql FROM sqlite_master")}
        if not schema:
            raise StoreError(f"the store {folder} is still being made: try again")
        about = dict(self._db.execute("SELECT name, value FROM about"))
        found, version = about.get("digest"), about.get("format")
        if found is None or version is None:
            raise BrokenIndex(self.path, "it does not say what it belongs to")
        if version != FORMAT:
            raise StoreError(f"the store {folder} has format {version}, not {FORMAT}: use the "
                             f"labkit that made it, or delete the folder")
        if found != digest:
            raise StoreError(f"the store {folder} holds pages of another model, tokenizer or page "
                             f"format (digest {found}, not {digest}): name another folder, or "
                             f"delete this one")
        if schema != set(SCHEMA):  # a flipped bit in a type would change what columns hold
            raise BrokenIndex(self.path, "its tables are not ours")

    # ---- rows ---------------------------------------------------------------------------

    def find(self, key: str) -> Row | None:
        return self._first(f"SELECT {COLUMNS} FROM pages WHERE key = ?", key)

    def oldest(self) -> Row | None:
        return self._first(f"SELECT {COLUMNS} FROM pages ORDER BY turn LIMIT 1")

    def rows(self) -> Iterator[Row]:
        """All rows, the least recently used first; nothing may be written meanwhile."""
        with self._telling():
            for row in self._db.execute(f"SELECT {COLUMNS} FROM pages ORDER BY turn"):
                yield Row(*row)

    def holds(self, hash: str) -> bool:
        with self._telling():
            found = self._db.execute("SELECT 1 FROM pages WHERE hash = ? LIMIT 1", (hash,))
            return found.fetchone() is not None

    def count(self) -> int:
        with self._telling():
            return self._db.execute("SELECT count(*) FROM pages").fetchone()[0]

    def nbytes(self) -> int:
        """Bytes of all pages; one that several keys share counts once."""
        with self._telling():
            distinct = "SELECT DISTINCT hash, size FROM pages"
            return int(self._db.execute(f"SELECT total(size) FROM ({distinct})").fetchone()[0])

    def hashes(self) -> set[str]:
        with self._telling():
            return {hash for (hash,) in self._db.execute("SELECT DISTINCT hash FROM pages")}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside are committed together, on the disk on return, or none is."""
        with self._telling():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def insert(self, row: Row) -> None:
        with self._telling():
            self._db.execute(f"INSERT INTO pages ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def delete(self, key: str) -> None:
        with self._telling():
            if self._db.execute("DELETE FROM pages WHERE key = ?", (key,)).rowcount != 1:
                raise BrokenIndex(self.path, "a row is out of order")

    def touch(self, uses: dict[str, tuple[float, int]]) -> None:
        """Note the last use, (time, turn), of each key."""
        with self._telling():
            self._db.executemany("UPDATE pages SET used = ?, turn = ? WHERE key = ?",
                                 [(used, turn, key) for key, (used, turn) in uses.items()])

    def not_after(self, now: float) -> None:
        """Uses noted in the future (the clock was set back) become uses of `now`."""
        with self._telling():
            self._db.execute("UPDATE pages SET used = ? WHERE used > ?", (now, now))

    def _first(self, statement: str, *values: str) -> Row | None:
        with self._telling():
            row = self._db.execute(statement, values).fetchone()
        return None if row is None else Row(*row)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a mistake of this file
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is not None and code & 0xFF in REFUSED:
                raise StoreError(_refusal(self.path, code & 0xFF, error)) from error
            raise BrokenIndex(self.path, error) from error
        except UnicodeDecodeError as error:  # sqlite3 quoted what it had found in the file
            raise BrokenIndex(self.path, error) from error


def _refusal(path: Path, code: int, error: Exception) -> str:
    folder = path.parent
    if code == sqlite3.SQLITE_FULL:
        return (f"the disk of the store {folder} is full: free some space, and give the store a "
                f"smaller budget")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return (f"the index of the store {folder} cannot be opened as asked ({error}): check the "
                f"permissions of the folder and its files, or open it as a reader (writer=False)")
    return f"the system refused to read or write the index of the store {folder}: {error}"


def set_aside(path: Path) -> Path:
    """Rename a closed index to index.broken-N, with its log; the new path. OSError if it fails."""
    number = 1
    while (target := path.with_name(f"index.broken-{number}")).exists():
        number += 1
    # Log and lock file go too: a reader may still use them, together with the old index. The
    # index goes first: one that is left without its log would show old rows, while SQLite throws
    # a log away that is left without its index.
    path.replace(target)
    if (log := _beside(path, "-wal")).exists():
        log.replace(_beside(target, "-wal"))
    _beside(path, "-shm").unlink(missing_ok=True)
    return target


def _beside(path: Path, side: str) -> Path:
    """SQLite's log (-wal) and lock file (-shm) beside an index."""
    return path.with_name(path.name + side)
