"""The lightning indexer: cheap scores decide which compressed entries a query attends to.

A Full layer owns keys and queries, a Reindex layer only queries (it scores the last Full
layer's keys again), a Reuse layer has no indexer and takes the last selection.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from labkit.config import LayerRole, ModelConfig
from labkit.kernels.reference import MINUS_INF
from labkit.model.norm import RMSNorm
from labkit.model.rope import rotate
from labkit.model.run import Run

# A score matrix is [tokens, entries]: at 4,096 x 1M it would be 16 GB, so queries go in chunks
# whose products (tokens x index heads x entries) stay below this number of elements.
CHUNK_ELEMENTS = 1 << 24
# Keys are unpacked for so many entries at a time: all at once, a million would take 0.5 GB.
KEY_BLOCK = 1 << 16
# Who picks the entries that a query attends to. "index" is the model; the others are controls,
# and "all" (no top-k, no pool) is how training begins, when the index has learnt nothing yet.
SELECTING = ("index", "all", "random", "none")


class Indexer(nn.Module):
    def __init__(self, config: ModelConfig, role: LayerRole) -> None:
        super().__init__()
        self.config, self.role = config, role
        self.side = "encoder" if role.layer < config.encoder_layers else "decoder"
        heads, di = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * di, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        if role.kind == "full":
            self.wk = nn.Linear(config.head_dim, di, bias=False)
            self.k_norm = RMSNorm(di, config.rms_norm_eps)

    def keys(self, latent: torch.Tensor, run: Run) -> torch.Tensor:
        """Index keys [B,G,di], not rounded yet, from the latent [B,G,d] *before* its rotation."""
        key = self.k_norm(self.wk(latent.detach()))
        return rotate(key, run.group_turns(self.role.ratio, latent.shape[1]))

    def queries(self, x: torch.Tensor, q_latent: torch.Tensor,
                run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [B,T,Hi,di] and head weights [B,T,Hi].

        A selection is discrete and passes no gradient, so nothing here reaches the backbone.
        """
        c = self.config
        q = self.wq_b(q_latent.detach()).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        cos, sin = run.turns(compressed=True)
        q = run.round(rotate(q, (cos[:, :, None], sin[:, :, None])), "mxfp4")
        weights = self.weights_proj(x.detach()) * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        return q, weights

    def forward(self, x: torch.Tensor, q_latent: torch.Tensor, run: Run) -> torch.Tensor:
        """The selection [B,T,K]; publishes the candidate pool if this layer owns it."""
        keys = run.published.index_keys
        assert keys is not None
        q, weights = self.queries(x, q_latent, run)
        name = f"layers.{self.role.layer}.attn"
        run.tap_tokens(f"{name}.index_queries", q)
        run.tap_tokens(f"{name}.index_weights", weights)
        with torch.no_grad():
            q, weights = run.rows(q), run.rows(weights)
            positions = run.rows(run.pack(run.positions))
            products = q.shape[0] * q.shape[2] * min(keys.length, KEY_BLOCK)   # of one query
            chunk = max(1, CHUNK_ELEMENTS // max(1, products))
            parts = [self._select(q[:, t : t + chunk], weights[:, t : t + chunk],
                                  positions[:, t : t + chunk], t, run)
                     for t in range(0, q.shape[1], chunk)]
        selection = run.tokens(torch.cat([p[0] for p in parts], dim=1))  # [B,T,K]
        run.tap_tokens(f"{name}.topk_indices", selection)
        if self.role.publishes_candidates:
            pool = run.published.candidates = run.tokens(torch.cat([p[1] for p in parts], dim=1))
            run.tap(f"{name}.candidates", lambda: self._mask(
                run.unpack(pool), run.positions, keys.length))
        return selection

    def _select(self, q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, t: int,
                run: Run) -> tuple[torch.Tensor, torch.Tensor]:
        """Selection [B,t,K] and pool blocks [B,t,blocks] of a chunk of queries."""
        keys = run.published.index_keys
        assert keys is not None
        seen = visible(positions, self.role.ratio, keys.length)
        selecting = "none" if run.blind == self.side else run.selecting
        if selecting == "random":
            scores = chance(positions, keys.length, self.role.layer)    # [B,t,S]
        elif selecting != "index":  # all or none: nothing to choose
            scores = torch.zeros(seen.shape, device=seen.device)
        else:
            parts = [run.kernels.index_scores(
                q, keys.keys(s, min(s + KEY_BLOCK, keys.length), run.sequence), weights)
                for s in range(0, max(1, keys.length), KEY_BLOCK)]
            scores = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        scores = scores.masked_fill(~seen, MINUS_INF)
        blocks = scores.new_empty(*scores.shape[:2], 0, dtype=torch.bool)
        if self.role.publishes_candidates:
            blocks = candidate_blocks(scores, positions, self.role.ratio, self.config, run)
        if selecting in ("all", "none"):
            size = keys.length if selecting == "all" else 0
            return run.kernels.select_top(scores, size), blocks
        if self.role.uses_candidates:
            assert run.published.candidates is not None
            pool = run.rows(run.published.candidates)
            mask = self._mask(pool[:, t : t + q.shape[1]], positions, keys.length)
            scores = scores.masked_fill(~mask, MINUS_INF)
        return run.kernels.select_top(scores, self.config.index_topk), blocks

    def _mask(self, blocks: torch.Tensor | None, positions: torch.Tensor,
              entries: int) -> torch.Tensor:
        """Entries [B,T,S] of kept blocks [B,T,blocks] that the query may see."""
        assert blocks is not None
        kept = blocks.repeat_interleave(self.config.candidate_block_size, dim=-1)[..., :entries]
        return kept & visible(positions, self.role.ratio, entries)


def visible(positions: torch.Tensor, ratio: int, entries: int) -> torch.Tensor:
    """[B,T,S]: query at position i sees the floor((i+1)/r) groups that are complete by then."""
    number = torch.arange(entries, device=positions.device)
    return number < ((positions + 1) // ratio)[..., None]


def chance(positions: torch.Tensor, entries: int, layer: int) -> torch.Tensor:
    """Scores [B,T,S] that mean nothing: a hash of position, entry and layer, 0 .. 2^24 - 1.

    No generator: the same query draws the same entries in any chunking.
    """
    mixed = positions[..., None] * 0x9E3779B1 + (
        torch.arange(entries, device=positions.device) + 1) * 0x85EBCA77 + layer * 0xC2B2AE3D
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return ((mixed ^ (mixed >> 15)) >> 8).float()


def candidate_blocks(scores: torch.Tensor, positions: torch.Tensor, ratio: int,
                     config: ModelConfig, run: Run) -> torch.Tensor:
    """The pool of every query as kept blocks [B,T,blocks], from masked scores [B,T,S].

    A block scores as its best entry; the block of the newest visible entry always survives.
    """
    size, S = config.candidate_block_size, scores.shape[-1]
    ragged = -S % size
    best = F.pad(scores, (0, ragged), value=MINUS_INF).unflatten(-1, (-1, size)).amax(-1)
    newest = (positions + 1) // ratio - 1                               # [B,T], -1 = none yet
    number = torch.arange(best.shape[-1], device=scores.device)
    pinned = (number == (newest // size)[..., None]) & (newest >= 0)[..., None]
    best = best.masked_fill(pinned, float("inf"))
    kept = run.kernels.select_top(best, config.candidate_topk_blocks)   # [B,T,n]
    mask = torch.zeros(*best.shape[:-1], best.shape[-1] + 1, dtype=torch.bool, device=best.device)
    # -1 (none) goes to an extra column that is cut off: it must never stand for the last block.
    mask.scatter_(-1, torch.where(kept < 0, best.shape[-1], kept), True)
    return mask[..., :-1]
