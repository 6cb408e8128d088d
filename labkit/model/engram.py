"""Engram: hashed n-grams of the recent tokens look up memory rows, gated into the streams."""

from __future__ import annotations

import torch
from torch import nn

from labkit.config import ModelConfig
from labkit.model.norm import mean_square_scale
from labkit.model.run import Run
from labkit.numerics.precision import wide
from labkit.text.engram_hash import addresses

__all__ = ["Engram", "addresses"]


class Engram(nn.Module):
    """Update of the streams before an attention site: h_c += g_c * value.

    embed        [rows, hd]              the table; (N-1)*heads rows are read per token
    wkv          [(C+1)*D, (N-1)*heads*hd]  C keys of width D, then one value of width D
    q_weight, k_weight  [C, D]           channel weights of the gate's dot product
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c = self.config = config
        self.layer = layer
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
        self.embed = nn.Embedding(rows, c.engram_head_dim)
        width = c.engram_tables * c.engram_head_dim
        self.wkv = nn.Linear(width, (c.hc_mult + 1) * c.hidden_size, bias=False)
        self.q_weight = nn.Parameter(torch.ones(c.hc_mult, c.hidden_size))
        self.k_weight = nn.Parameter(torch.ones(c.hc_mult, c.hidden_size))

    def forward(self, h: torch.Tensor, rows: torch.Tensor, blocked: torch.Tensor,
                run: Run) -> torch.Tensor:
        """h [B,T,C,D], rows [B,T,(N-1)*heads] int64, blocked [B,T] (padding, image) -> h."""
        c = self.config
        memory = self.wkv(self.embed(rows).flatten(-2))                  # [B,T,(C+1)*D]
        memory = wide(memory).unflatten(-1, (c.hc_mult + 1, c.hidden_size))
        key, value = memory[:, :, :-1], memory[:, :, -1:]                # [B,T,C,D], [B,T,1,D]
        update = run.kernels.fuse(gated_update)
        h, gate = update(h, key, value, self.q_weight, self.k_weight, blocked, c.rms_norm_eps)
        run.tap_tokens(f"layers.{self.layer}.engram.gate", gate)
        return h


def gated_update(h: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_weight: torch.Tensor,
                 k_weight: torch.Tensor, blocked: torch.Tensor, eps: float,
                 ) -> tuple[torch.Tensor, torch.Tensor]:
    """Every stream opens its own gate: h [B,T,C,D], key [B,T,C,D], value [B,T,1,D] -> h, gate.

    The gate [B,T,C] is the sigmoid of the signed root of a scaled, normed dot product; blocked
    [B,T] closes it (padding, image tokens).
    """
    stream = wide(h)
    dot = (stream * (wide(q_weight) * wide(k_weight)) * key).sum(-1)     # [B,T,C]
    dot = dot * mean_square_scale(stream, eps)[..., 0] * mean_square_scale(key, eps)[..., 0]
    dot = dot * h.shape[-1] ** -0.5
    # The signed root spreads small agreements; its floor keeps the gradient finite.
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    gate = gate.masked_fill(blocked[..., None], 0.0)
    return (stream + gate[..., None] * value).to(h.dtype), gate
