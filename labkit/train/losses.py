"""What training minimises: the next token, and the indexer's distance from real attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from labkit.config import ModelConfig
from labkit.kernels.reference import index_scores
from labkit.model.indexer import visible


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats; logits [B,T,V], targets [B,T]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def index_loss(config: ModelConfig, taps: Mapping[str, torch.Tensor],
               queries: torch.Tensor) -> torch.Tensor:
    """KL( attention of the layer || softmax of its index scores ), mean over sources and queries.

    A hard top-k passes no gradient, so the indexer learns to imitate: its target is the layer's
    own attention over *all* visible compressed entries, averaged over heads. Both sides use the
    same entries. Only the indexer's parameters receive this gradient.

    queries: positions [n] at which the two are compared (a sample; all would cost T x S x heads).
    """
    losses = []
    for source in config.index_source_layer_ids:
        role = config.roles[source]
        name = f"layers.{source}.attn"
        entries = taps[f"layers.{role.kv_source}.attn.compressed_kv"]           # [B,S,d]
        # The owner's own tensor, with its graph: a Reindex layer trains these keys as well.
        keys = taps[f"layers.{role.kv_source}.attn.index_keys"].float()         # [B,S,di]
        q = taps[f"{name}.q"][:, queries].detach().float()                      # [B,n,H,d]
        B, S = entries.shape[:2]
        seen = visible(queries[None].expand(B, -1), role.ratio, S)              # [B,n,S]
        with torch.no_grad():
            dots = torch.einsum("bnhd,bsd->bnhs", q, entries.detach().float())
            dots = dots * config.head_dim**-0.5                                 # [B,n,H,S]
            target = torch.softmax(dots.masked_fill(~seen[:, :, None], float("-inf")), -1)
            target = target.nan_to_num(0.0).mean(2)                             # [B,n,S]
        scores = index_scores(taps[f"{name}.index_queries"][:, queries].float(), keys,
                              taps[f"{name}.index_weights"][:, queries].float())
        guess = torch.log_softmax(scores.masked_fill(~seen, -1e9), -1)          # [B,n,S]
        kl = target * (target.clamp(min=1e-20).log() - guess)
        losses.append(kl.sum(-1).sum() / seen.any(-1).sum().clamp(min=1))
    return torch.stack(losses).mean()


def wanted_taps(config: ModelConfig) -> list[str]:
    """Names that `index_loss` and the balancing of experts read."""
    names = ["layers.*.ffn.picked"]
    for source in config.index_source_layer_ids:
        name = f"layers.{source}.attn"
        names += [f"{name}.{what}" for what in ("q", "index_queries", "index_weights")]
        names += [f"{name}.{what}" for what in ("compressed_kv", "index_keys")]
    return names
