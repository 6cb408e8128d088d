"""How much of the attention the index keeps: the mass that falls on what it selected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from labkit.config import LayerRole, ModelConfig
from labkit.lab import Lab
from labkit.model.indexer import visible
from labkit.text.corpus import load_corpus
from labkit.text.synthetic import SHORTEST_DOCUMENT, recall
from labkit.trace import Taps
from labkit.train.recall import MARGIN, needles_fit

NOVELS, ANSWERS = "novels", "needle answers"
QUERIES = 128   # of a row of novels, evenly spread: the layers read all, the mass is of these


@dataclass(frozen=True)
class Mass:
    """Means over `queries` queries of one layer and over its heads.

    kept           of the mass on all keys: those in the window, which are always read, and all
                   entries that the query may see. The sink has no value and is left out
    kept_entries   of the mass on those entries alone
    *_random       the same of a random selection of the same size
    kept_best      the most that a selection of that size can keep: of those entries with the
                   largest mean mass over heads
    Only queries that see more entries than they may select are counted.
    """

    layer: int
    kind: str                # full, reindex or reuse
    source: int              # layer whose selection it reads
    text: str                # NOVELS or ANSWERS
    queries: int
    kept: float
    kept_random: float
    kept_entries: float
    kept_entries_random: float
    kept_best: float


def attention_mass(lab: Lab, rows: int = 6, answers: int = 4,
                   progress: Callable[[list[tuple[str, list[int], torch.Tensor]]],
                                      Iterable[tuple[str, list[int], torch.Tensor]]] = iter,
                   ) -> tuple[Mass, ...]:
    """Of every layer that reads a selection, on held-out novels and on needle answers.

    rows: of novels, each as long as the context. answers: needles at each of two distances.
    Where no query has to choose, nothing is told of the layer.
    """
    texts = [*_novels(lab, rows), *_needles(lab, answers)]
    generator = torch.Generator().manual_seed(0)
    sums: dict[tuple[str, int], torch.Tensor] = {}
    counts: dict[tuple[str, int], int] = {}
    for text, ids, queries in progress(texts):
        for layer, found in _masses(lab, ids, queries, generator):       # [n,5]
            key = (text, layer)
            sums[key] = sums.get(key, torch.zeros(5)) + found.sum(0)
            counts[key] = counts.get(key, 0) + len(found)
    out = []
    for (text, layer), total in sums.items():
        role = lab.config.roles[layer]
        assert role.index_source is not None
        values = [float(v) for v in total / counts[text, layer]]
        out.append(Mass(layer, role.kind, role.index_source, text, counts[text, layer], *values))
    return tuple(out)


def _novels(lab: Lab, rows: int) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    """The beginnings of held-out novels, and positions spread over them."""
    context = lab.config.max_position_embeddings
    for text in list(load_corpus("heldout").values())[:rows]:
        ids = [lab.config.bos_token_id, *lab.tokenizer.encode(text)][:context]
        yield NOVELS, ids, torch.linspace(0, len(ids) - 1, QUERIES).long().unique()


def _needles(lab: Lab, count: int) -> Iterator[tuple[str, list[int], torch.Tensor]]:
    """Texts with a statement and its question, and the positions that guess the answer's ids."""
    room = lab.config.max_position_embeddings - 1
    if room < 2 * SHORTEST_DOCUMENT or not needles_fit(lab.tokenizer):
        return
    for distance in (room // 4, room - MARGIN):
        for index in range(count):
            found = recall(lab.tokenizer, distance, room, index=index)
            (answer,) = found.answers
            # With BOS in front, position `at` is that of the id before the answer.
            yield (ANSWERS, [lab.config.bos_token_id, *found.ids],
                   torch.arange(answer.at, answer.at + answer.size))


def wanted(config: ModelConfig) -> list[str]:
    """Names of what `_masses` reads."""
    names = []
    for role in config.roles:
        if role.ratio:
            names += [f"layers.{role.layer}.attn.{what}" for what in ("q", "window")]
    names += [f"layers.{i}.attn.topk_indices" for i in config.index_source_layer_ids]
    return names + [f"layers.{i}.attn.compressed_kv" for i in config.kv_source_layer_ids]


@torch.no_grad()
def _masses(lab: Lab, ids: list[int], queries: torch.Tensor, generator: torch.Generator,
            ) -> Iterator[tuple[int, torch.Tensor]]:
    """(layer, [n,5]) of one text at those of the positions `queries` that have to choose."""
    c, taps = lab.config, Taps(wanted(lab.config))
    lab.model(torch.tensor([ids]), taps=taps)
    for role in c.roles:
        at = choosing(role, queries, c.index_topk) if role.ratio else queries[:0]
        if not len(at):
            continue
        name = f"layers.{role.layer}.attn"
        entries = taps[f"layers.{role.kv_source}.attn.compressed_kv"][0].cpu().float()  # [S,d]
        selected = taps[f"layers.{role.index_source}.attn.topk_indices"][0].cpu()[at]   # [n,K]
        # Query t sees columns t+1 .. t+W of the window, where column W+t is its own key; the
        # first W of them stand for nothing.
        padded = taps[f"{name}.window"][0].cpu().float()                                # [W+T,d]
        columns = at[:, None] + 1 + torch.arange(c.sliding_window)                      # [n,W]
        seen = visible(at[None], role.ratio, len(entries))[0]                           # [n,S]
        sizes = (selected >= 0).sum(-1)
        near, far = attention(taps[f"{name}.q"][0].cpu()[at].float(), padded[columns],
                              columns >= c.sliding_window, entries, seen)
        parts = [kept_mass(near, far, kept) for kept in (
            held(selected, len(entries)), random_selection(seen, sizes, generator))]    # [n,2]
        best = kept_mass(near, far, best_selection(far, sizes))                         # [n,2]
        yield role.layer, torch.cat([torch.stack(parts, -1).flatten(1), best[:, :1]], 1)


def choosing(role: LayerRole, queries: torch.Tensor, topk: int) -> torch.Tensor:
    """Those of the positions [n] that see more entries than they may select."""
    return queries[(queries + 1) // role.ratio > topk]


def held(selected: torch.Tensor, entries: int) -> torch.Tensor:
    """Numbers [n,K], -1 = none -> which entries that is, bool [n,entries]."""
    mask = torch.zeros(len(selected), entries + 1, dtype=torch.bool)
    return mask.scatter(-1, selected.masked_fill(selected < 0, entries), True)[:, :-1]


def random_selection(seen: torch.Tensor, sizes: torch.Tensor,
                     generator: torch.Generator) -> torch.Tensor:
    """bool [n,S]: of the entries that each query sees, so many at random."""
    order = torch.rand(seen.shape, generator=generator).masked_fill(~seen, -1.0)
    return _first(order, sizes) & seen


def best_selection(far: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """bool [n,S]: for each query so many entries, those on which its heads together put the most
    of far [n,H,S]. What is kept is a sum over entries, so no other selection keeps more."""
    return _first(far.sum(1), sizes)


def _first(order: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """bool [n,S]: so many of each row, the largest ones."""
    return order.argsort(-1, descending=True).argsort(-1) < sizes[:, None]


def attention(q: torch.Tensor, window: torch.Tensor, there: torch.Tensor, entries: torch.Tensor,
              seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mass on the window [n,H,W] and on all visible entries [n,H,S], together 1.

    q [n,H,d]; window [n,W,d], of which `there` [n,W] exist; entries [S,d], of which `seen` [n,S]
    may be seen.
    """
    scale = q.shape[-1] ** -0.5
    near = torch.einsum("nhd,nwd->nhw", q, window) * scale                  # [n,H,W]
    far = torch.einsum("nhd,sd->nhs", q, entries) * scale                   # [n,H,S]
    near = near.masked_fill(~there[:, None], float("-inf"))
    far = far.masked_fill(~seen[:, None], float("-inf"))
    mass = torch.softmax(torch.cat([near, far], -1), -1)                    # [n,H,W+S]
    W = window.shape[1]
    return mass[..., :W], mass[..., W:]


def kept_mass(near: torch.Tensor, far: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[n,2]: the share of attention on window and kept entries, of that on all keys; and the
    share on kept entries, of that on entries. Means over heads.

    near [n,H,W] and far [n,H,S] as `attention` gives them; kept [n,S], the entries that are read.
    """
    held_far = (far * kept[:, None]).sum(-1)                                # [n,H]
    alone = held_far / far.sum(-1).clamp_min(torch.finfo(far.dtype).tiny)
    return torch.stack([near.sum(-1) + held_far, alone], -1).mean(1)
