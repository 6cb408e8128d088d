"""The hot operations in plain torch: the readable truth that faster kernels must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from labkit.cache.recent import take_rows
from labkit.numerics.precision import wide

MINUS_INF = float("-inf")


def sparse_attention(
    q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor | None,
    selected: torch.Tensor | None, sink: torch.Tensor, start: torch.Tensor,
) -> torch.Tensor:
    """One softmax over window keys, selected compressed entries and a sink.

    q         [B,T,H,d]   rotated queries of positions start..start+T-1
    window    [B,W+T,d]   column j is the key (and value) of position start-W+j; W may be 0
    entries   [B,S,d]     compressed KV, or None in a window-only layer
    selected  [B,T,K]     entry numbers, -1 = none
    sink      [H]         logit that only enters the denominator
    start     [B]         position of the first query, counted from the first window key there is
    returns   [B,T,H,d]   weighted values, fp32 or wider, still rotated
    """
    probabilities, values = attention_probabilities(q, window, entries, selected, sink, start)
    return torch.einsum("bthk,btkd->bthd", probabilities, wide(values))


def attention_probabilities(
    q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor | None,
    selected: torch.Tensor | None, sink: torch.Tensor, start: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [B,T,H,W+K] and what they weigh [B,T,W+K,d]; arguments as `sparse_attention`.

    Columns 0..W-1 are positions i-W+1..i of query i, the rest are the selected entries.
    The weights of a query and its sink add up to 1.
    """
    B, T, H, d = q.shape
    W = window.shape[1] - T
    # Query t sees columns t+1 .. t+W of the window.
    keys = window.unfold(1, W, 1)[:, 1:].transpose(2, 3)                # [B,T,W,d]
    position = start[:, None, None] + torch.arange(T, device=q.device)[:, None]
    position = position - W + 1 + torch.arange(W, device=q.device)     # [B,T,W]
    seen = position >= 0
    if entries is not None and selected is not None:
        picked = gather_rows(entries, selected.clamp(min=0))           # [B,T,K,d]
        keys = torch.cat([keys, picked], dim=2)                        # [B,T,W+K,d]
        seen = torch.cat([seen, selected >= 0], dim=2)                 # [B,T,W+K]
    scores = torch.einsum("bthd,btkd->bthk", wide(q), wide(keys)) * d**-0.5
    scores = scores.masked_fill(~seen[:, :, None], MINUS_INF)          # [B,T,H,W+K]
    sinks = wide(sink).to(scores.dtype).expand(B, T, H)[..., None]     # [B,T,H,1]
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)
    return weights[..., :-1], keys


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows [B,S,d] at index [B,T,K] -> [B,T,K,d]."""
    B, T, K = index.shape
    if rows.shape[1] == 0:  # nothing is compressed yet: every index is a masked -1
        return rows.new_zeros(B, T, K, rows.shape[2])
    return take_rows(rows, index.flatten(1)).unflatten(1, (T, K))


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """score(i,g) = sum_h w[i,h] * relu(q[i,h] . k[g]).

    q [B,T,Hi,di], keys [B,S,di], weights [B,T,Hi] -> [B,T,S] in q's dtype. In a bf16 model the
    product, the weighted product and the score are each rounded to bf16.
    """
    dots = torch.einsum("bthd,bsd->bths", q, keys)                     # [B,T,Hi,S]
    weighted = torch.relu(dots) * weights[..., None]                 # ReLU per head, before the sum
    return weighted.sum(dim=2)                                         # [B,T,S]


def select_top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best finite entries of scores [...,S], listed ascending, then -1: [...,k] int64.

    Equal scores (ReLU makes exact zeros) go to the lowest index: a stable descending sort.
    """
    S = scores.shape[-1]
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    index, value = best.indices[..., :k], best.values[..., :k]
    index = index.masked_fill(value == MINUS_INF, S).sort(dim=-1).values
    index = index.masked_fill(index == S, -1)
    return F.pad(index, (0, k - index.shape[-1]), value=-1)


def routed_experts(
    x: torch.Tensor, picked: torch.Tensor, weights: torch.Tensor, experts: torch.nn.ModuleList,
) -> torch.Tensor:
    """Sum of the picked experts' outputs, in fp32 or wider.

    x [N,D], picked [N,k] expert numbers, weights [N,k] routing weights -> [N,D]. The routing
    weight multiplies inside the expert, before its down projection.
    """
    total = torch.zeros(x.shape, dtype=wide(x).dtype, device=x.device)
    for number, expert in enumerate(experts):
        token, slot = (picked == number).nonzero(as_tuple=True)
        if token.numel():
            y = expert(x[token], weights[token, slot, None])           # [n,D]
            total = total.index_add(0, token, wide(y))
    return total


def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
    """A chain of elementwise steps that a kernel set may compile into one; here as it is."""
    return function
