"""Expert balance without an auxiliary loss: the picking bias rises where load is short."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from labkit.model.moe import Gate

STEP = 1e-3


@torch.no_grad()
def balance_experts(model: nn.Module, taps: Mapping[str, torch.Tensor],
                    step: float = STEP) -> float:
    """Move every gate's bias by +-step towards equal load; returns the worst load over its mean.

    The gates are those whose choices are among the taps, `{block}.ffn.picked`. The bias only
    decides who is picked, never the weights, so the loss does not feel it.
    """
    worst = 1.0
    for name, picked in taps.items():
        if not name.endswith(".ffn.picked"):
            continue
        gate = cast(Gate, model.get_submodule(name.removesuffix("picked") + "gate"))
        load = torch.bincount(picked.flatten(), minlength=gate.bias.shape[0]).float()
        gate.bias.add_(step * torch.sign(load.mean() - load))
        worst = max(worst, float(load.max() / load.mean()))
    return worst
