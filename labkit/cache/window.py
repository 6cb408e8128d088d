"""The sliding window of one layer: a ring of the last W key-value vectors."""

from __future__ import annotations

import torch


class WindowRing:
    """Ring buffer [B, W, d]; the vector of position p lives in slot p mod W.

    One vector serves as key and value of all heads (a single KV head, shared).
    """

    def __init__(self, batch: int, window: int, width: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.window = window
        self.buffer = torch.zeros(batch, window, width, dtype=dtype, device=device)

    def extend(self, new: torch.Tensor, start: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Append `count[b]` live vectors of `new` [B, T, d] at position `start[b]`.

        Returns [B, W+T, d] in order of position: column j holds position start-W+j. Columns of
        negative position are void; so are columns past a row's live ones.
        """
        W = self.window
        steps = torch.arange(W, device=new.device)
        slots = (start[:, None] - W + steps) % W                       # [B,W] oldest first
        old = torch.take_along_dim(self.buffer, slots[..., None], dim=1)
        both = torch.cat([old, new], dim=1)                            # [B,W+T,d]
        # After this pass the ring holds positions start+count-W .. start+count-1.
        kept = torch.take_along_dim(both, (count[:, None] + steps)[..., None], dim=1)
        slots = (start[:, None] + count[:, None] - W + steps) % W
        index = slots[..., None].expand_as(kept)
        self.buffer = torch.empty_like(kept).scatter(1, index, kept)
        return both
