"""The hot operations arranged for a CPU's caches; equal to the reference kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labkit.kernels import reference
from labkit.kernels.reference import MINUS_INF, fuse, routed_experts
from labkit.numerics.precision import wide

__all__ = ["fuse", "index_scores", "routed_experts", "select_top", "sparse_attention"]


def sparse_attention(
    q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor | None,
    selected: torch.Tensor | None, sink: torch.Tensor, start: torch.Tensor,
) -> torch.Tensor:
    """As `reference.sparse_attention`; long chunks take their windows block by block.

    A block of W queries sees 2W window columns, so its scores are one matrix product instead
    of W windows that overlap almost wholly.
    """
    B, T, H, d = q.shape
    W = window.shape[1] - T
    if T <= W or W == 0:
        return reference.sparse_attention(q, window, entries, selected, sink, start)
    blocks = -(-T // W)
    tail = blocks * W - T
    rows = F.pad(wide(q), (0, 0, 0, 0, 0, tail)).reshape(B, blocks, W * H, d)
    columns = F.pad(wide(window), (0, 0, 0, tail)).unfold(1, 2 * W, W)  # [B,blocks,d,2W]
    scores = (rows @ columns).reshape(B, blocks * W, H, 2 * W)[:, :T]   # [B,T,H,2W]

    # Query i of a block sees its columns i+1 .. i+W; column j of block b is position start+bW-W+j.
    number = torch.arange(2 * W, device=q.device)
    query = torch.arange(blocks * W, device=q.device)[:T]
    inside = query % W
    seen = (number > inside[:, None]) & (number <= inside[:, None] + W)              # [T,2W]
    position = start[:, None, None] + (query - inside)[:, None] - W + number          # [B,T,2W]
    seen = seen & (position >= 0)
    picked = None
    if entries is not None and selected is not None:
        picked = wide(gather_rows(entries, selected.clamp(min=0)))                    # [B,T,K,d]
        scores = torch.cat([scores, wide(q) @ picked.transpose(2, 3)], dim=-1)        # [B,T,H,2W+K]
        seen = torch.cat([seen, selected >= 0], dim=-1)
    scores = (scores * d**-0.5).masked_fill(~seen[:, :, None], MINUS_INF)
    sinks = wide(sink).to(scores.dtype).expand(B, T, H)[..., None]
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)           # [B,T,H,2W+K+1]

    local = F.pad(weights[..., : 2 * W], (0, 0, 0, 0, 0, tail)).reshape(B, blocks, W * H, 2 * W)
    out = (local @ columns.transpose(2, 3)).reshape(B, blocks * W, H, d)[:, :T]
    if picked is not None:
        out = out + weights[..., 2 * W : -1] @ picked
    return out


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows [B,S,d] at index [B,T,K] -> [B,T,K,d]; an embedding look-up has the faster backward."""
    B, S, d = rows.shape
    if S == 0:
        return rows.new_zeros(B, *index.shape[1:], d)
    offset = torch.arange(B, device=rows.device)[:, None, None] * S
    return F.embedding(index + offset, rows.reshape(B * S, d))


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `reference.index_scores`, a few queries at a time so that products stay in cache."""
    B, T, Hi, _ = q.shape
    S = keys.shape[1]
    step = max(1, (1 << 18) // max(1, Hi * S))
    if T <= step or q.requires_grad:
        return reference.index_scores(q, keys, weights)
    out = torch.empty(B, T, S, dtype=q.dtype, device=q.device)
    for b in range(B):
        columns = keys[b].T.contiguous()                                # [di,S]
        for t in range(0, T, step):
            dots = (q[b, t : t + step].flatten(0, 1) @ columns).relu_()  # [n*Hi,S]
            dots = dots.unflatten(0, (-1, Hi))
            # In 16 bits the rounding order is visible: product, weighted product, sum.
            if q.dtype in (torch.bfloat16, torch.float16):
                out[b, t : t + step] = (dots * weights[b, t : t + step, :, None]).sum(1)
            else:
                torch.bmm(weights[b, t : t + step, None], dots, out=out[b, t : t + step, None])
    return out


def select_top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """As `reference.select_top`: equal scores go to the lowest index.

    An fp32 score and its index fit one int64 key whose order is the wanted one, so a partial
    selection without ties replaces the full stable sort.
    """
    S = scores.shape[-1]
    if S <= k or scores.dtype == torch.float64:
        return reference.select_top(scores, k)
    bits = (scores.float() + 0.0).view(torch.int32).long()              # + 0.0 makes -0 a 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)            # signed order = float order
    index = torch.arange(S, device=scores.device)
    key = torch.topk((ordered << 32) | (S - 1 - index), k, dim=-1, sorted=False).values
    chosen = (S - 1) - (key & 0xFFFFFFFF)
    dead = scores.gather(-1, chosen) == MINUS_INF
    chosen = chosen.masked_fill(dead, S).sort(dim=-1).values
    return chosen.masked_fill(chosen == S, -1)
