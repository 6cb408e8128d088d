"""Kernels for training on a CPU: products in bf16, one hand-written backward, fused chains.

The same operations with the same signatures as `reference`, but not the same bits: products
take bf16 inputs, so values agree to about 1 % of their span. Selections of equal scores follow
the same rule. Never used to generate or to compare.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from labkit.kernels import cpu
from labkit.kernels.reference import MINUS_INF, routed_experts

__all__ = ["fuse", "index_scores", "routed_experts", "select_top", "sparse_attention"]

select_top = cpu.select_top
IN_CACHE = 1 << 19  # products of index scores that are made at a time
WHOLE = 4  # where a selection holds a quarter of the entries, masking is faster than gathering


@functools.cache
def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled: a chain of elementwise steps becomes one pass over memory.

    Compiling takes a C++ compiler; without one the function stays as it is, only slower.
    """
    return torch.compile(function, dynamic=False) if has_compiler() else function


@functools.cache
def has_compiler() -> bool:
    """Whether torch can compile for this CPU; says so once where it cannot."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # its own error types, which move between releases
        warnings.warn("no C++ compiler was found: training runs without fused steps, slower; "
                      "install g++ (or clang++) for speed", stacklevel=2)
        return False
    return True


def index_scores(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As `reference.index_scores`, from bf16 products."""
    half = torch.bfloat16
    q, keys, weights = q.to(half), keys.to(half), weights.to(half)
    B, T, Hi, _ = q.shape
    out = torch.empty(B, T, keys.shape[1], dtype=half)
    step = max(1, IN_CACHE // max(1, Hi * keys.shape[1]))               # queries at a time
    for b in range(B):
        columns = keys[b].T.contiguous()                                # [di,S]
        for t in range(0, T, step):
            dots = (q[b, t : t + step].flatten(0, 1) @ columns).relu_()     # [n*Hi,S]
            torch.bmm(weights[b, t : t + step, None], dots.unflatten(0, (-1, Hi)),
                      out=out[b, t : t + step, None])
    return out.float()


def sparse_attention(
    q: torch.Tensor, window: torch.Tensor, entries: torch.Tensor | None,
    selected: torch.Tensor | None, sink: torch.Tensor, start: torch.Tensor,
) -> torch.Tensor:
    """As `reference.sparse_attention`, for passes longer than the window."""
    W = window.shape[1] - q.shape[1]
    if q.shape[1] <= W or W == 0:
        return cpu.sparse_attention(q, window, entries, selected, sink, start)
    if selected is not None and not selected.shape[-1]:  # of none, as if there were none
        entries = selected = None
    with torch.autocast("cpu", enabled=False):
        return _Attention.apply(q, window, entries, selected, sink, start)  # type: ignore


class _Attention(torch.autograd.Function):
    """Blocks of W queries against 2W window columns, plus each query's own K entries.

    With probabilities P and dP = dO V^T, the softmax passes dS = P (dP - sum_j P_j dP_j) back;
    the sink is a column of P whose value is zero.
    """

    @staticmethod
    def forward(ctx, q, window, entries, selected, sink, start):  # type: ignore[no-untyped-def]
        B, T, H, d = q.shape
        W = window.shape[1] - T
        half, scale = torch.bfloat16, d**-0.5
        blocks = -(-T // W)
        tail = blocks * W - T
        rows = F.pad(q.to(half), (0, 0, 0, 0, 0, tail)).reshape(B * blocks, W * H, d)
        columns = F.pad(window.to(half), (0, 0, 0, tail)).unfold(1, 2 * W, W)  # [B,blocks,d,2W]
        columns = columns.reshape(B * blocks, d, 2 * W)
        seen = _band(T, W, start)                                       # [B,T,1,2W]
        local = torch.bmm(rows, columns).reshape(B, blocks * W, H, 2 * W)[:, :T]
        picked = index = chosen = allowed = None
        S = 0 if entries is None else entries.shape[1]
        if S and selected.shape[-1] * WHOLE >= S:  # all entries at once, most are selected
            picked = entries.to(half)                                   # [B,S,d]
            chosen = torch.bmm(q.to(half).reshape(B, T * H, d), picked.transpose(1, 2))
            chosen, allowed = chosen.reshape(B, T, H, S), _mask(selected, S)
        elif S:
            index = (selected.clamp(min=0) + torch.arange(B)[:, None, None] * S).reshape(B * T, -1)
            picked = F.embedding(index, entries.to(half).reshape(B * S, d))  # [B*T,K,d]
            chosen = torch.bmm(q.to(half).reshape(B * T, H, d), picked.transpose(1, 2))
            chosen, allowed = chosen.reshape(B, T, H, -1), selected >= 0
        far = None
        if chosen is None or allowed is None:
            near, rest = fuse(_probabilities)(local, seen, sink.float(), scale)
        else:
            near, far, rest = fuse(_probabilities_of_both)(
                local, seen, chosen, allowed[:, :, None], sink.float(), scale)

        block = F.pad(near, (0, 0, 0, 0, 0, tail)).reshape(B * blocks, W * H, 2 * W)
        out = torch.bmm(block, columns.transpose(1, 2)).reshape(B, blocks * W, H, d)[:, :T].float()
        if picked is not None and far is not None:
            far = far.reshape(picked.shape[0], -1, picked.shape[1])     # [B,T*H,S] or [B*T,H,K]
            out = out + torch.bmm(far, picked).reshape(B, T, H, d)
        ctx.save_for_backward(rows, columns, picked, index, near, far, rest, out)
        ctx.sizes = (B, T, H, d, W, blocks, tail, S)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, columns, picked, index, near, far, rest, out = ctx.saved_tensors
        B, T, H, d, W, blocks, tail, S = ctx.sizes
        half, scale = torch.bfloat16, d**-0.5
        delta = (grad * out).sum(-1, keepdim=True)                      # [B,T,H,1]
        dout = grad.to(half)
        dblock = F.pad(dout, (0, 0, 0, 0, 0, tail)).reshape(B * blocks, W * H, d)

        dnear = torch.bmm(dblock, columns).reshape(B, blocks * W, H, 2 * W)[:, :T]
        dscores = fuse(_back_through_softmax)(near, dnear, delta, scale)    # [B,T,H,2W]
        dscores = F.pad(dscores, (0, 0, 0, 0, 0, tail)).reshape(B * blocks, W * H, 2 * W)
        near = F.pad(near, (0, 0, 0, 0, 0, tail)).reshape(B * blocks, W * H, 2 * W)
        dq = torch.bmm(dscores, columns.transpose(1, 2)).reshape(B, blocks * W, H, d)[:, :T].float()
        # A column is a key and a value: both gradients in one product.
        dcolumns = torch.bmm(torch.cat([dscores, near], 1).transpose(1, 2),
                             torch.cat([rows, dblock], 1)).float()      # [B*blocks,2W,d]
        dcolumns = dcolumns.reshape(B, blocks, 2 * W, d)
        dwindow = torch.zeros(B, (blocks + 1) * W, d)
        dwindow[:, : blocks * W] += dcolumns[:, :, :W].reshape(B, -1, d)
        dwindow[:, W:] += dcolumns[:, :, W:].reshape(B, -1, d)
        dwindow = dwindow[:, : W + T]

        dentries = None
        if picked is not None:
            rows_of = picked.shape[0]                                   # B, or B*T of K each
            flat = dout.reshape(rows_of, -1, d)
            dfar = torch.bmm(flat, picked.transpose(1, 2))              # [B,T*H,S] or [B*T,H,K]
            dchosen = fuse(_back_through_softmax)(far, dfar, delta.reshape(rows_of, -1, 1), scale)
            dq = dq + torch.bmm(dchosen, picked).reshape(B, T, H, d)
            query = rows.reshape(B, blocks * W, H, d)[:, :T].reshape(rows_of, -1, d)
            dentries = torch.bmm(torch.cat([dchosen, far], 1).transpose(1, 2),
                                 torch.cat([query, flat], 1)).float()   # [B,S,d] or [B*T,K,d]
            if index is not None:
                dentries = torch.ops.aten.embedding_dense_backward(
                    dentries, index, B * S, -1, False).reshape(B, S, d)
        dsink = -(rest * delta).sum((0, 1, 3))                          # [H]
        return dq, dwindow, dentries, None, dsink, None


def _probabilities(local, seen, sink, scale):  # type: ignore[no-untyped-def]
    """Softmax over window scores [B,T,H,2W] and a sink [H]: [B,T,H,2W] in bf16, [B,T,H,1]."""
    scores = (local.float() * scale).masked_fill(~seen, MINUS_INF)
    sink = sink[:, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    near, rest = (scores - top).exp(), (sink - top).exp()
    total = near.sum(-1, keepdim=True) + rest
    return (near / total).to(local.dtype), rest / total


def _probabilities_of_both(local, seen, chosen, allowed, sink, scale):  # type: ignore[no-untyped-def]
    """One softmax over window scores, entry scores [B,T,H,K] and a sink, in three parts."""
    scores = (local.float() * scale).masked_fill(~seen, MINUS_INF)
    others = (chosen.float() * scale).masked_fill(~allowed, MINUS_INF)
    sink = sink[:, None]
    top = torch.maximum(torch.maximum(scores.amax(-1, keepdim=True),
                                      others.amax(-1, keepdim=True)), sink)
    near, far, rest = (scores - top).exp(), (others - top).exp(), (sink - top).exp()
    total = near.sum(-1, keepdim=True) + far.sum(-1, keepdim=True) + rest
    return (near / total).to(local.dtype), (far / total).to(local.dtype), rest / total


def _back_through_softmax(p, dp, delta, scale):  # type: ignore[no-untyped-def]
    """Gradient of the scores, in the dtype of p, from probabilities and their gradient."""
    return (p * (dp.float() - delta) * scale).to(p.dtype)


def _mask(selected: torch.Tensor, S: int) -> torch.Tensor:
    """selected [B,T,K], -1 = none -> [B,T,S]: True where an entry is selected."""
    mask = torch.zeros(*selected.shape[:2], S + 1, dtype=torch.bool)
    return mask.scatter_(-1, selected.masked_fill(selected < 0, S), True)[..., :S]


def _band(T: int, W: int, start: torch.Tensor) -> torch.Tensor:
    """[B,T,1,2W]: columns of its block that a query sees (as in `cpu.sparse_attention`)."""
    number, query = torch.arange(2 * W), torch.arange(T)
    inside = query % W
    seen = (number > inside[:, None]) & (number <= inside[:, None] + W)
    position = start[:, None, None] + (query - inside)[:, None] - W + number
    return (seen & (position >= 0))[:, :, None]
