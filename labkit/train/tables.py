"""The optimiser of hashed tables: momentum, then rows and columns made equally large.

The technical report trains Engram tables without Adam's second moments: momentum, eleven
alternating equalisations of rows and columns, five times the learning rate of the rest. It does
not say what happens to rows that a step does not meet; here they and their momentum rest, as
otherwise equalising would blow the last trace of a gradient up to a whole step, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

ROUNDS = 11  # technical report; odd: rows first and last


def equalise(m: torch.Tensor, rounds: int = ROUNDS, eps: float = 1e-12) -> torch.Tensor:
    """m [n,hd] with rows, then columns, then rows ... divided by their root mean square.

    Rows end at exactly 1, columns near it. A row of zeros stays zero.
    """
    for turn in range(rounds):
        m = m / m.square().mean(1 - turn % 2, keepdim=True).sqrt().clamp(min=eps)
    return m


class TableMomentum(torch.optim.Optimizer):
    """Moves the rows that a step met; each by about `lr` in every channel."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[no-untyped-def, override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                met = p.grad.abs().amax(1).nonzero()[:, 0]              # [n] rows with a gradient
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer[met] = buffer[met].lerp(p.grad[met], 1 - group["momentum"])
                p[met] -= group["lr"] * equalise(buffer[met])
