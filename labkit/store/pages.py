"""Page files: one payload a file, named by its hash, in place whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

# What a sweep may remove; whatever else lies in the folder is not ours.
FOLDER = re.compile(r"[0-9a-f]{2}")
FILE = re.compile(r"[0-9a-f]{64}\.(page|tmp)")
# A page that fails to open or read like this is lost; any other failure is not the page's fault.
LOST = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO}


def content_hash(payload: bytes) -> str:
    """blake2b-256 of the payload, as 64 hexadecimal digits."""
    return hashlib.blake2b(payload, digest_size=32).hexdigest()


class PageFiles:
    """The files `<folder>/ab/<hash>.page`, where ab are the hash's first two digits.

    Methods raise OSError where the system does.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, hash: str) -> Path:
        return self.folder / hash[:2] / f"{hash}.page"

    def write(self, hash: str, payload: bytes) -> None:
        """Put a payload in place; on return both the file and its name are on the disk."""
        path = self.path(hash)
        temporary = path.with_suffix(".tmp")
        make_folder(path.parent)
        try:
            with open(temporary, "wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(path.parent)

    def read(self, hash: str, size: int) -> bytes | None:
        """The payload; None if the file is missing, cut, longer, or holds anything else."""
        try:
            with open(self.path(hash), "rb") as file:
                payload = file.read(size + 1)
        except OSError as error:
            if error.errno in LOST:
                return None
            raise
        return payload if len(payload) == size and content_hash(payload) == hash else None

    def remove(self, hash: str) -> None:
        # Where the system refuses (Windows, while a reader has the file open), the file stays as
        # an orphan for the next sweep: no row names it any more.
        with suppress(OSError):
            self.path(hash).unlink()

    def sweep(self, keep: Collection[str]) -> int:
        """Remove temporary files and pages whose hash is not in `keep`; how many went."""
        went = 0
        for folder in os.scandir(self.folder):
            if not (FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
                continue
            for file in os.scandir(folder):
                name, _, kind = file.name.partition(".")
                if FILE.fullmatch(file.name) and (kind == "tmp" or name not in keep):
                    with suppress(OSError):
                        os.unlink(file)
                        went += 1
        return went


def make_folder(folder: Path) -> None:
    """Like mkdir -p, and every new name is on the disk on return."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk, where the system knows how (Windows does not)."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing
            raise
    finally:
        os.close(handle)
