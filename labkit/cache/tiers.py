"""Where blocks of global pages live when no sequence is running: device, host, disk.

The report keeps global KV for days on SSD or in host memory, and window state for minutes in a
small pool; losing a window costs one replay, losing a block costs reading its tokens again.
Nothing here may stop the service: what cannot be stored or read back is a miss.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from labkit.cache.blocks import Block, WindowState, block_nbytes, from_bytes, to_bytes
from labkit.cache.cache import Cache
from labkit.errors import StoreError
from labkit.store import DiskStore, Lru

GLOBAL_LIFETIME = 72 * 3600.0   # seconds; the report's "at least 72 h"
WINDOW_LIFETIME = 5 * 60.0      # the report says minutes
WINDOW_SHARE = 0.10             # of the host's memory, the report's figure


@dataclass
class TierStats:
    """Blocks found in each tier, not found, found spoilt, and what the disk refused."""

    device: int = 0
    host: int = 0
    disk: int = 0
    misses: int = 0
    spoilt: int = 0
    refused: int = 0
    moved_to_host: int = 0
    lost: int = 0
    complaints: list[str] = field(default_factory=list)


class Tiers:
    """Blocks by key: on the device by reference, evicted to the host as bytes, written to disk.

    template  an empty cache: the form, sizes and device of the blocks
    device, host  budgets in bytes; disk: an open `DiskStore`, or None
    on_lost   told the key of a block that no tier holds any more
    A block is written to disk when it is put, so that a later eviction or a crash loses nothing.
    """

    def __init__(self, template: Cache, device: int, host: int, disk: DiskStore | None = None,
                 lifetime: float = GLOBAL_LIFETIME, clock: Callable[[], float] = time.monotonic,
                 on_lost: Callable[[str], object] | None = None) -> None:
        self.template, self.disk, self.stats = template, disk, TierStats()
        self._on_lost = on_lost
        self.device: Lru[str, Block] = Lru(device, lifetime, clock, self._from_device)
        self.host: Lru[str, bytes] = Lru(host, lifetime, clock, self._from_host)

    def put(self, key: str, block: Block, meta: bytes = b"") -> None:
        """Keep a block; meta goes to disk with it. What is known under the key already stays."""
        if self.disk is not None and not self._on_disk(key):
            try:
                if not self.disk.put(key, to_bytes(block), meta):
                    self._refuse(f"a block of {block_nbytes(block):,} bytes exceeds the disk "
                                 "budget: it stays in memory only")
            except StoreError as error:
                self._refuse(str(error))
        if self.device.get(key) is None and key not in self.host:
            self._hold(key, block)

    def get(self, key: str) -> tuple[Block, str] | None:
        """The block and the tier that had it, which is promoted to the device; None on a miss."""
        block = self.device.get(key)
        if block is not None:
            self.stats.device += 1
            return block, "device"
        for tier in ("host", "disk"):
            payload = self.host.get(key) if tier == "host" else self._read(key)
            if payload is None:
                continue
            found = from_bytes(payload, self.template)
            if found is None:
                self.stats.spoilt += 1
                continue
            setattr(self.stats, tier, getattr(self.stats, tier) + 1)
            self.host.discard(key)
            self._hold(key, found)
            return found, tier
        self.stats.misses += 1
        return None

    def __contains__(self, key: str) -> bool:
        return key in self.device or key in self.host or self._on_disk(key)

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by tier."""
        disk = 0
        if self.disk is not None:
            try:
                disk = self.disk.nbytes
            except StoreError as error:
                self._refuse(str(error))
        return {"device": self.device.nbytes, "host": self.host.nbytes, "disk": disk}

    # ---------------------------------------------------------------- between the tiers
    def _hold(self, key: str, block: Block) -> None:
        size = block_nbytes(block)
        if not self.device.put(key, block, size):
            self._to_host(key, block)  # the device's budget is below one block

    def _from_device(self, key: str, block: Block, size: int, reason: str) -> None:
        if reason == "budget":
            self._to_host(key, block)
        else:
            self._check_lost(key)

    def _to_host(self, key: str, block: Block) -> None:
        payload = to_bytes(block)
        if self.host.put(key, payload, len(payload)):
            self.stats.moved_to_host += 1
        else:
            self._check_lost(key)

    def _from_host(self, key: str, payload: bytes, size: int, reason: str) -> None:
        self._check_lost(key)

    def _check_lost(self, key: str) -> None:
        if key not in self:
            self.stats.lost += 1
            if self._on_lost is not None:
                self._on_lost(key)

    def _on_disk(self, key: str) -> bool:
        try:
            return self.disk is not None and key in self.disk
        except StoreError as error:
            self._refuse(str(error))
            return False

    def _read(self, key: str) -> bytes | None:
        try:
            return self.disk.get(key) if self.disk is not None else None
        except StoreError as error:
            self._refuse(str(error))
            return None

    def _refuse(self, complaint: str) -> None:
        """Say it once; the service goes on without the disk's help."""
        self.stats.refused += 1
        if complaint not in self.stats.complaints:
            self.stats.complaints = [*self.stats.complaints[-9:], complaint]
            warnings.warn(f"{complaint}; texts are computed again where needed", stacklevel=4)


class WindowPool:
    """Window states by key, for minutes, under their own budget: a share of the host's memory."""

    def __init__(self, host_memory: int, lifetime: float = WINDOW_LIFETIME,
                 clock: Callable[[], float] = time.monotonic,
                 on_lost: Callable[[str], object] | None = None) -> None:
        self._states: Lru[str, WindowState] = Lru(
            int(WINDOW_SHARE * host_memory), lifetime, clock, self._lost)
        self._on_lost = on_lost

    def _lost(self, key: str, state: WindowState, size: int, reason: str) -> None:
        if self._on_lost is not None:
            self._on_lost(key)

    def put(self, key: str, state: WindowState) -> bool:
        """False if it alone exceeds the budget."""
        return self._states.put(key, state, state.nbytes)

    def get(self, key: str) -> WindowState | None:
        return self._states.get(key)

    @property
    def nbytes(self) -> int:
        self._states.expire()
        return self._states.nbytes

    @property
    def evictions(self) -> int:
        return self._states.evictions + self._states.expired

    def __len__(self) -> int:
        self._states.expire()
        return len(self._states)
