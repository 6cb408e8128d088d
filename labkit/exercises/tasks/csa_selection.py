"""Exercise 3.2: index scores, and the entries that a query selects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit.exercises.record import Case, Mistake
from labkit.viz.selection_data import record_selections

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "3.2", "Score the entries and select K", "select"
MINUTES, DIFFICULTY, IMPORTANCE = 20, 3, 5
TOLERANCE = 0.0
OBJECTIVE = """
Write the index. The score of entry g for query i is a weighted sum over the index heads:

    score(i,g) = sum over h of w[i,h] * relu(q[i,h] . k[g])

A query at position i sees the groups that are complete by then, floor((i+1)/r) of them, and no
other entry may be picked. Return for each query the numbers of its K best entries in ascending
order, then -1 for every place that is left over. Of equal scores the lower number wins.
"""
HELP = (
    """Three steps: products of every head with every key [T,Hi,S], one score per entry [T,S], then
    the choice. What a query may not see has to be out of the race before the choice: give it
    minus infinity.""",
    """Sort descending and stably, `torch.sort(..., descending=True, stable=True)`, and cut to K. A
    pick whose score is minus infinity is no pick: make it -1. Since -1 has to stand *behind* the
    real numbers, replace it by S first, sort ascending, then turn S into -1. With fewer than K
    entries in all, fill up.""",
    """```python
    scores = (torch.relu(torch.einsum("thd,sd->ths", q, keys)) * ...).sum(1)
    scores = scores.masked_fill(torch.arange(S) >= ..., float("-inf"))
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    picked = best.indices[:, :K].masked_fill(best.values[:, :K] == ..., S).sort(-1).values
    picked = torch.nn.functional.pad(picked, (0, K - picked.shape[1]), value=S)
    return picked.masked_fill(picked == S, -1)
    ```""",
)
AFTER = """Your selection is that of the run, number for number. The check cannot see rounding: in
a bf16 model the product, the weighted product and the sum are rounded one after the other, and
entries with nearly equal scores then change places. It also cannot see memory: a matrix of a long
text's scores has to be made in pieces."""


def solution(q, keys, weights, positions, r, K):
    """Numbers of the selected entries, int64 [T,K], -1 = none.

    q [T,Hi,di] index queries at `positions` int64 [T]; keys [S,di]; weights [T,Hi] of
    the heads.
    """
    S = len(keys)
    dots = torch.einsum("thd,sd->ths", q, keys)                        # [T,Hi,S]
    scores = (torch.relu(dots) * weights[:, :, None]).sum(dim=1)       # ReLU, then sum
    hidden = torch.arange(S) >= ((positions + 1) // r)[:, None]        # [T,S]
    scores = scores.masked_fill(hidden, float("-inf"))
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    nothing = best.values[:, :K] == float("-inf")
    picked = best.indices[:, :K].masked_fill(nothing, S).sort(dim=-1).values
    picked = torch.nn.functional.pad(picked, (0, K - picked.shape[1]), value=S)
    return picked.masked_fill(picked == S, -1)


def alternative(q, keys, weights, positions, r, K):
    """Query by query with Python's own sort."""
    rows = []
    for query, weight, position in zip(q, weights, positions.tolist(), strict=True):
        seen = min(len(keys), (position + 1) // r)
        scores = [float((weight * (query @ keys[g]).clamp(min=0)).sum()) for g in range(seen)]
        order = sorted(range(seen), key=lambda g: (-scores[g], g))[:K]
        rows.append(sorted(order) + [-1] * (K - len(order)))
    return torch.tensor(rows, dtype=torch.int64)


def _with(q, keys, weights, positions, r, K, *, relu="head", weigh=True, hide=float("-inf"),
          seen=lambda positions, r: (positions + 1) // r, later=False, ascending=True):
    S = len(keys)
    dots = torch.einsum("thd,sd->ths", q, keys)
    dots = torch.relu(dots) if relu == "head" else dots
    scores = (dots * weights[:, :, None]).sum(dim=1) if weigh else dots.sum(dim=1)
    scores = torch.relu(scores) if relu == "sum" else scores
    scores = scores.masked_fill(torch.arange(S) >= seen(positions, r)[:, None], hide)
    scores = scores.flip(-1) if later else scores
    best = torch.sort(scores, dim=-1, descending=True, stable=True)
    nothing = best.values[:, :K] == float("-inf")
    picked = S - 1 - best.indices[:, :K] if later else best.indices[:, :K]
    picked = picked.masked_fill(nothing, S)
    picked = picked.sort(dim=-1).values if ascending else picked
    picked = torch.nn.functional.pad(picked, (0, K - picked.shape[1]), value=S)
    return picked.masked_fill(picked == S, -1)


def relu_after_the_sum(*args):
    return _with(*args, relu="sum")


def no_relu(*args):
    return _with(*args, relu="none")


def no_weights(*args):
    return _with(*args, weigh=False)


def unfinished_groups_seen(*args):
    return _with(*args, seen=lambda positions, r: positions // r + 1)


def the_future_seen(*args):
    return _with(*args, seen=lambda positions, r: positions * 0 + 10**9)


def finite_padding(*args):
    return _with(*args, hide=-1e30)


def best_first(*args):
    return _with(*args, ascending=False)


def ties_to_the_later(*args):
    return _with(*args, later=True)


MISTAKES = (
    Mistake(the_future_seen, "nothing is hidden: a query picks entries of tokens that come after "
            "it.", "a decoder's index run over a whole prompt at once"),
    Mistake(unfinished_groups_seen, "a query sees the group that it stands in, although that is "
            "not complete: floor((i+1)/r) groups are, not floor(i/r)+1.",
            "mutant `unfinished_group_visible`"),
    Mistake(finite_padding, "hidden entries got a very small number, so they are picked where "
            "fewer than K can be seen. With minus infinity a pick of nothing can be told, and "
            "becomes -1.", "mutant `finite_mask`"),
    Mistake(best_first, "the numbers stand in the order of their scores; they are to ascend.",
            "topk's own order"),
    Mistake(relu_after_the_sum, "the ReLU is applied to the sum over heads; it belongs to each "
            "head's product, before the sum.", "mutant `relu_after_sum`"),
    Mistake(no_relu, "there is no ReLU: a head that disagrees then pulls an entry down, where it "
            "should say nothing.", "a dot product as in attention"),
    Mistake(no_weights, "all heads count alike; each query weighs its heads with w.",
            "the weights projection left out"),
    Mistake(ties_to_the_later, "of equal scores the later entry won; the lower number wins, in a "
            "stable descending sort.", "mutant `ties_to_the_later`"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c = lab.config
    run = record_selections(lab, "It is a truth universally acknowledged, that a single man in "
                                 "possession of a good fortune, must be in want of a wife.")
    T = len(run)
    for what, layer, at, K, twice in (
            ("early queries see little and fill up with -1", 0, range(6), 8, False),
            ("a text with fewer entries than K", 0, range(T - 2, T), c.index_topk, False),
            ("later queries have to choose", 0, range(T - 8, T), 5, False),
            ("a layer with another ratio", 1, range(T - 8, T), 7, False),
            ("of equal scores the lower number wins", 1, range(T - 4, T), 5, True)):
        source = c.kv_source_layer_ids[layer]
        positions, name = torch.tensor(at), f"layers.{source}.attn"
        keys = run.taps[f"{name}.index_keys"][0].double().cpu()
        if twice:
            keys = torch.cat([keys[: T // 2], keys[: T // 2]])
        # Rounded, so that sums are exact in float64 in any order.
        weights = (run.taps[f"{name}.index_weights"][0, at].double().cpu() * 1024).round() / 1024
        yield Case(what, (run.taps[f"{name}.index_queries"][0, at].double().cpu(), keys, weights,
                          positions, c.compress_ratios[source], K))
