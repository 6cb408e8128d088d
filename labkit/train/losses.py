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

NOTHING = -1e9  # a score that has no part in a softmax; -inf has no gradient where it is alone


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every token in nats, [B,T]; logits [B,T,V], targets [B,T]."""
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return each.view(targets.shape)


def weighted_mean(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean over rows of the weighted mean over a row's tokens; both [B,T]."""
    return ((losses * weights).sum(1) / weights.sum(1)).mean()


@dataclass
class SelectionLoss:
    """index     KL( attention || softmax of index scores ), mean over sources and queries
    left_out  KL( attention over the selection || attention over all entries ), mean over layers
              that read a selection, their heads and the queries: -log of the mass that is kept
    """

    index: torch.Tensor
    left_out: torch.Tensor


def selection_loss(config: ModelConfig, taps: Mapping[str, torch.Tensor],
                   queries: torch.Tensor) -> SelectionLoss:
    """How far the index is from attention, and how much attention looks past the selection.

    A hard top-k passes no gradient, so the indexer learns to imitate: its target is attention
    over *all* visible compressed entries, averaged over the heads of all layers that read its
    selection. Only the indexer's parameters receive the gradient of `index`.

    What is not selected has no part in the output, so nothing else keeps attention from resting
    there; `left_out` does, and its gradient goes to queries and entries. The window is left out of
    it: otherwise all attention moves there, and the selection keeps all of nothing.

    queries: positions [n] at which all is compared (a sample; all would cost T x S x heads).
    """
    distances, left_out = [], []
    for source in config.index_source_layer_ids:
        role = config.roles[source]
        owner, name = f"layers.{role.kv_source}.attn", f"layers.{source}.attn"
        entries = taps[f"{owner}.compressed_kv"].float()                        # [B,S,d]
        # The owner's own tensor, with its graph: a Reindex layer trains these keys as well.
        keys = taps[f"{owner}.index_keys"].float()                              # [B,S,di]
        selected = taps[f"{name}.topk_indices"][:, queries]                     # [B,n,K]
        B, S = entries.shape[:2]
        seen = visible(queries[None].expand(B, -1), role.ratio, S)              # [B,n,S]
        target = torch.zeros(seen.shape)
        readers = [r.layer for r in config.roles if r.ratio and r.index_source == source]
        for layer in readers:
            q = taps[f"layers.{layer}.attn.q"][:, queries].float()              # [B,n,H,d]
            far = torch.einsum("bnhd,bsd->bnhs", q, entries) * config.head_dim**-0.5
            far = far.masked_fill(~seen[:, :, None], NOTHING)                   # [B,n,H,S]
            with torch.no_grad():
                target += torch.softmax(far, -1).mean(2) * seen / len(readers)
            if 0 < selected.shape[-1] < S:
                left_out.append(_left_out(far, selected))
        scores = index_scores(taps[f"{name}.index_queries"][:, queries].float(), keys,
                              taps[f"{name}.index_weights"][:, queries].float())
        guess = torch.log_softmax(scores.masked_fill(~seen, NOTHING), -1)       # [B,n,S]
        kl = target * (target.clamp(min=1e-20).log() - guess)
        distances.append(kl.sum(-1).sum() / seen.any(-1).sum().clamp(min=1))
    return SelectionLoss(torch.stack(distances).mean(),
                         torch.stack(left_out).mean() if left_out else torch.zeros(()))


def _left_out(far: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """-log of the mass on the selection, mean over all; scores far [B,n,H,S], selected [B,n,K],
    -1 = none."""
    index = selected.clamp(min=0)[:, :, None].expand(-1, -1, far.shape[2], -1)
    read = far.gather(-1, index).masked_fill((selected < 0)[:, :, None], NOTHING)  # [B,n,H,K]
    return (far.logsumexp(-1) - read.logsumexp(-1)).mean()


def wanted_taps(config: ModelConfig) -> list[str]:
    """Names that `selection_loss` and the balancing of experts read."""
    names = ["layers.*.ffn.picked"]
    for role in config.roles:
        if role.ratio:
            names.append(f"layers.{role.layer}.attn.q")
    for source in config.index_source_layer_ids:
        names += [f"layers.{source}.attn.{what}" for what in (
            "index_queries", "index_weights", "compressed_kv", "index_keys", "topk_indices")]
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
