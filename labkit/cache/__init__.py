"""The state a sequence owns: window rings, compressor tails, global KV, look-back."""

from labkit.cache.cache import Cache

__all__ = ["Cache"]
