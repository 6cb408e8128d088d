"""Kernels for the control in which every query attends to all entries: masks, not gathered rows.

The signatures and, but for rounding in the last place, the values of `labkit.kernels.cpu`. Where
all S entries are selected, gathering them for each of T queries moves T x S vectors; one matrix
product over all entries and a mask is several times faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labkit.kernels import cpu
from labkit.kernels.cpu import fuse, index_scores, routed_experts
from labkit.kernels.reference import MINUS_INF
from labkit.numerics.precision import wide

__all__ = ["fuse", "index_scores", "routed_experts", "select_top", "sparse_attention"]

WHOLE = 4  # a selection that holds a quarter of the entries is masked


def select_top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """As `reference.select_top`; where all may stay nothing has to be ordered by its score."""
    S = scores.shape[-1]
    if k < S:
        return cpu.select_top(scores, k)
    index = torch.arange(S, device=scores.device).expand(scores.shape)
    index = index.masked_fill(scores == MINUS_INF, S).sort(dim=-1).values
    return F.pad(index.masked_fill(index == S, -1), (0, k - S), value=-1)


def sparse_attention(
    q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor | None,
    selected: torch.Tensor | None, sink: torch.Tensor, start: torch.Tensor,
) -> torch.Tensor:
    """As `reference.sparse_attention`, q [B,T,H,d] -> [B,T,H,d], block of W queries by block."""
    B, T, H, d = q.shape
    W = window.shape[1] - T
    if (entries is None or selected is None or T <= W or W == 0
            or WHOLE * selected.shape[2] < entries.shape[1]):
        return cpu.sparse_attention(q, window, entries, selected, sink, start)
    S = entries.shape[1]
    kept = torch.zeros(B, T, S + 1, dtype=torch.bool, device=q.device)
    kept = kept.scatter(-1, selected.masked_fill(selected < 0, S), True)[..., :S]
    keys, columns = wide(entries), wide(window)
    out = []
    for t in range(0, T, W):
        rows = wide(q[:, t : t + W])                                    # [B,n,H,d]
        n = rows.shape[1]
        near = columns[:, t + 1 : t + n + W]                            # [B,n+W-1,d]
        both = torch.cat([near, keys], dim=1)                           # [B,n+W-1+S,d]
        scores = (rows.flatten(1, 2) @ both.transpose(1, 2)).unflatten(1, (n, H)) * d**-0.5
        # Query i of the block sees columns i .. i+W-1; column j is position start+t+1-W+j.
        number = torch.arange(n + W - 1, device=q.device)
        inside = torch.arange(n, device=q.device)[:, None]
        seen = (number >= inside) & (number < inside + W)               # [n,n+W-1]
        exists = start[:, None] + t + 1 - W + number >= 0               # [B,n+W-1]
        seen = torch.cat([seen & exists[:, None], kept[:, t : t + n]], dim=-1)
        scores = scores.masked_fill(~seen[:, :, None], MINUS_INF)       # [B,n,H,n+W-1+S]
        sinks = wide(sink).to(scores.dtype).expand(B, n, H)[..., None]
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
        out.append((weights.flatten(1, 2) @ both).unflatten(1, (n, H)))
    return torch.cat(out, dim=1)
