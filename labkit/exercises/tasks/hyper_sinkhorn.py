"""Exercise 7.1: a matrix whose rows and columns sum to one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "7.1", "A matrix that keeps the sum", "mixing_of"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 4
TOLERANCE = 1e-5
OBJECTIVE = """
Streams are mixed by a matrix [C,C], from source stream (rows) to target stream (columns). Make it
nearly doubly stochastic: softmax over each row, plus `eps`; then divide each column by its sum
(plus `eps`). That is one iteration. Each further one divides rows by their sums, then columns by
theirs, with `eps` added to every sum. Of `iterations` in all, the first has no division by rows.
"""
HELP = (
    """`x.sum(-1, keepdim=True)` are the sums of the rows, `x.sum(-2, keepdim=True)` those of the
    columns. There may be more dimensions in front (tokens), so count them from the end.""",
    """The softmax has made the rows sum to one already, so the first iteration begins with
    columns. The last thing that is done is a division of columns.""",
    """```python
    x = torch.softmax(logits, dim=...) + eps
    x = x / (x.sum(...) + eps)                     # columns
    for _ in range(iterations - 1):
        ...                                        # rows, then columns
    return x
    ```""",
)
AFTER = """A column that sums to one means that a stream is a weighted mean of the streams
before: it neither grows nor dies out over 80 sites. The check cannot see that rows sum to one only
nearly: columns come last, and a few iterations leave rows a little off."""


def solution(logits, iterations, eps):
    """Nearly doubly stochastic [...,C,C] of logits [...,C,C]; rows are sources."""
    x = torch.softmax(logits, dim=-1) + eps
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


def alternative(logits, iterations, eps):
    """With einsum, and rows and columns by turns."""
    x = torch.exp(logits - logits.amax(-1, keepdim=True))
    x = x / x.sum(-1, keepdim=True) + eps
    for turn in range(2 * iterations - 1):
        sums = torch.einsum("...sc->...c", x) if turn % 2 == 0 else torch.einsum("...sc->...s", x)
        x = x / (sums + eps).unsqueeze(-2 if turn % 2 == 0 else -1)
    return x


def ends_with_rows(logits, iterations, eps):
    x = torch.softmax(logits, dim=-1) + eps
    for _ in range(iterations):
        x = x / (x.sum(-2, keepdim=True) + eps)
        x = x / (x.sum(-1, keepdim=True) + eps)
    return x


def softmax_over_columns(logits, iterations, eps):
    x = torch.softmax(logits, dim=-2) + eps
    x = x / (x.sum(-1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        x = x / (x.sum(-2, keepdim=True) + eps)
        x = x / (x.sum(-1, keepdim=True) + eps)
    return x


def one_step(logits, iterations, eps):
    return solution(logits, 1, eps)


def one_more(logits, iterations, eps):
    return solution(logits, iterations + 1, eps)


MISTAKES = (
    Mistake(ends_with_rows, "the last division is of rows, but it is of columns: what must be "
            "exact is what arrives at a stream.", "Sinkhorn as textbooks write it"),
    Mistake(softmax_over_columns, "rows and columns are exchanged: the last axis is the target "
            "stream, and the softmax runs over it.", "mutant `transposed_comb`"),
    Mistake(one_step, "there is one iteration only; rows are far from summing to one.",
            "mutant `one_sinkhorn_step`"),
    Mistake(one_more, "there is one iteration too many: the first one is softmax and columns.",
            "a loop over all iterations behind the first"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c = lab.config
    model: Any = lab.model
    generator = torch.Generator().manual_seed(7)
    C = c.hc_mult
    base = model.layers[1].hc_attn_base.detach().float().cpu()[2 * C :].unflatten(0, (C, C))
    yield Case("the constant part of a site of this model, as many iterations as it makes",
               (base, c.hc_sinkhorn_iters, c.hc_eps))
    yield Case("several tokens at once, sharp logits",
               (3 * torch.randn(5, C, C, generator=generator), 3, c.hc_eps))
    yield Case("a single iteration", (torch.randn(2, C, C, generator=generator), 1, c.hc_eps))
