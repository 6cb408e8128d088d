"""Rotary embedding: adjacent channel pairs of the last R channels turn with position."""

from __future__ import annotations

import functools
import math

import torch

from labkit.config import ModelConfig
from labkit.numerics.precision import wide


@functools.lru_cache(maxsize=64)
def inverse_frequencies(config: ModelConfig, compressed: bool) -> tuple[float, ...]:
    """Angle per position of each pair, [R/2].

    The layer decides, not the branch: a window-only layer (`compressed` False) uses
    `rope_theta`; every rotation of a compressed layer uses `compress_rope_theta` with YaRN.
    YaRN changes frequencies only, it has no attention temperature here.
    """
    R, scaling = config.qk_rope_head_dim, config.rope_scaling
    theta = config.compress_rope_theta if compressed else config.rope_theta
    plain = [theta ** (-2 * i / R) for i in range(R // 2)]
    original = scaling.original_max_position_embeddings
    if not compressed or original <= 0:
        return tuple(plain)

    def pair_with(rotations: float) -> float:
        """The pair that makes that many turns within the original context."""
        return R * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with(scaling.beta_slow)), R - 1)
    out = []
    for i, f in enumerate(plain):
        ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        out.append(f / scaling.factor * ramp + f * (1 - ramp))
    return tuple(out)


def rotation(config: ModelConfig, compressed: bool, positions: torch.Tensor,
             dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) for int64 positions [...], each [..., R/2], fp32 or wider."""
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    frequency = torch.tensor(inverse_frequencies(config, compressed), dtype=kind,
                             device=positions.device)
    angle = positions[..., None].to(kind) * frequency
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor],
           inverse: bool = False) -> torch.Tensor:
    """Turn the last R channels of x [..., d]; cos and sin broadcast against [..., R/2]."""
    cos, sin = cos_sin
    R = 2 * cos.shape[-1]
    still, turning = x[..., :-R], wide(x[..., -R:]).unflatten(-1, (R // 2, 2))
    even, odd = turning.unbind(-1)                       # adjacent pairs as complex numbers
    if inverse:
        sin = -sin
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([still, turned.to(x.dtype)], dim=-1)
