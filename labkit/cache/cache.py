"""The state that a batch of sequences owns between forward passes.

A fresh `Cache` is an empty past: a prefill is a pass over it, a decode step a pass of one
token over a filled one, with the same code. Rows advance by their own number of live tokens.
"""

from __future__ import annotations

import copy

import torch

from labkit.cache.store import GlobalStore
from labkit.cache.tail import Tail
from labkit.cache.window import WindowRing
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.numerics.precision import wide


class Cache:
    """Rings, compressor tails, global stores and Engram look-back of `batch` sequences.

    lengths  [B] int64: tokens seen so far, per row
    windows  per layer a `WindowRing`
    stores   per Full layer a `GlobalStore`; tails: per Full layer with ratio > 1 a `Tail`
    classes  [B, N-1] int64: Engram classes of the last tokens, oldest first, -1 = blocked
    """

    def __init__(self, config: ModelConfig, batch: int = 1, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self.config = config
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.windows = [
            WindowRing(batch, config.sliding_window, config.head_dim, dtype, device)
            for _ in range(config.num_hidden_layers)
        ]
        self.stores: dict[int, GlobalStore] = {}
        self.tails: dict[int, Tail] = {}
        fp32 = wide(torch.empty(0, dtype=dtype)).dtype
        for role in config.roles:
            if role.kind == "full":
                self.stores[role.layer] = GlobalStore(batch, device)
                if role.ratio > 1:  # the compressor's products are fp32 also in a bf16 model
                    width = 2 * config.head_dim
                    self.tails[role.layer] = Tail(batch, role.ratio, width, fp32, device)
        self.classes = torch.full((batch, config.engram_max_ngram_size - 1), -1, device=device)
        self._interrupted = False

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def begin(self) -> None:
        """Mark a pass as running; a pass that was cut short leaves the cache unusable."""
        if self._interrupted:
            raise InputError("this cache was interrupted in the middle of a pass: restore a "
                             "snapshot or start a new session")
        self._interrupted = True

    def commit(self, count: torch.Tensor) -> None:
        """End a pass in which row b took in `count[b]` tokens."""
        self.lengths = self.lengths + count
        self._interrupted = False

    def snapshot(self) -> Cache:
        """An independent copy; later passes change neither through the other."""
        if self._interrupted:
            raise InputError("an interrupted cache cannot be saved: start a new session")
        twin = copy.copy(self)
        twin.windows = [_clone(w) for w in self.windows]
        twin.tails = {layer: _clone(t) for layer, t in self.tails.items()}
        twin.stores = {layer: _clone(s) for layer, s in self.stores.items()}
        twin.lengths, twin.classes = self.lengths.clone(), self.classes.clone()
        return twin

    def nbytes(self) -> dict[str, int]:
        """Bytes really allocated, by part (each tensor's storage, not a formula)."""
        used = {"global_kv": 0, "index_keys": 0, "window": 0, "remainder": 0, "engram": 0,
                "draft": 0, "reserved": 0}
        for store in self.stores.values():
            for part, filled, allocated in store.nbytes():
                used[part] += filled
                used["reserved"] += allocated - filled
        used["window"] = sum(w.buffer.untyped_storage().nbytes() for w in self.windows)
        used["remainder"] = sum(t.buffer.untyped_storage().nbytes() for t in self.tails.values())
        used["engram"] = self.classes.untyped_storage().nbytes()
        return used


def _clone(part):  # type: ignore[no-untyped-def]
    twin = copy.copy(part)
    for name, value in vars(part).items():
        if isinstance(value, torch.Tensor):
            setattr(twin, name, value.clone())
    return twin
