"""What a compressor must remember between passes: the tokens of an unfinished group."""

from __future__ import annotations

import torch


class Tail:
    """The last r-1 tokens' compressor inputs, [B, r-1, width], oldest first.

    A group of r tokens may begin in one pass and end in another, so both the projected
    values and their gate logits travel (`width` = both, side by side).
    """

    def __init__(self, batch: int, ratio: int, width: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self.ratio = ratio
        self.buffer = torch.zeros(batch, ratio - 1, width, dtype=dtype, device=device)

    def extend(self, new: torch.Tensor, start: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Append `count[b]` live rows of `new` [B, T, width]; return [B, G, r, width].

        Row j of the result is group floor(start/r)+j; of these the first
        floor((start+count)/r) - floor(start/r) are complete, what follows is void.
        """
        r, T = self.ratio, new.shape[1]
        # Column j is position start-(r-1)+j.
        both = torch.cat([self.buffer, new], dim=1)
        tail = torch.arange(r - 1, device=new.device)
        self.buffer = torch.take_along_dim(both, (count[:, None] + tail)[..., None], dim=1)
        groups = (T + r - 1) // r                                      # the most that can complete
        first = start // r * r - start + (r - 1)                       # [B] group 0 begins here
        columns = first[:, None] + torch.arange(groups * r, device=new.device)
        columns = columns.clamp(max=both.shape[1] - 1)        # past the end: incomplete anyway
        rows = torch.take_along_dim(both, columns[..., None], dim=1)   # [B,G*r,width]
        return rows.unflatten(1, (groups, r))
