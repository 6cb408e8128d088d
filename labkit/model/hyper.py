"""Manifold-constrained hyper-connections (mHC): C residual streams, mixed at every site.

A site (attention or FFN) reads one vector x = sum_c pre[c] * h[c] and writes its output back
with `post`, while `comb` mixes the streams among themselves. `comb` is made nearly doubly
stochastic by Sinkhorn iterations, so mixing nearly keeps the streams' sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from labkit.config import ModelConfig
from labkit.model.norm import mean_square_scale
from labkit.numerics.precision import wide


class Mix(NamedTuple):
    pre: torch.Tensor   # [B,T,C]    how the *next* site reads the streams
    post: torch.Tensor  # [B,T,C]    how this site's output is written
    comb: torch.Tensor  # [B,T,C,C]  source stream -> target stream


def hyper_mix(h: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor,
              config: ModelConfig) -> Mix:
    """Coefficients of one site from its streams h [B,T,C,D].

    fn [C(C+2), C*D], base [C(C+2)], scale [3] (pre, post, comb): checkpoint keys `hc_*_fn`,
    `hc_*_base`, `hc_*_scale`, always fp32.
    """
    C = config.hc_mult
    flat = wide(h).flatten(-2)                                          # [B,T,C*D]
    # Projection first, RMS after: the same as norming first, with one pass over the streams.
    m = torch.nn.functional.linear(flat, fn) * mean_square_scale(flat, config.rms_norm_eps)
    scales = torch.cat([scale[0].expand(C), scale[1].expand(C), scale[2].expand(C * C)])
    a_pre, a_post, a_comb = (base + m * scales).split([C, C, C * C], dim=-1)
    return Mix(
        pre=torch.sigmoid(a_pre) + config.hc_eps,
        post=2 * torch.sigmoid(a_post),
        comb=sinkhorn(a_comb.unflatten(-1, (C, C)), config.hc_sinkhorn_iters, config.hc_eps),
    )


def sinkhorn(a: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Nearly doubly stochastic [..., C, C] from logits; the last step is on columns."""
    x = torch.softmax(a, dim=-1) + eps
    # Rows and columns to the front: C is tiny and tokens are many, so a sum over rows adds a
    # few long vectors instead of reducing many short ones.
    x = x.movedim((-2, -1), (0, 1)).contiguous()                        # [C,C,...]
    x = x / (x.sum(0, keepdim=True) + eps)                              # columns: over source rows
    for _ in range(iterations - 1):
        x = x / (x.sum(1, keepdim=True) + eps)
        x = x / (x.sum(0, keepdim=True) + eps)
    return x.movedim((0, 1), (-2, -1))


def collapse(h: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """What a site reads: sum_c pre[c] * h[c], [B,T,C,D] -> [B,T,D]."""
    return torch.einsum("btc,btcd->btd", pre, wide(h)).to(h.dtype)


def expand(y: torch.Tensor, h: torch.Tensor, mix: Mix) -> torch.Tensor:
    """The streams after a site: post[c] * y + sum_c' comb[c',c] * h[c'], [B,T,C,D]."""
    mixed = torch.einsum("btsc,btsd->btcd", mix.comb, wide(h))          # s = source stream
    return (mix.post[..., None] * wide(y)[..., None, :] + mixed).to(h.dtype)
