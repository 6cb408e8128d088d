"""DSpark: the draft. Three small blocks guess the next tokens of a text in one pass.

The target tells the draft what it thinks: the streams that enter a few of its last layers,
averaged, are the *feature* of a token. Each stage of the draft turns the features of the last W
tokens into a window of its own. A block of slots then reads the anchor (the newest token, which
the target has not read yet) and noise tokens, all slots at once; slot k guesses the token k+1
places behind the anchor. What a slot lacks, the token just before its own, is made up for by the
Markov head: a bias on the logits from the previous token, so slots are sampled left to right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from labkit.cache.recent import take_rows
from labkit.config import LayerRole, ModelConfig
from labkit.model.attention import Attention
from labkit.model.block import Block
from labkit.model.hyper import collapse
from labkit.model.norm import RMSNorm
from labkit.model.run import Run
from labkit.numerics.precision import wide

Window = tuple[torch.Tensor, torch.Tensor]  # rows [N,W,d], and [N]: the last so many exist


@dataclass
class BlockRun(Run):
    """A pass of N blocks of n slots; `windows` holds what each stage reads of the past."""

    windows: Sequence[Window] = field(default_factory=list)


@dataclass
class Slots:
    """What a block of n slots computes before any token is drawn."""

    raw_hidden: torch.Tensor            # [N,n,D] streams collapsed, as the confidence head reads
    normalized_hidden: torch.Tensor     # [N,n,D] as the head reads
    base_logits: torch.Tensor           # [N,n,V] without the Markov bias, fp32 or wider


class DraftAttention(Attention):
    """Every slot sees the window of features and the whole block, later slots too."""

    def forward(self, x: torch.Tensor, run: Run, published: bool = False) -> torch.Tensor:
        """x [N,n,D] -> [N,n,D]."""
        stage = self.role.layer - self.config.num_hidden_layers
        turns = run.turns(compressed=False)                             # [N,n,R/2] each
        _, q = self.queries(x, turns)                                   # [N,n,H,d]
        own = run.round(self.key_values(x, turns), "fp8")               # [N,n,d]
        window, known = cast(BlockRun, run).windows[stage]              # [N,W,d], [N]
        N, n = x.shape[:2]
        W = window.shape[1]
        keys = torch.cat([window, own], dim=1)                          # [N,W+n,d]
        # All keys that exist are selected, by every slot; there is no window that slides.
        column = torch.arange(W + n, device=x.device)
        exists = column >= W - known[:, None]                           # [N,W+n]
        selected = torch.where(exists, column, -1)[:, None].expand(N, n, W + n)
        y = run.kernels.sparse_attention(q, own, keys, selected, self.attn_sink,
                                         torch.zeros_like(known))
        out = self.output(y.to(x.dtype), turns)
        run.tap_tokens(f"{self.name}.out", out)
        return out


class MarkovHead(nn.Module):
    """Logits of the next token from the one before it alone, in a low rank."""

    def __init__(self, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, rank)
        self.head = nn.Linear(rank, vocabulary, bias=False)

    def forward(self, previous: torch.Tensor) -> torch.Tensor:
        """ids [...] -> [...,V]."""
        return wide(self.head(self.embed(previous)))


class ConfidenceHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, bias=False)

    def forward(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """x [...,D], embedded [...,rank] -> [...], before the sigmoid."""
        return wide(self.proj(torch.cat([x, embedded], dim=-1))[..., 0])


class Stage(Block):
    """A block with ratio 0, with the draft's number of experts and a window of features."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        c, last = config, config.num_nextn_predict_layers - 1
        role = LayerRole(c.num_hidden_layers + number, "window", 0, None, None)
        super().__init__(c, role, f"mtp.{number}", DraftAttention, c.dspark_n_routed_experts,
                         c.dspark_num_experts_per_tok)
        D = c.hidden_size
        if number == 0:
            self.main_proj = nn.Linear(len(c.dspark_target_layer_ids) * D, D, bias=False)
            self.main_norm = RMSNorm(D, c.rms_norm_eps)
        if number == last:
            self.norm = RMSNorm(D, c.rms_norm_eps)
            self.markov_head = MarkovHead(c.vocab_size, c.dspark_markov_rank)
            self.confidence_head = ConfidenceHead(D + c.dspark_markov_rank)


class DSpark(nn.ModuleList):
    """The stages; checkpoint keys `mtp.{stage}.*`. Embedding and head are the target's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(Stage(config, s) for s in range(config.num_nextn_predict_layers))
        self.config = config

    @property
    def first(self) -> Stage:
        return cast(Stage, self[0])

    @property
    def last(self) -> Stage:
        return cast(Stage, self[len(self) - 1])

    def take_in(self, run: Run) -> None:
        """Put what the target thought of these tokens into the windows of all stages."""
        c = self.config
        features = torch.cat([run.features[layer] for layer in c.dspark_target_layer_ids], dim=-1)
        run.tap_tokens("dspark.target_features", features)              # [B,T,targets*D]
        rings = run.cache.draft_windows
        for stage, kv in enumerate(self.key_values(features, run)):
            rows, _ = rings[stage].take_in(run.unpack(kv), run.start, run.count, run.enter,
                                           run.keep)
            run.tap(f"mtp.{stage}.attn.window", rows)                   # [B,W+T,d]

    def key_values(self, features: torch.Tensor, run: Run) -> list[torch.Tensor]:
        """features [B,T,targets*D] -> the window KV of every stage, [B,T,d], not rounded yet."""
        x = self.first.main_norm(self.first.main_proj(features))        # [B,T,D]
        return [cast(Stage, stage).attn.key_values(x, run.turns(compressed=False))
                for stage in self]

    def forward(self, x: torch.Tensor, run: BlockRun) -> torch.Tensor:
        """Embedded anchors and noise [N,n,D] -> raw hidden states [N,n,D]."""
        C = self.config.hc_mult
        h = x[:, :, None].expand(-1, -1, C, -1)                         # [N,n,C,D]
        pre = torch.zeros(*x.shape[:2], C, dtype=wide(x[:1, :1]).dtype, device=x.device)
        pre[..., 0] = 1.0
        for stage in self:
            h, pre = cast(Stage, stage).sites(h, pre, run)
        return collapse(h, pre)

    def slots(self, raw: torch.Tensor, head: torch.Tensor) -> Slots:
        """raw [N,n,D] and the target's head [V,D] -> what all slots know before any is drawn."""
        normalized = self.last.norm(raw)
        return Slots(raw, normalized, F.linear(wide(normalized), wide(head)))

    def markov_logits(self, previous: torch.Tensor) -> torch.Tensor:
        """Bias of the logits from the token before a slot's: ids [...] -> [...,V]."""
        return self.last.markov_head(previous)

    def confidence_logits(self, raw: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Before the sigmoid: will this slot's token survive, given that all before it did?

        raw [...,D] (not normalised, as released; drafts trained otherwise do not fit), ids [...].
        """
        return self.last.confidence_head(raw, self.last.markov_head.embed(previous))


def windows_at(rows: Sequence[torch.Tensor], anchors: torch.Tensor, window: int) -> list[Window]:
    """Windows of anchors anywhere in sequences that were read from their beginning.

    rows     of every stage [B,W+T,d]: column j is position j-W (taps `mtp.{s}.attn.window`)
    anchors  [B,A] positions -> rows [B*A,W,d] of the W positions before each, and [B*A]
    """
    B, A = anchors.shape
    columns = anchors[:, :, None] + torch.arange(window, device=anchors.device)     # [B,A,W]
    known = anchors.clamp(max=window).flatten()                                     # [B*A]
    return [(take_rows(r, columns.flatten(1)).reshape(B * A, window, -1), known) for r in rows]
