"""Caches filled without a model, to see what they weigh."""

from __future__ import annotations

import torch

from labkit.cache.cache import Cache


def fill(cache: Cache, tokens: int, before: int = 0) -> None:
    """Random entries of `tokens` more tokens in every store, behind those of `before` tokens."""
    seeded = torch.Generator().manual_seed(before)
    c = cache.config
    for layer, store in cache.stores.items():
        ratio = c.compress_ratios[layer]
        first, new = before // ratio, (before + tokens) // ratio - before // ratio
        store.begin()
        store.append(torch.randn(cache.batch, new, c.head_dim, generator=seeded),
                     torch.randn(cache.batch, new, c.index_head_dim, generator=seeded),
                     torch.tensor([first] * cache.batch), torch.tensor([new] * cache.batch))
        store.commit([before + tokens] * cache.batch, ratio)
