"""RMSNorm as everywhere in the model: computed in fp32, cast last."""

from __future__ import annotations

import torch
from torch import nn

from labkit.numerics.precision import wide


def mean_square_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """rsqrt(mean(x^2) + eps) over the last axis, kept as an axis of 1, fp32 or wider."""
    return torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (wide(x) * mean_square_scale(x, self.eps) * wide(self.weight)).to(x.dtype)
