"""The last rows of a stream: what windows, compressor remainders and look-back have in common.

A part of a cache is never written in place: a pass puts the new rows beside the old ones, and
`commit` takes them over. A pass that is cut short has therefore changed nothing, and a copy of
the part costs no memory until one of the two goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch


class Recent:
    """`rows` [B, n, ...]: the last n rows of every sequence, oldest first."""

    per_sequence: tuple[str, ...] = ("rows",)   # tensors [B, ...]: one place for each sequence

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.begin()

    def begin(self) -> None:
        """Forget what a pass that did not end has left."""
        self._next: torch.Tensor | None = None
        self._both: torch.Tensor | None = None

    def extend(self, new: torch.Tensor, start: torch.Tensor, count: torch.Tensor,
               keep: bool = False) -> torch.Tensor:
        """Put `new` [B,T,...], of which row b has count[b] live ones, behind the old rows.

        Returns both, [B,n+T,...]: column j is position start-n+j. keep: hold them until the next
        pass, so that `rewind` can take some of the new ones back.
        """
        both = torch.cat([self._in_order(start), new], dim=1)
        self._start = start
        self._both = both if keep else None
        self._next = self._last(both, count)
        return both

    def commit(self) -> None:
        """The pass has ended: its rows count from here on."""
        if self._next is not None:
            self.rows = self._next

    def rewind(self, count: torch.Tensor) -> None:
        """As if only count[b] rows had been live in the last pass (which was told to keep)."""
        if self._next is None:
            return  # a part that the model does not use, such as look-back without Engram layers
        assert self._both is not None, "the last pass kept no rows"
        self.rows = self._last(self._both, count)

    def fork(self):  # type: ignore[no-untyped-def]
        """A copy that goes its own way from here."""
        twin = copy.copy(self)
        twin.begin()
        return twin

    @classmethod
    def gathered(cls, parts: Sequence[Self], chosen: torch.Tensor) -> Self:
        """A part of the sequences chosen [n], counted through all parts one after the other."""
        twin = copy.copy(parts[0])
        for name in cls.per_sequence:
            setattr(twin, name, torch.cat([getattr(part, name) for part in parts])[chosen])
        twin.begin()
        return twin

    @property
    def nbytes(self) -> int:
        return self.rows.untyped_storage().nbytes()

    def _in_order(self, start: torch.Tensor) -> torch.Tensor:
        return self.rows

    def _last(self, both: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """The n rows that end with the last live one."""
        columns = count[:, None] + torch.arange(self.rows.shape[1], device=both.device)  # [B,n]
        return take_rows(both, columns)


class LookBack(Recent):
    """[B, N-1] int64: Engram classes of the last tokens, oldest first, -1 = blocked."""


def take_rows(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """rows [B,n,...] at columns [B,m] -> [B,m,...]."""
    B, n = rows.shape[:2]
    places = columns + n * torch.arange(B, device=rows.device)[:, None]
    # Whole rows are copied at once; gathering along a dimension looks every number up by itself.
    return rows.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, columns.shape)
