"""What a compressor must remember between passes: the tokens of an unfinished group."""

from __future__ import annotations

import torch

from labkit.cache.recent import Recent, take_rows


class Tail(Recent):
    """The last r-1 tokens' compressor inputs, [B, r-1, width], oldest first.

    A group of r tokens may begin in one pass and end in another, so both the projected
    values and their gate logits travel (`width` = both, side by side).
    """

    def __init__(self, batch: int, ratio: int, width: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__(torch.zeros(batch, ratio - 1, width, dtype=dtype, device=device))
        self.ratio = ratio

    def groups(self, new: torch.Tensor, start: torch.Tensor, count: torch.Tensor,
               keep: bool = False) -> torch.Tensor:
        """Append `count[b]` live rows of `new` [B, T, width]; return [B, G, r, width].

        Row j of the result is group floor(start/r)+j; of these the first
        floor((start+count)/r) - floor(start/r) are complete, what follows is void.
        """
        r, T = self.ratio, new.shape[1]
        both = self.extend(new, start, count, keep)          # column j is position start-(r-1)+j
        groups = (T + r - 1) // r                                      # the most that can complete
        first = start // r * r - start + (r - 1)                       # [B] group 0 begins here
        columns = first[:, None] + torch.arange(groups * r, device=new.device)
        columns = columns.clamp(max=both.shape[1] - 1)        # past the end: incomplete anyway
        return take_rows(both, columns).unflatten(1, (groups, r))          # [B,G,r,width]
