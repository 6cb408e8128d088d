"""Exercise 3.3: the candidate pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit.exercises.record import Case, Mistake
from labkit.kernels.reference import index_scores
from labkit.text.corpus import load_corpus
from labkit.viz.selection_data import record_selections

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "3.3", "The candidate pool", "pool_of"
MINUTES, DIFFICULTY, IMPORTANCE = 20, 4, 3
TOLERANCE = 0.0
OBJECTIVE = """
One layer narrows the search for all index sources behind it. Write its pool. Entries form blocks
of `size` consecutive ones; the last block may be shorter. For each query a block scores as the
best of its entries *that the query sees*, floor((i+1)/r) of them. The block that holds the newest
visible entry is always kept; it is one of the `keep` best blocks. Of equal blocks the earlier one
wins. Return the mask [T,S] of all entries of kept blocks that the query sees.
"""
HELP = (
    """Hide first, then rank: an entry that the query does not see must not lift its block. And hide
    again at the end: a kept block may hold entries that are still to come.""",
    """Pad S to a multiple of `size` with minus infinity and unflatten: [T,blocks,size]; the maximum
    over the last axis is the block's score. The newest visible entry is number
    floor((i+1)/r) - 1, its block that number divided by `size`; give this block plus infinity and
    it wins every ranking.""",
    """```python
    seen = torch.arange(S) < ((positions + 1) // r)[:, None]
    masked = scores.masked_fill(~seen, float("-inf"))
    padded = torch.nn.functional.pad(masked, (0, -S % size), value=...)
    best = padded.unflatten(1, (-1, size)).amax(-1)                 # [T,blocks]
    newest = ((positions + 1) // r - 1) // size
    best[torch.arange(best.shape[1]) == newest[:, None]] = float("inf")
    order = best.sort(dim=-1, descending=True, stable=True).indices[:, :keep]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, order, True)
    return kept.repeat_interleave(size, dim=1)[:, :S] & ...
    ```""",
)
AFTER = """This is the pool of the run: `keep` blocks instead of the whole text are all that later
index sources have to score. Its publisher does not use it. The check cannot see what it costs:
your mask still has a place for every entry, while a kernel for long texts keeps block numbers and
scores nothing else."""


def solution(scores, positions, r, size, keep):
    """Entries of the pool, bool [T,S].

    scores [T,S] of queries at `positions` int64 [T] for all entries, seen or not.
    """
    S = scores.shape[1]
    seen = torch.arange(S) < ((positions + 1) // r)[:, None]                # [T,S]
    masked = scores.masked_fill(~seen, float("-inf"))
    padded = torch.nn.functional.pad(masked, (0, -S % size), value=float("-inf"))
    best = padded.unflatten(1, (-1, size)).amax(dim=-1)                     # [T,blocks]
    newest = ((positions + 1) // r - 1) // size
    pinned = torch.arange(best.shape[1]) == newest[:, None]
    best = best.masked_fill(pinned, float("inf"))
    order = best.sort(dim=-1, descending=True, stable=True).indices[:, :keep]
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, order, True)
    return kept.repeat_interleave(size, dim=1)[:, :S] & seen


def alternative(scores, positions, r, size, keep):
    """Query by query, block by block."""
    out = torch.zeros(scores.shape, dtype=torch.bool)
    for row, position in enumerate(positions.tolist()):
        seen = min(scores.shape[1], (position + 1) // r)
        firsts = list(range(0, seen, size))
        best = {first: float(scores[row, first : min(first + size, seen)].max())
                for first in firsts[:-1]}
        kept = sorted(best, key=lambda first: (-best[first], first))[: keep - 1] + firsts[-1:]
        for first in kept:
            out[row, first : min(first + size, seen)] = True
    return out


def _with(scores, positions, r, size, keep, *, pinned=True, pad=float("-inf"), before=True,
          after=True, whole=True, best=lambda blocks: blocks.amax(dim=-1)):
    S = scores.shape[1]
    seen = torch.arange(S) < ((positions + 1) // r)[:, None]
    masked = scores.masked_fill(~seen, float("-inf")) if before else scores
    padded = torch.nn.functional.pad(masked, (0, -S % size), value=pad)
    ranked = best(padded.unflatten(1, (-1, size)))
    ranked = ranked if whole else ranked[:, : S // size]
    if pinned:
        newest = ((positions + 1) // r - 1) // size
        at = torch.arange(ranked.shape[1]) == newest[:, None]
        ranked = ranked.masked_fill(at, float("inf"))
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :keep]
    kept = torch.zeros_like(ranked, dtype=torch.bool).scatter(1, order, True)
    mask = kept.repeat_interleave(size, dim=1)[:, :S]
    mask = torch.nn.functional.pad(mask, (0, S - mask.shape[1]), value=False)
    return mask & seen if after else mask


def newest_not_pinned(*args):
    return _with(*args, pinned=False)


def single_entries(scores, positions, r, size, keep):
    return _with(scores, positions, r, 1, size * keep)


def future_in_the_mask(*args):
    return _with(*args, after=False)


def future_in_the_ranking(*args):
    return _with(*args, before=False)


def zero_padding(*args):
    return _with(*args, pad=0.0)


def ragged_block_dropped(*args):
    return _with(*args, whole=False)


def mean_of_the_block(*args):
    def mean(blocks):
        finite = blocks.isfinite()
        total = blocks.masked_fill(~finite, 0.0).sum(dim=-1)
        return (total / finite.sum(dim=-1)).masked_fill(~finite.any(dim=-1), float("-inf"))
    return _with(*args, best=mean)


MISTAKES = (
    Mistake(future_in_the_mask, "the pool holds entries that the query cannot see yet; a kept "
            "block has to be cut at the newest visible entry.", "the causal mask applied once, "
            "before the ranking"),
    Mistake(future_in_the_ranking, "blocks are ranked with entries that the query cannot see: "
            "the future decides what it may look at.", "the causal mask applied once, at the end"),
    Mistake(newest_not_pinned, "the newest block had to win its place; it is kept whatever it "
            "scores, so that a query never loses the text right before it.",
            "mutant `newest_block_not_pinned`"),
    Mistake(single_entries, "the best single entries were kept; the pool keeps whole blocks, so "
            "that a block's neighbours come along.", "a pool taken for a larger top-k"),
    Mistake(zero_padding, "the last block was padded with zeros, which outrank entries with "
            "negative scores; pad with minus infinity.", "mutant `ragged_block_pads_zero`"),
    Mistake(ragged_block_dropped, "the last block is shorter than the others and was left out; "
            "it counts like any other.", "scores.shape[1] // size blocks"),
    Mistake(mean_of_the_block, "a block scored as the mean of its entries; it scores as its best "
            "one, so one good entry is enough.", "mean pooling over blocks"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c, source = lab.config, lab.config.candidate_source_layer_id
    size, keep, r = c.candidate_block_size, c.candidate_topk_blocks, c.compress_ratios[source]
    passage = lab.encode(load_corpus("heldout")["prideprejudice"])
    T = (keep + 12) * size * r + 3                     # the last block is short
    run = record_selections(lab, passage[:T])
    name = f"layers.{source}.attn"
    for what, at, end, kept in (
            (f"{keep} blocks of a long text", range(T - 9, T), T, keep),
            ("queries inside the text do not see its end", range(90, T, 83), T, 8),
            ("two blocks: the newest and one more", range(T - 40, T, 3), T, 2),
            ("queries at the beginning see less than a block", range(4), 21, 4)):
        positions = torch.tensor(at)
        scores = index_scores(run.taps[f"{name}.index_queries"][:, positions],
                              run.taps[f"{name}.index_keys"][:, : end // r],
                              run.taps[f"{name}.index_weights"][:, positions])[0].float().cpu()
        yield Case(what, (scores, positions, r, size, kept))
