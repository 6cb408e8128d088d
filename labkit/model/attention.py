"""CSA2 attention: a sliding window plus a selection from a shared compressed cache.

All layers have a window. A Full layer also compresses the tokens it reads and publishes the
entries; Reindex and Reuse layers read the last Full layer's entries.
"""

from __future__ import annotations

import torch
from torch import nn

from labkit.config import LayerRole, ModelConfig
from labkit.model.compressor import Compressor
from labkit.model.indexer import Indexer
from labkit.model.norm import RMSNorm
from labkit.model.rope import rotate
from labkit.model.run import Run

Turns = tuple[torch.Tensor, torch.Tensor]  # cos, sin, [B,T,R/2] each


def _per_head(turns: Turns) -> Turns:
    return turns[0][:, :, None], turns[1][:, :, None]                   # [B,T,1,R/2]


class GroupedLinear(nn.Module):
    """Block-diagonal projection: group g of the input meets only its own rows of the weight."""

    def __init__(self, width: int, rank: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * rank, width // groups))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., G, width/G] -> [..., G*rank]."""
        weight = self.weight.unflatten(0, (self.groups, -1))            # [G,rank,width/G]
        return torch.einsum("...gi,goi->...go", x, weight).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, role: LayerRole, name: str) -> None:
        super().__init__()
        c = self.config = config
        self.role, self.name = role, name
        self.wq_a = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = nn.Linear(c.q_lora_rank, c.num_attention_heads * c.head_dim, bias=False)
        self.wkv = nn.Linear(c.hidden_size, c.head_dim, bias=False)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.attn_sink = nn.Parameter(torch.zeros(c.num_attention_heads))
        self.wo_a = GroupedLinear(c.num_attention_heads * c.head_dim, c.o_lora_rank, c.o_groups)
        self.wo_b = nn.Linear(c.o_groups * c.o_lora_rank, c.hidden_size, bias=False)
        if role.kind == "full":
            self.compressor = Compressor(c, role.layer)
        if role.kind in ("full", "reindex"):
            self.indexer = Indexer(c, role)

    def forward(self, x: torch.Tensor, run: Run, published: bool = False) -> torch.Tensor:
        """x [B,T,D] -> [B,T,D]; advances this layer's window and, in a Full layer, its store.

        published: `publish` has already stored the entries of these tokens.
        """
        role, name = self.role, self.name
        turns = run.turns(compressed=role.ratio > 0)                    # [B,T,R/2] each
        q_latent, q = self.queries(x, turns)                    # [B,T,q_lora], [B,T,H,d]
        window, start = run.cache.windows[role.layer].take_in(
            run.unpack(self.key_values(x, turns)), run.start, run.count, run.enter, run.keep)
        # [B,W+T,d], [B]

        if role.kind == "full" and not published:
            self.publish(x, run)
        if role.kind in ("full", "reindex"):
            run.published.selection = self.indexer(x, q_latent, run)
        entries = selection = None
        if role.ratio:
            assert run.published.entries is not None and run.published.selection is not None
            entries, selection = run.published.entries.read(run.rows(run.published.selection),
                                                            run.sequence)
        run.tap_tokens(f"{name}.q", q)
        run.tap(f"{name}.window", window)
        window, start = run.window_rows(window, start)
        y = run.kernels.sparse_attention(run.rows(q), window, entries, selection, self.attn_sink,
                                         start)                         # [B,T,H,d]
        out = self.output(run.tokens(y).to(x.dtype), turns)             # [B,T,D]
        run.tap_tokens(f"{name}.out", out)
        return out

    def queries(self, x: torch.Tensor, turns: Turns) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B,T,D] -> the latent [B,T,q_lora], which the index reads too, and q [B,T,H,d]."""
        c = self.config
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).unflatten(-1, (c.num_attention_heads, c.head_dim))
        return q_latent, rotate(q, _per_head(turns))

    def key_values(self, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        """[B,T,D] -> [B,T,d]: one vector per token is key and value of every head, rotated whole.

        Not rounded yet: what stores it does that.
        """
        kv = rotate(self.kv_norm(self.wkv(x)), turns)
        return kv

    def output(self, y: torch.Tensor, turns: Turns) -> torch.Tensor:
        """Weighted values [B,T,H,d] -> [B,T,D]."""
        # Keys are values here, so values carry their rotation: turn it back at the query's place.
        y = rotate(y, _per_head(turns), inverse=True)                   # [B,T,H,d]
        y = y.flatten(-2).unflatten(-1, (self.config.o_groups, -1))     # [B,T,G,H*d/G]
        out = self.wo_b(self.wo_a(y))
        return out

    def publish(self, x: torch.Tensor, run: Run) -> None:
        """Compress, store (which rounds), and make this layer's cache the one that is read."""
        name, ratio, cache = self.name, self.role.ratio, run.cache
        latent, complete = self.compressor(x, run)                      # [B,G,d], [B]
        entries = rotate(latent, run.group_turns(ratio, latent.shape[1]))
        store = cache.stores[self.role.layer]
        store.append(entries, self.indexer.keys(latent, run), run.start // ratio, complete)
        # Published anew in every pass, also when no group was completed: the keys that a step
        # scores against are always the owner's.
        run.published.entries = run.published.index_keys = store
        if cache.stale_index_keys:  # the released reference's fault, on request
            if cache.shared_slot is None or bool(complete.any()):
                cache.shared_slot = store
            run.published.index_keys = cache.shared_slot
        run.tap(f"{name}.compressed_kv", store.values)
        run.tap(f"{name}.index_keys", store.keys)
