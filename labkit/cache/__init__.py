"""The state a sequence owns: window rings, compressor tails, global KV, look-back."""

from labkit.cache.cache import PAGE_TOKENS, Cache
from labkit.cache.store import GlobalStore, Page

__all__ = ["PAGE_TOKENS", "Cache", "GlobalStore", "Page"]
