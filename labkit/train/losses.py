"""What training minimises: the next token, the indexer's distance from real attention; for the
draft, its distance from the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.config import ModelConfig
from labkit.kernels.reference import index_scores
from labkit.model.indexer import visible


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every row in nats, [B]; logits [B,T,V], targets [B,T]."""
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return each.view(targets.shape).mean(1)


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


# Shares of the draft's losses (technical report of DSpark).
CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0


@dataclass
class DraftLoss:
    """Means over blocks, slots weighted as in `slot_weights`; all scalars but `by_slot`."""

    total: torch.Tensor             # what is minimised
    cross_entropy: torch.Tensor     # nats, against the token of the text
    total_variation: torch.Tensor   # 0..1, from the target
    confidence: torch.Tensor        # nats, of the confidence against the acceptance
    by_slot: torch.Tensor           # [n] total variation by slot, not weighted, detached


def slot_weights(n: int) -> torch.Tensor:
    """exp(-(k-1)/n) of slots k = 1..n, divided by their sum: early slots are reached more often."""
    weights = torch.exp(-torch.arange(n, dtype=torch.float32) / n)
    return weights / weights.sum()


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """0.5 * sum |p - q| of distributions [...,V]: [...]. 1 minus it is how often a token drawn
    from one is accepted by the other."""
    return 0.5 * (p - q).abs().sum(-1)


def draft_loss(logits: torch.Tensor, target_logits: torch.Tensor, tokens: torch.Tensor,
               confidence_logits: torch.Tensor) -> DraftLoss:
    """logits [N,n,V] of the draft, target_logits [N,n,V], tokens [N,n], confidence_logits [N,n].

    The target takes no gradient. The confidence is to say how often the slot is accepted, a
    soft label 1 - TV that takes none either: no draft is made worse to make it easier to judge.
    """
    weights = slot_weights(logits.shape[1])                             # [n]
    logs = torch.log_softmax(logits.float(), -1)                        # [N,n,V]
    target = torch.softmax(target_logits.detach().float(), -1)
    entropy = -logs.gather(-1, tokens[..., None])[..., 0]               # [N,n]
    distance = total_variation(logs.exp(), target)                      # [N,n]
    accepted = 1 - distance.detach()
    # TV is 0..1 but for rounding, and the label of an entropy must be.
    judged = F.binary_cross_entropy_with_logits(
        confidence_logits.float(), accepted.clamp(0, 1), reduction="none")  # [N,n]
    ce, tv, confidence = ((part.mean(0) * weights).sum() for part in (entropy, distance, judged))
    return DraftLoss(CROSS_ENTROPY * ce + TOTAL_VARIATION * tv + CONFIDENCE * confidence,
                     ce.detach(), tv.detach(), confidence.detach(), distance.detach().mean(0))
