"""One rule for widths: where the model says fp32 it means at least fp32."""

from __future__ import annotations

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in fp32, or as it is when it is already float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
