"""What the index picks and what a layer's own attention would pick, from one recorded run.

Scores are computed again from the recorded index queries, keys and weights, so that they can be
cut at any K; dense attention is what the layer would do if it read every entry that it sees
(`labkit.train.attention_mass`; the sink, which has no value, is left out).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from labkit.errors import InputError
from labkit.kernels.reference import MINUS_INF, index_scores, select_top
from labkit.model.indexer import visible
from labkit.train.attention_mass import (
    attention,
    best_selection,
    choosing,
    held,
    kept_mass,
    random_selection,
)
from labkit.viz.attention_data import PATTERNS, Recording
from labkit.viz.tokens import pieces

if TYPE_CHECKING:
    from labkit.lab import Lab

MORE = [f"*.attn.{name}" for name in ("index_keys", "index_queries", "index_weights")]


class Selections(Recording):
    """A recorded run with its index: an `AttentionExplorer` takes it as well."""

    @property
    def readers(self) -> list[int]:
        """The layers that read entries."""
        return [role.layer for role in self.config.roles if role.ratio]

    def scores(self, source: int, queries: torch.Tensor) -> torch.Tensor:
        """What the index of layer `source` ranks, [n,S] at the positions [n]; -inf: not allowed.

        Not allowed are groups that are not complete yet, and what the pool leaves out.
        """
        role, name = self.config.roles[source], f"layers.{source}.attn"
        if role.index_source != source:
            raise InputError(f"layer {source} has no index: choose one of "
                             f"{', '.join(map(str, self.config.index_source_layer_ids))}")
        keys = self.taps[f"layers.{role.kv_source}.attn.index_keys"][:1]           # [1,S,di]
        found = index_scores(self.taps[f"{name}.index_queries"][:1, queries], keys,
                             self.taps[f"{name}.index_weights"][:1, queries])[0]   # [n,S]
        allowed = visible(queries[None], role.ratio, keys.shape[1])[0]
        if role.uses_candidates:
            pool = self.taps[f"layers.{self.config.candidate_source_layer_id}.attn.candidates"]
            allowed = allowed & pool[0, queries]
        return found.masked_fill(~allowed, MINUS_INF)

    def selected(self, source: int, queries: torch.Tensor, topk: int | None = None,
                 ) -> torch.Tensor:
        """The entries [n,K] that the index of `source` picks, -1 = none; K as the model has it
        unless `topk` says otherwise."""
        return select_top(self.scores(source, queries), topk or self.config.index_topk)

    def dense(self, layer: int, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the window [n,H,W] and to all visible entries [n,H,S], together 1."""
        role, W = self.config.roles[layer], self.config.sliding_window
        entries = self.taps[f"layers.{role.kv_source}.attn.compressed_kv"][0].float()   # [S,d]
        padded = self.taps[f"layers.{layer}.attn.window"][0].float()                    # [W+T,d]
        columns = queries[:, None] + 1 + torch.arange(W)                                # [n,W]
        return attention(self.taps[f"layers.{layer}.attn.q"][0, queries].float(),
                         padded[columns], columns >= W, entries,
                         visible(queries[None], role.ratio, len(entries))[0])

    def ranked(self, layer: int, query: int, topk: int) -> Ranked:
        """One query of one layer, with `topk` entries to select.

        InputError where there is nothing to rank.
        """
        role = self.config.roles[layer]
        if not role.ratio or not 0 <= query < len(self) or query + 1 < role.ratio:
            raise InputError(f"query {query} of layer {layer} sees no entries: choose a layer of "
                             f"{self.readers} and a query that has some")
        at = torch.tensor([query])
        near, far = self.dense(layer, at)
        seen = (query + 1) // role.ratio
        share = (far / far.sum(-1, keepdim=True)).mean(1)[0, :seen]                      # [n]
        order = share.argsort(descending=True, stable=True)
        assert role.index_source is not None
        scores = self.scores(role.index_source, at)[0, :seen]
        by_index = scores.argsort(descending=True, stable=True)
        by_index = by_index[scores[by_index] > MINUS_INF]                      # the pool's alone
        place = {entry: number for number, entry in enumerate(by_index.tolist(), 1)}
        return Ranked(layer, query, topk, role.ratio, float(near.sum(-1).mean()), order.tolist(),
                      share[order].tolist(), [place.get(entry) for entry in order.tolist()],
                      share[by_index].cumsum(0).tolist())

    @cached_property
    def comparison(self) -> Comparison:
        """All selections of this run side by side; computed once."""
        return compare(self)


def record_selections(lab: Lab, text: str | Sequence[int], max_tokens: int | None = None,
                      ) -> Selections:
    """As `attention_data.record`, with what the index needs."""
    ids = lab.encode(text)[:max_tokens]
    taps = lab.trace(ids, patterns=[*PATTERNS, *MORE])
    sinks = [lab.model.get_parameter(f"layers.{layer}.attn.attn_sink").detach().clone()
             for layer in range(lab.config.num_hidden_layers)]
    return Selections(lab.config, ids, pieces(lab.tokenizer, ids), taps, sinks)


# ---------------------------------------------------------------------------- one query
@dataclass(frozen=True)
class Ranked:
    """Entries that a query sees, the one that its layer attends to most first.

    window   share of all attention that stays in the window (mean over heads)
    entries  their numbers; share: of the attention on entries (mean over heads; adds up to 1)
    place    of each in the order of the index, 1 = first; None where the pool leaves it out
    by_index share of the first, of the first two, ... entries in the order of the index; shorter
             than `entries` where the pool leaves some out
    """

    layer: int
    query: int
    topk: int
    ratio: int
    window: float
    entries: list[int]
    share: list[float]
    place: list[int | None]
    by_index: list[float]

    @property
    def taken(self) -> list[bool]:
        """Whether the index takes it when it may take `topk`."""
        return [place is not None and place <= self.topk for place in self.place]

    @property
    def best(self) -> list[float]:
        """What the best selection of 1, 2, ... entries keeps."""
        total, out = 0.0, []
        for value in self.share:
            total += value
            out.append(total)
        return out

    @property
    def kept(self) -> float:
        """What the index keeps with `topk` entries."""
        return self.by_index[min(self.topk, len(self.by_index)) - 1] if self.by_index else 0.0

    @property
    def kept_best(self) -> float:
        return self.best[min(self.topk, len(self.share)) - 1]

    @property
    def kept_random(self) -> float:
        """What a random selection keeps on average: its share of the entries."""
        return min(1.0, self.topk / len(self.share))


# ---------------------------------------------------------------------------- all queries
@dataclass(frozen=True)
class Column:
    """A way of selecting: the index of a layer, or what a layer's own attention would pick."""

    kind: str                # "index" or "own"
    layer: int
    cache: int               # the Full layer whose entries it numbers

    @property
    def name(self) -> str:
        return f"{self.kind} {self.layer}"


@dataclass(frozen=True)
class Comparison:
    """Selections of equal size, compared at every query that has to choose.

    columns   N ways of selecting, those of a cache side by side
    queries   [n] positions; `chooses` [n,N]: whether it sees more entries than it may select
    jaccard   [n,N,N] share of the entries in either selection that are in both; nan where the
              two number the entries of different caches or there is no choice
    kept      [n,N,N] share of the attention on entries of the row's layer that the column's
              selection keeps; nan also in rows of kind "index"
    random    [n,N] the same for a random selection
    """

    columns: tuple[Column, ...]
    queries: torch.Tensor
    jaccard: torch.Tensor
    kept: torch.Tensor
    random: torch.Tensor

    def mean(self, measure: str, first: int, last: int) -> torch.Tensor:
        """[N,N] means of "jaccard" or "kept" over the queries first..last; nan: none chooses."""
        within = (self.queries >= first) & (self.queries <= last)
        return getattr(self, measure)[within].nanmean(0)

    def chosen(self, first: int, last: int) -> int:
        """How many queries of first..last have a choice in some layer."""
        within = (self.queries >= first) & (self.queries <= last)
        return int((~self.random[within].isnan()).any(-1).sum())


def compare(run: Selections) -> Comparison:
    """Every index and every layer's own choice, pair by pair. Own: the K entries on which the
    layer's heads together put most; `random` from a fixed seed."""
    c, roles = run.config, run.config.roles
    queries, generator = torch.arange(len(run)), torch.Generator().manual_seed(0)
    columns = [Column(kind, layer, cache) for cache in c.kv_source_layer_ids
               for kind, layers in (("index", c.index_source_layer_ids), ("own", run.readers))
               for layer in layers if roles[layer].kv_source == cache]
    n, N = len(queries), len(columns)
    jaccard, kept = torch.full((n, N, N), torch.nan), torch.full((n, N, N), torch.nan)
    random = torch.full((n, N), torch.nan)
    for cache in c.kv_source_layer_ids:
        own = [i for i, column in enumerate(columns) if column.cache == cache]
        at = choosing(roles[cache], queries, c.index_topk)                          # [m]
        if not len(at):
            continue
        S = run.taps[f"layers.{cache}.attn.compressed_kv"].shape[1]
        sizes = torch.full((len(at),), c.index_topk)
        far = {columns[i].layer: run.dense(columns[i].layer, at)[1]
               for i in own if columns[i].kind == "own"}                            # [m,H,S] each
        masks = torch.stack([
            held(run.selected(columns[i].layer, at), S) if columns[i].kind == "index"
            else best_selection(far[columns[i].layer], sizes) for i in own], 1).float()  # [m,A,S]
        both = torch.einsum("mas,mbs->mab", masks, masks)
        size = masks.sum(-1)
        either = size[:, :, None] + size[:, None] - both
        rows = torch.tensor(own)
        jaccard[at[:, None, None], rows[:, None], rows] = both / either
        seen = visible(at[None], roles[cache].ratio, S)[0]
        chance = random_selection(seen, sizes, generator)
        for i in own:
            if columns[i].kind == "own":
                alone = far[columns[i].layer]
                alone = (alone / alone.sum(-1, keepdim=True)).mean(1)               # [m,S]
                kept[at[:, None], i, rows] = torch.einsum("ms,mas->ma", alone, masks)
                random[at, i] = (alone * chance).sum(-1)
    return Comparison(tuple(columns), queries, jaccard, kept, random)


@dataclass(frozen=True)
class Kept:
    """Means over the queries of a layer that have to choose, and over heads.

    index, best, random   share of the attention on all keys (window and entries) that is on the
                          window and on what was selected: by the index, at best, at random
    entries               of the attention on entries alone, what the index keeps
    """

    layer: int
    kind: str
    source: int
    queries: int
    index: float
    best: float
    random: float
    entries: float


def kept_by_layer(run: Selections, every: int = 1) -> tuple[Kept, ...]:
    """Of every layer that reads entries; every: look at each such position only."""
    generator, out = torch.Generator().manual_seed(0), []
    for layer in run.readers:
        role = run.config.roles[layer]
        at = choosing(role, torch.arange(0, len(run), every), run.config.index_topk)
        if not len(at):
            continue
        assert role.index_source is not None
        near, far = run.dense(layer, at)
        sizes = torch.full((len(at),), run.config.index_topk)
        S = far.shape[-1]
        seen = visible(at[None], role.ratio, S)[0]
        index = kept_mass(near, far, held(run.selected(role.index_source, at), S)).mean(0)
        best = kept_mass(near, far, best_selection(far, sizes)).mean(0)
        random = kept_mass(near, far, random_selection(seen, sizes, generator)).mean(0)
        out.append(Kept(layer, role.kind, role.index_source, len(at), float(index[0]),
                        float(best[0]), float(random[0]), float(index[1])))
    return tuple(out)
