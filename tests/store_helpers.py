"""What the tests of the store share."""

import contextlib
import hashlib
import tempfile
from pathlib import Path

from store_child import DIGEST, MEMORY

from labkit.store import DiskStore


@contextlib.contextmanager
def in_memory():
    """A folder that costs no disk, and that anybody may enter."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


class Clock:
    """Stands until it is moved."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def opened(folder, *, digest=DIGEST, budget=10**9, **options):
    return DiskStore(folder, digest, budget=budget, **options)


def files(folder):
    """Names of everything under pages/."""
    return sorted(path.name for path in Path(folder, "pages").rglob("*") if path.is_file())


def page_file(folder, payload):
    hash = hashlib.blake2b(payload, digest_size=32).hexdigest()
    return Path(folder, "pages", hash[:2], f"{hash}.page")
