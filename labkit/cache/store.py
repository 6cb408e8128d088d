"""The global KV of one Full layer: compressed entries and their index keys, growing."""

from __future__ import annotations

import torch


class GlobalStore:
    """`kv` [B, S, d] and `index_keys` [B, S, index_head_dim] with room to grow.

    `count[b]` entries of row b are filled; what lies behind them is void and never visible.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.count = torch.zeros(batch, dtype=torch.int64, device=device)
        self._kv: torch.Tensor | None = None
        self._keys: torch.Tensor | None = None
        self.length = 0  # filled entries of the fullest row

    @property
    def kv(self) -> torch.Tensor:
        assert self._kv is not None, "nothing was written yet"
        return self._kv[:, : self.length]

    @property
    def index_keys(self) -> torch.Tensor:
        assert self._keys is not None, "nothing was written yet"
        return self._keys[:, : self.length]

    def append(self, kv: torch.Tensor, keys: torch.Tensor, fresh: torch.Tensor) -> None:
        """Write the first `fresh[b]` rows of kv [B,G,d], keys [B,G,di] behind row b's entries."""
        total = self.count + fresh
        length = int(total.max())
        if self._kv is None or self._keys is None:
            # First write: take the tensors as they are (no copy, and autograd sees through).
            self._kv, self._keys = kv, keys
        elif length:
            self._kv = self._room(self._kv, length)
            self._keys = self._room(self._keys, length)
            row, group = (torch.arange(kv.shape[1], device=kv.device) < fresh[:, None]).nonzero(
                as_tuple=True)
            slot = self.count[row] + group
            self._kv[row, slot] = kv[row, group]
            self._keys[row, slot] = keys[row, group]
        self.count, self.length = total, length

    def nbytes(self) -> list[tuple[str, int, int]]:
        """(part, bytes filled, bytes allocated) of entries and of index keys."""
        if self._kv is None or self._keys is None:
            return []
        return [("global_kv", self.kv.nbytes, self._kv.untyped_storage().nbytes()),
                ("index_keys", self.index_keys.nbytes, self._keys.untyped_storage().nbytes())]

    @staticmethod
    def _room(old: torch.Tensor, length: int) -> torch.Tensor:
        """`old` itself if `length` entries fit, else a copy of at least twice the size."""
        # A tensor that autograd saw may be needed as it is for the backward pass: writing into
        # it would spoil the gradient, so it is copied at every append.
        if old.shape[1] >= length and not old.requires_grad:
            return old
        size = max(length, 2 * old.shape[1], 16)
        new = old.new_zeros(old.shape[0], size, old.shape[2])
        new[:, : old.shape[1]] = old
        return new
