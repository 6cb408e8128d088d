"""Sequences enter and leave a batch: the rows of several caches become those of another.

Pages of global KV are shared and copied on write, as in a fork; only the recent rows (windows,
remainders, look-back) are copied, which are as many for a long text as for a short one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from labkit.cache.cache import Cache
from labkit.cache.store import GlobalStore
from labkit.errors import InputError

KIND = ("config", "form", "rounding", "dtype", "device", "page_tokens", "stale_index_keys")
"""What caches must have in common to become one."""


def join(caches: Sequence[Cache]) -> Cache:
    """One cache of the rows of all, in order. The caches stay usable and feel nothing of it.

    InputError without a cache, or for caches of different kinds.
    """
    return gather(caches, range(sum(cache.batch for cache in caches)))


def select(cache: Cache, rows: Sequence[int]) -> Cache:
    """A cache of some rows in the given order; a row may occur twice, as a fork of itself.

    InputError for a row that there is not, or none.
    """
    return gather([cache], rows)


def gather(caches: Sequence[Cache], rows: Sequence[int]) -> Cache:
    """A cache of some rows of several: those of the first count from 0, the others' go on.

    The last pass of neither can be rewound in it. InputError as in `join` and `select`.
    """
    if not caches:
        raise InputError("there is no cache to join: give at least one")
    first, total = caches[0], sum(cache.batch for cache in caches)
    for cache in caches:
        cache.settle()
        _check_kind(first, cache)
    rows = list(rows)
    wrong = [row for row in rows if not isinstance(row, int) or not 0 <= row < total]
    if wrong or not rows:
        raise InputError(f"there is no row {wrong[0]!r}: the rows are 0..{total - 1}" if wrong else
                         "no row was chosen: a cache holds at least one sequence")
    chosen = torch.tensor(rows, device=first.device)
    twin = copy.copy(first)
    for name in ("windows", "draft_windows"):
        rings = zip(*(getattr(cache, name) for cache in caches), strict=True)
        setattr(twin, name, [type(layer[0]).gathered(layer, chosen) for layer in rings])
    twin.tails = {layer: type(tail).gathered([cache.tails[layer] for cache in caches], chosen)
                  for layer, tail in first.tails.items()}
    twin.stores = {layer: GlobalStore.gathered([cache.stores[layer] for cache in caches], rows)
                   for layer in first.stores}
    twin.look_back = type(first.look_back).gathered([c.look_back for c in caches], chosen)
    tokens = [row for cache in caches for row in cache.tokens]
    twin.tokens = [list(tokens[row]) for row in rows]
    twin.lengths = torch.cat([cache.lengths for cache in caches])[chosen]
    slot = _slot(first)
    twin._slot = None if slot is None else twin.stores[slot]
    twin._last = None
    return twin


def _check_kind(first: Cache, other: Cache) -> None:
    kinds = [{name: getattr(cache, name) for name in KIND}
             | {"draft": bool(cache.draft_windows)} for cache in (first, other)]
    for name, here in kinds[0].items():
        there = kinds[1][name]
        if here != there:
            values = "" if name == "config" else f" ({here} and {there})"
            raise InputError(f"caches that differ in {name}{values} cannot become one: make them "
                             "with new_cache() of the same model and the same options")
    if _slot(first) != _slot(other):
        raise InputError("the rows of these caches would share one stale slot of index keys, which "
                         "holds those of different layers: join them without stale_index_keys")


def _slot(cache: Cache) -> int | None:
    """The layer whose index keys the stale slot holds."""
    return next((layer for layer, store in cache.stores.items() if store is cache._slot), None)
