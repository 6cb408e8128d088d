"""What a V4.1 is compared with: a plain transformer, trained on the same rows in the same way.

Pre-norm, rotary attention over the whole context with keys and values of every head, SwiGLU;
no streams, no compression, no selection, no experts, no Engram.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from labkit.model.norm import RMSNorm
from labkit.model.transformer import Output


@dataclass(frozen=True)
class PlainConfig:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-20


class PlainBlock(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        D, self.heads = config.hidden_size, config.num_attention_heads
        self.attn_norm, self.ffn_norm = (RMSNorm(D, config.rms_norm_eps) for _ in range(2))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(D, config.intermediate_size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(config.intermediate_size, D, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B,T,D] -> [B,T,D]; cos, sin [T,d/2]."""
        y = self.attn_norm(x)
        q, k, v = (w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)     # [B,H,T,d]
                   for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of [B,H,T,d], halves paired."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class PlainTransformer(nn.Module):
    """`model(ids).logits`, as of a `Transformer`."""

    def __init__(self, config: PlainConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """As `labkit.model.init`: variance 1/fan_in, what writes into the stream / sqrt(2 L)."""
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * self.config.num_hidden_layers) ** 0.5
        for name, p in self.named_parameters():
            if p.ndim == 1:
                continue
            std = {"embed.weight": 0.5, "head.weight": 0.02}.get(name, p.shape[1] ** -0.5)
            p.copy_(torch.randn(p.shape, generator=generator) * std)
            if name.endswith(("wo.weight", "w2.weight")):
                p.div_(depth)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor | None = None) -> Output:
        """ids [B,T] -> logits [B,T,V]; lengths: right padding changes nothing before it."""
        c = self.config
        half = c.hidden_size // c.num_attention_heads // 2
        rate = c.rope_theta ** -(torch.arange(half, device=ids.device) / half)
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * rate        # [T,d/2]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        return Output(self.head(self.norm(x)))
