"""What the tests of the store share."""

import hashlib
from pathlib import Path

from labkit.store import DiskStore

DIGEST = "model, tokenizer, format"


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
