"""A map that forgets what was not used for longest, under a budget of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from labkit.errors import StoreError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass
class _Entry(Generic[V]):
    value: V
    size: int
    used: float


class Lru(Generic[K, V]):
    """Values of stated sizes; the least recently used go when the budget or their time is up.

    budget    bytes that all values together may take
    lifetime  seconds from a value's last use until it counts as absent; None: for ever
    clock     what tells the time in seconds, never going back
    on_evict  told (key, value, size, reason) of each value that went by itself, after it went;
              the reason is "budget" or "lifetime"

    `hits` and `misses` count `get`; `evictions` and `expired` count what went for either reason.
    A value whose time is up is a miss at once, but `len`, `nbytes` and iteration still count it
    until `get` meets it or `put` or `expire` sweeps: it does take up memory until then.
    """

    def __init__(self, budget: int, lifetime: float | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 on_evict: Callable[[K, V, int, str], None] | None = None) -> None:
        if budget < 0:
            raise StoreError(f"the budget is {budget} bytes: give 0 or more")
        if lifetime is not None and not lifetime > 0:
            raise StoreError(f"the lifetime is {lifetime} s: give more than 0, or None for ever")
        self.budget, self.lifetime = budget, lifetime
        self.nbytes = 0
        self.hits = self.misses = self.evictions = self.expired = 0
        self._clock, self._on_evict = clock, on_evict
        # A dict keeps its order: a used entry goes out and in again, so the oldest is the first.
        self._entries: dict[K, _Entry[V]] = {}

    def put(self, key: K, value: V, size: int) -> bool:
        """Keep `value`, of `size` bytes, in place of what `key` had; evict until it fits.

        False if it exceeds the budget alone; everything is then as before.
        """
        if size < 0:
            raise StoreError(f"the value of {key!r} has {size} bytes: give 0 or more")
        if size > self.budget:
            return False
        self.expire()
        self.discard(key)
        while self.nbytes + size > self.budget:
            self._evict(next(iter(self._entries)), "budget")
        self._entries[key] = _Entry(value, size, self._clock())
        self.nbytes += size
        return True

    def get(self, key: K) -> V | None:
        """The value, which is now the last used; None on a miss."""
        entry = self._entries.get(key)
        if entry is not None and self._late(entry):
            self._evict(key, "lifetime")
            entry = None
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        entry.used = self._clock()
        self._entries[key] = self._entries.pop(key)
        return entry.value

    def peek(self, key: K) -> V | None:
        """The value, or None, without any trace: neither use nor count."""
        entry = self._entries.get(key)
        return None if entry is None or self._late(entry) else entry.value

    def discard(self, key: K) -> bool:
        """Forget `key`, without telling `on_evict`; whether it was there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.nbytes -= entry.size
        return not self._late(entry)

    def expire(self) -> int:
        """Sweep out every value whose time is up; how many went."""
        went = 0
        while self._entries:
            key, entry = next(iter(self._entries.items()))  # the oldest: the next to expire
            if not self._late(entry):
                break
            self._evict(key, "lifetime")
            went += 1
        return went

    def __contains__(self, key: object) -> bool:
        entry = self._entries.get(key)  # type: ignore[arg-type]
        return entry is not None and not self._late(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """Keys, the least recently used first."""
        return iter(list(self._entries))

    def _late(self, entry: _Entry[V]) -> bool:
        return self.lifetime is not None and self._clock() - entry.used >= self.lifetime

    def _evict(self, key: K, reason: str) -> None:
        entry = self._entries.pop(key)
        self.nbytes -= entry.size
        if reason == "lifetime":
            self.expired += 1
        else:
            self.evictions += 1
        if self._on_evict is not None:
            self._on_evict(key, entry.value, entry.size, reason)
