"""Mixture of experts: a shared expert for every token, a few routed ones for each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from labkit.config import ModelConfig
from labkit.model.run import Run
from labkit.numerics.precision import wide


class Expert(nn.Module):
    """SwiGLU with clamps: w2( silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * weight )."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, width = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.w1 = nn.Linear(D, width, bias=False)
        self.w2 = nn.Linear(width, D, bias=False)
        self.w3 = nn.Linear(D, width, bias=False)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """x [n,D]; weight [n,1] is the routing weight, applied before the down projection."""
        gate = wide(self.w1(x)).clamp(max=self.limit)       # from above only
        up = wide(self.w3(x)).clamp(-self.limit, self.limit)
        y = F.silu(gate) * up
        if weight is not None:
            y = y * weight
        return self.w2(y.to(x.dtype))


class Gate(nn.Module):
    """Which experts a token visits: sqrt(softplus) scores, picked with a balancing bias."""

    def __init__(self, config: ModelConfig, experts: int, per_token: int) -> None:
        super().__init__()
        self.config, self.per_token = config, per_token
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(experts), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.zeros(experts), requires_grad=False)

    def forward(self, x: torch.Tensor, run: Run,
                image: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N,D] -> (picked [N,k], weights [N,k]); image [N] marks tokens of an image span."""
        scores = F.softplus(F.linear(wide(x), wide(self.weight))).sqrt()  # [N,E]
        bias = self.bias if image is None else torch.where(image[:, None], self.bias_vl, self.bias)
        # The bias only picks; the weights are the unbiased scores of what was picked.
        picked = run.kernels.select_top((scores + bias).detach(), self.per_token)
        weights = scores.gather(-1, picked)
        if self.per_token > 1 and self.config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return picked, weights * self.config.routed_scaling_factor


class MoE(nn.Module):
    """Routed experts summed in fp32, then the shared expert."""

    def __init__(self, config: ModelConfig, name: str, experts: int, per_token: int) -> None:
        super().__init__()
        self.name = name
        self.gate = Gate(config, experts, per_token)
        self.experts = nn.ModuleList(Expert(config) for _ in range(experts))
        self.shared_experts = Expert(config)

    def forward(self, x: torch.Tensor, run: Run) -> torch.Tensor:
        """[B,T,D] -> [B,T,D]."""
        flat = x.flatten(0, -2)                                          # [N,D]
        picked, weights = self.gate(flat, run)
        run.tap_tokens(f"{self.name}.picked", picked.unflatten(0, x.shape[:-1]))
        run.tap_tokens(f"{self.name}.weights", weights.unflatten(0, x.shape[:-1]))
        routed = run.kernels.routed_experts(flat, picked, weights, self.experts)
        return (routed.to(x.dtype) + self.shared_experts(flat)).view_as(x)
