"""The sliding window of one layer: a ring of the last W key-value vectors."""

from __future__ import annotations

import torch

from labkit.cache.recent import Recent, take_rows
from labkit.numerics.rows import RowCodec


class WindowRing(Recent):
    """Rows [B, W, columns]; the vector of position p lives in slot p mod W.

    One vector serves as key and value of all heads (a single KV head, shared).
    first [B] int64: the lowest position whose vector exists. It is 0 in a sequence that was read
    from its beginning, and higher where a layer was entered in the middle (a replay, a decoder
    that saw the end of the prompt only): what a slot holds for positions below it is void.
    """

    per_sequence = ("rows", "first")

    def __init__(self, batch: int, window: int, codec: RowCodec, device: torch.device) -> None:
        super().__init__(torch.zeros(batch, window, codec.columns, dtype=codec.row_dtype,
                                     device=device))
        self.window, self.codec = window, codec
        self.first = torch.zeros(batch, dtype=torch.int64, device=device)

    def begin(self) -> None:
        super().begin()
        self._first: torch.Tensor | None = None

    def take_in(self, new: torch.Tensor, start: torch.Tensor, count: torch.Tensor,
                enter: torch.Tensor | None = None, keep: bool = False,
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `count[b]` live vectors of `new` [B, T, d], as computed, at position start[b].

        enter [B]: the layer is entered here, at this position, in rows where it is >= 0.
        Returns the rounded vectors [B, W+T, d] in order of position (column j is position
        start-W+j), and start counted from the first position that exists, [B]. Columns below
        that are void; so are columns past a row's live ones.
        """
        self._first = self.first if enter is None else torch.where(enter >= 0, enter, self.first)
        rows = self.extend(self.codec.encode(new), start, count, keep)
        return self.codec.decode(rows), start - self._first

    def read(self, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rounded vectors of positions length[b]-W .. length[b]-1, [B,W,d], and how many of
        them exist, [B]: the last ones."""
        known = (length - self.first).clamp(0, self.window)
        return self.codec.decode(self._in_order(length)), known

    def commit(self) -> None:
        super().commit()
        if self._first is not None:
            self.first = self._first

    def enter(self, position: torch.Tensor) -> None:
        """This pass leaves the layer out: nothing below position[b] will exist."""
        self._first = position

    def _in_order(self, start: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(self.window, device=self.rows.device)
        return take_rows(self.rows, (start[:, None] - self.window + steps) % self.window)

    def _last(self, both: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(self.window, device=both.device)
        end = (self._start + count)[:, None]
        # Slot s gets the last of these W positions that is s mod W.
        return take_rows(both, count[:, None] + (slots - end) % self.window)
