"""Who is updated how: matrices of the layers by Muon, tables by their own rule if asked, everything
else by AdamW."""

from __future__ import annotations

import torch
from torch import nn

from labkit.errors import InputError
from labkit.train.muon import Muon
from labkit.train.tables import TableMomentum

TABLE_FACTOR = 5.0   # learning rate of tables over the rest (technical report: 5x for Engram)

NOT_MUON = ("hc_", "gate.weight", "engram.embed", "indexer", "q_weight", "k_weight", "markov_head",
            "confidence_head")


def uses_muon(name: str, parameter: nn.Parameter) -> bool:
    """Matrices between activations; not tables, gates, mixing coefficients, indexer or heads."""
    return parameter.ndim == 2 and name.startswith(("layers.", "mtp.")) and not any(
        part in name for part in NOT_MUON)


def optimizers(model: nn.Module, lr: float, muon_lr: float, weight_decay: float,
               table_lr: float | None = None, tables_by: str = "adamw",
               ) -> list[torch.optim.Optimizer]:
    """[Muon, AdamW], maybe a third for the tables; every group carries `peak`, its learning rate
    at the top of the schedule.

    table_lr: of Engram tables and the draft's Markov head, whose rows are met as rarely; None:
    `TABLE_FACTOR` times `lr`. tables_by: "adamw" or "momentum" (`TableMomentum`).
    """
    if tables_by not in ("adamw", "momentum"):
        raise InputError(f"tables_by is {tables_by!r}: choose adamw or momentum")
    table_lr = TABLE_FACTOR * lr if table_lr is None else table_lr
    matrices, tables, plain, decayed = [], [], [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if uses_muon(name, p):
            matrices.append(p)
        elif "engram.embed" in name or "markov_head" in name:
            tables.append(p)
        elif name in ("embed.weight", "head.weight") or "indexer.w" in name:
            decayed.append(p)
        else:
            plain.append(p)
    groups = [{"params": decayed, "lr": lr, "weight_decay": weight_decay},
              {"params": plain, "lr": lr, "weight_decay": 0.0}]
    own = tables_by == "momentum" and bool(tables)
    if not own:
        groups.append({"params": tables, "lr": table_lr, "weight_decay": 0.0})
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, fused=True)
    muon = Muon(matrices, lr=muon_lr, weight_decay=weight_decay, momentum=0.95)
    found: list[torch.optim.Optimizer] = [muon, adamw]
    if own:
        found.append(TableMomentum(tables, lr=table_lr))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def schedule(step: int, steps: int, warmup: int, cooldown: float = 0.5,
             floor: float = 0.02) -> float:
    """Factor on every peak: linear warm-up, flat, then linear down over the last `cooldown`."""
    if step < warmup:
        return (step + 1) / warmup
    if step < steps - cooldown * steps:
        return 1.0
    return max(floor, (steps - step) / (cooldown * steps))
