"""Exercise 3.1: r tokens become one entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from labkit.exercises.record import Case, Mistake
from labkit.viz.what_if import input_of

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "3.1", "Compress a group into an entry", "entries_of"
MINUTES, DIFFICULTY, IMPORTANCE = 15, 2, 5
TOLERANCE = 1e-5
OBJECTIVE = """
A Full layer makes two vectors of width d of every token: a *value* and a *gate*. Write what turns
groups of r consecutive tokens into entries. In every channel by itself, the gates of the group's
r tokens go through a softmax, and the entry is the sum of the r values with these weights. An
entry's position, with which it is rotated later, is that of its first token. A group whose tokens
are not all there gives no entry.
"""
HELP = (
    """Work out the number of groups first: T // r. What is left over at the end of the text waits
    for tokens to come. Then give both tensors a shape in which the r tokens of a group have an
    axis of their own.""",
    """`x[: G * r].unflatten(0, (G, r))` is [G,r,d]: groups, tokens of a group, channels. The
    softmax runs over the tokens of a group, the axis that the sum then removes. Groups and
    channels do not meet.""",
    """```python
    G = len(values) // r
    value = values[: G * r].unflatten(0, (G, r))       # [G,r,d]
    gate = gates[: G * r].unflatten(0, (G, r))
    pooled = (torch.softmax(gate, dim=...) * value).sum(...)
    return pooled, torch.arange(G) * ...
    ```""",
)
AFTER = """These are the compressor's own numbers before its norm. A channel can take the first
token and the channel beside it the second: an entry is no average of its tokens. The check cannot
see what happens to a group that is cut by the end of a chunk: values *and* gates of its tokens
have to wait in the cache until the rest arrives."""


def solution(values, gates, r):
    """Pooled entries [G,d] and the position int64 [G] of each.

    values, gates [T,d]: of every token of the text. r: tokens a group.
    """
    G = len(values) // r
    value = values[: G * r].unflatten(0, (G, r))               # [G,r,d]
    gate = gates[: G * r].unflatten(0, (G, r))
    pooled = (torch.softmax(gate, dim=1) * value).sum(dim=1)   # per channel
    return pooled, torch.arange(G) * r


def alternative(values, gates, r):
    """Group by group, the softmax written out."""
    pooled = []
    for first in range(0, len(values) - r + 1, r):
        weight = (gates[first : first + r] - gates[first : first + r].amax(0)).exp()
        pooled.append((weight * values[first : first + r]).sum(0) / weight.sum(0))
    positions = torch.tensor(range(0, len(values) - r + 1, r), dtype=torch.int64)
    return (torch.stack(pooled) if pooled else values[:0]), positions


def _with(values, gates, r, *, weigh=lambda gate: torch.softmax(gate, dim=1), shift=0,
          partial=False, strided=False):
    missing = -len(values) % r if partial else 0
    pad = torch.nn.functional.pad
    values, gates = (pad(x, (0, 0, 0, missing)) for x in (values, gates))
    G = len(values) // r
    if strided:
        value, gate = (x[: G * r].unflatten(0, (r, G)).transpose(0, 1) for x in (values, gates))
    else:
        value, gate = (x[: G * r].unflatten(0, (G, r)) for x in (values, gates))
    return (weigh(gate) * value).sum(dim=1), torch.arange(G) * r + shift


def mean_of_the_group(values, gates, r):
    return _with(values, gates, r, weigh=lambda gate: torch.full_like(gate, 1 / r))


def softmax_over_channels(values, gates, r):
    return _with(values, gates, r, weigh=lambda gate: torch.softmax(gate, dim=-1))


def softmax_over_groups(values, gates, r):
    return _with(values, gates, r, weigh=lambda gate: torch.softmax(gate, dim=0))


def one_weight_a_token(values, gates, r):
    return _with(values, gates, r, weigh=lambda gate: torch.softmax(gate.mean(-1, True), dim=1))


def position_of_the_last_token(values, gates, r):
    return _with(values, gates, r, shift=r - 1)


def unfinished_group_too(values, gates, r):
    return _with(values, gates, r, partial=True)


def every_gth_token(values, gates, r):
    return _with(values, gates, r, strided=True)


MISTAKES = (
    Mistake(mean_of_the_group, "every token of a group counts alike: the gates are not used, so an "
            "entry is a plain average.", "mean pooling, the usual guess at what compression is"),
    Mistake(softmax_over_channels, "the softmax runs over the channels, so the weights of a "
            "token add up to one; those of a channel over the group's tokens have to.",
            "dim=-1, right for attention weights and wrong here"),
    Mistake(softmax_over_groups, "the softmax runs over the groups: every entry then depends on "
            "the whole text, also on what comes after it.", "dim=0 after a reshape"),
    Mistake(one_weight_a_token, "a token has one weight for all channels; the gate is as wide as "
            "the value, and each channel has its own softmax.", "attention pooling"),
    Mistake(position_of_the_last_token, "an entry has the position of the token that completed "
            "it; it is that of the group's first token, g * r.", "mutant `entry_at_last_token`"),
    Mistake(unfinished_group_too, "a last group that is not complete became an entry; it gives "
            "none until its r tokens are there.", "mutant `unfinished_group_published`"),
    Mistake(every_gth_token, "a group has tokens that stand G places apart: reshape to [G,r,d], "
            "not to [r,G,d].", "a reshape with its axes exchanged"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c, ids = lab.config, lab.encode("It is a truth universally acknowledged, that a single man")
    layer = next(i for i in c.kv_source_layer_ids if c.compress_ratios[i] > 1)
    name = f"layers.{layer}.attn.compressor"
    x = input_of(lab, name, ids)[0].float().cpu()                                  # [T,D]
    own: Any = lab.model.get_submodule(name)
    values, gates = (x @ w.detach().float().cpu().T for w in (own.wkv.weight, own.wgate.weight))
    r = c.compress_ratios[layer]
    T = len(ids) // r * r
    for what, size, ratio in (
            (f"values and gates of layer {layer}, groups of {r}", T, r),
            ("a text that ends inside a group", T - 1, r),
            ("larger groups, the same rule", T - 1, 4),
            ("a text shorter than a group has no entries", 1, r)):
        yield Case(what, (values[:size], gates[:size], ratio))
