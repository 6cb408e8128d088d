"""The compressor of a Full layer: r consecutive tokens become one latent entry."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from labkit.config import ModelConfig
from labkit.model.norm import RMSNorm
from labkit.model.run import Run
from labkit.numerics.precision import wide


class Compressor(nn.Module):
    """latent = norm( sum_j softmax_j(wgate x_j) * (wkv x_j) ) over a group of r tokens.

    The softmax is per channel over the group. With r = 1 there is nothing to weigh and the
    checkpoint has no `wgate`. An incomplete last group waits in the cache and emits nothing.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.ratio = layer, config.compress_ratios[layer]
        self.wkv = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        if self.ratio > 1:
            self.wgate = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B,T,D] -> (latent [B,G,d] not rotated, complete [B]: how many of the G exist)."""
        r = self.ratio
        if r == 1:
            return run.unpack(self.norm(self.wkv(x))), run.count        # a token is a group
        wide_x = wide(x)  # fp32 weights and products, also in a bf16 model
        value, gate = F.linear(wide_x, self.wkv.weight), F.linear(wide_x, self.wgate.weight)
        both = torch.cat([value, gate], dim=-1)                         # [B,T,2d]
        groups = run.cache.tails[self.layer].groups(run.unpack(both), run.start, run.count,
                                                    run.keep)
        # [B,G,r,2d]
        value, gate = groups.chunk(2, dim=-1)
        latent = (torch.softmax(gate, dim=2) * value).sum(dim=2)       # [B,G,d]
        complete = (run.start + run.count) // r - run.start // r
        return self.norm(latent.to(x.dtype)), complete
