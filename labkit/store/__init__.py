"""Pages of KV cache as bytes under keys: in memory under a budget, and on disk for days.

Nothing here knows what a page holds, and nothing here imports torch.
"""

from labkit.store.disk import DiskStore, StoreStats
from labkit.store.lru import Lru

__all__ = ["DiskStore", "Lru", "StoreStats"]
