"""Where the attention of one query went, computed from one recorded run.

The only place in which pictures turn taps into attention weights: it calls the reference kernel
on the recorded queries, window, entries and selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.kernels.reference import attention_probabilities
from labkit.viz.tokens import pieces

if TYPE_CHECKING:
    from labkit.lab import Lab
    from labkit.trace import Taps

PATTERNS = [f"*.attn.{name}" for name in (
    "q", "window", "topk_indices", "compressed_kv", "candidates", "out")]


@dataclass(frozen=True)
class Look:
    """One query in one layer. Weights are of one head, or the mean over heads.

    window      [(position, weight)], newest last; every position the window holds
    entries     [(entry, first position, last position, weight)] of the selected entries
    pool        [(first position, last position)] of the pool's blocks that this query may see,
                joined where they touch; None in layers that no pool restricts or comes from
    sink        weight of the sink; all weights and the sink add up to 1
    """

    layer: int
    query: int
    head: int | None
    ratio: int
    window: list[tuple[int, float]]
    entries: list[tuple[int, int, int, float]]
    pool: list[tuple[int, int]] | None
    sink: float

    @property
    def window_share(self) -> float:
        return sum(weight for _, weight in self.window)

    @property
    def entries_share(self) -> float:
        return sum(weight for *_, weight in self.entries)


class Recording:
    """A run over one sequence: its tokens, its taps, and the sinks of that moment.

    ids [T], texts: one string a token, taps: as `Lab.trace` gives them.
    """

    def __init__(self, config: ModelConfig, ids: Sequence[int], texts: Sequence[str], taps: Taps,
                 sinks: Sequence[torch.Tensor]) -> None:
        self.config, self.ids, self.texts, self.taps = config, list(ids), list(texts), taps
        self.sinks = list(sinks)

    def __len__(self) -> int:
        return len(self.ids)

    def look(self, layer: int, query: int, head: int | None = None) -> Look:
        """Where position `query` of layer `layer` looks; head None: the mean over heads.

        InputError for a layer, a query or a head that the run does not have.
        """
        c = self.config
        for name, value, end in (("layer", layer, c.num_hidden_layers), ("query", query, len(self)),
                                 ("head", head, c.num_attention_heads)):
            if value is not None and not 0 <= value < end:
                raise InputError(f"{name} is {value}: this run has 0 to {end - 1}")
        role, W = c.roles[layer], c.sliding_window
        entries = selected = None
        if role.ratio:
            entries = self.taps[f"layers.{role.kv_source}.attn.compressed_kv"][:1]    # [1,S,d]
            selection = self.taps[f"layers.{role.index_source}.attn.topk_indices"]
            selected = selection[:1, query : query + 1]                               # [1,1,K]
        weights, _ = attention_probabilities(
            self.taps[f"layers.{layer}.attn.q"][:1, query : query + 1],               # [1,1,H,d]
            self.taps[f"layers.{layer}.attn.window"][:1, query : query + W + 1],      # [1,W+1,d]
            entries, selected, self.sinks[layer], torch.tensor([query]),
        )
        weight = weights[0, 0].mean(0) if head is None else weights[0, 0, head]            # [W+K]
        values = weight.tolist()
        positions = range(query - W + 1, query + 1)
        window = [(p, w) for p, w in zip(positions, values[:W], strict=True) if p >= 0]
        picked = [] if selected is None else selected[0, 0].tolist()
        r = role.ratio
        listed = [(e, e * r, e * r + r - 1, w) for e, w in zip(picked, values[W:], strict=True)
                  if e >= 0]
        return Look(layer, query, head, r, window, listed, self._pool(layer, query),
                    1.0 - float(weight.sum()))

    def spread(self, layer: int) -> torch.Tensor:
        """Attention of all queries over window columns, entries by number, and the sink.

        [T,H,W+S+1], each row adds up to 1. Unlike the kernel's columns these mean the same in
        two runs that selected differently.
        """
        c, role = self.config, self.config.roles[layer]
        entries = selected = None
        if role.ratio:
            entries = self.taps[f"layers.{role.kv_source}.attn.compressed_kv"][:1]    # [1,S,d]
            selected = self.taps[f"layers.{role.index_source}.attn.topk_indices"][:1]  # [1,T,K]
        weights, _ = attention_probabilities(
            self.taps[f"layers.{layer}.attn.q"][:1], self.taps[f"layers.{layer}.attn.window"][:1],
            entries, selected, self.sinks[layer], torch.tensor([0]))
        weights = weights[0]                                                         # [T,H,W+K]
        W, S = c.sliding_window, 0 if entries is None else entries.shape[1]
        out = weights.new_zeros(*weights.shape[:2], W + S + 1)
        out[..., :W] = weights[..., :W]
        if selected is not None:
            # What is not there (-1) has weight 0 and goes where the sink will be written.
            place = torch.where(selected[0] < 0, W + S, W + selected[0])[:, None]    # [T,1,K]
            out.scatter_(-1, place.expand(-1, weights.shape[1], -1), weights[..., W:])
        out[..., -1] = 1 - weights.sum(-1)
        return out

    def _pool(self, layer: int, query: int) -> list[tuple[int, int]] | None:
        """Blocks of the pool, if this layer's selection came through it or it publishes it."""
        c, role = self.config, self.config.roles[layer]
        restricted = role.index_source is not None and c.roles[role.index_source].uses_candidates
        if not (restricted or role.publishes_candidates):
            return None
        seen = self.taps[f"layers.{c.candidate_source_layer_id}.attn.candidates"][0, query]  # [S]
        joined: list[tuple[int, int]] = []
        for entry in seen.nonzero()[:, 0].tolist():
            first, end = entry * role.ratio, entry * role.ratio + role.ratio - 1
            if joined and joined[-1][1] == first - 1:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((first, end))
        return joined


def record(lab: Lab, text: str | Sequence[int], max_tokens: int | None = None,
           more: Sequence[str] = ()) -> Recording:
    """Run the model over a text (or ids) once and keep what attention pictures need.

    more: patterns of further names to keep.
    """
    ids = lab.encode(text)[:max_tokens]
    taps = lab.trace(ids, patterns=[*PATTERNS, *more])
    sinks = [lab.model.get_parameter(f"layers.{layer}.attn.attn_sink").detach().clone()
             for layer in range(lab.config.num_hidden_layers)]
    return Recording(lab.config, ids, pieces(lab.tokenizer, ids), taps, sinks)
