"""Exercise 6.1: is a drafted token kept, and what replaces it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit.engine.sampling import Sampling
from labkit.exercises.record import Case, Mistake
from labkit.viz.speculation_data import record

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "6.1", "Keep it, or what instead", "judge_token"
MINUTES, DIFFICULTY, IMPORTANCE = 15, 2, 5
TOLERANCE = 1e-9
OBJECTIVE = """
The draft drew the token `id` from its distribution p_d; the target says p_t. Return
two things: the probability with which the token is kept, and the distribution from
which another token is drawn if it is not. Together they must make the emitted token
follow p_t exactly: the token is kept with min(1, p_t / p_d); the replacement comes
from the part of p_t that p_d does not cover, scaled to the sum 1. If p_d covers all
of it, nothing is ever rejected: return p_t then.
"""
HELP = (
    """Of the probability p_t(v), how much is served by drafts that are kept? The draft
    proposes v with p_d(v), and what is kept of that may not exceed p_t(v). What is
    still missing must come from the replacements.""",
    """`(p_t - p_d).clamp(min=0)` is the missing part of every token. Its sum is the
    probability of a rejection, so divide by it to get a distribution; take care of
    the sum 0.""",
    """```python
    keep = min(1.0, float(p_t[id] / ...))
    missing = (...).clamp(min=0.0)
    total = missing.sum()
    return keep, ... if total > 0 else p_t
    ```""",
)
AFTER = """Kept and replaced drafts add up to p_t for every token, however bad the draft is: that
is why a draft can be changed, or broken, without changing what is written. The check
cannot see whether your draws are independent: a seed that is used for the draft *and*
for the decision would spoil the law with these formulas unchanged."""


def solution(p_t, p_d, id):
    """(probability that `id` is kept, distribution [V] of its replacement).

    p_t, p_d float64 [V], of target and draft; p_d[id] > 0.
    """
    keep = min(1.0, float(p_t[id] / p_d[id]))
    missing = (p_t - p_d).clamp(min=0.0)                    # [V]
    total = missing.sum()
    return keep, missing / total if total > 0 else p_t


def alternative(p_t, p_d, id):
    """From what is kept of every token."""
    kept = torch.minimum(p_t, p_d)                          # [V]
    rest = p_t - kept
    rejected = 1 - kept.sum()
    if rejected < 1e-15:
        return float(kept[id] / p_d[id]), p_t
    return float(kept[id] / p_d[id]), rest / rest.sum()


def turned_over(p_t, p_d, id):
    keep = min(1.0, float(p_d[id] / p_t[id])) if p_t[id] > 0 else 1.0
    return keep, solution(p_t, p_d, id)[1]


def without_ratio(p_t, p_d, id):
    return float(p_t[id]), solution(p_t, p_d, id)[1]


def not_scaled(p_t, p_d, id):
    return solution(p_t, p_d, id)[0], (p_t - p_d).clamp(min=0.0)


def from_the_target(p_t, p_d, id):
    return solution(p_t, p_d, id)[0], p_t


def both_signs(p_t, p_d, id):
    off = (p_t - p_d).abs()
    return solution(p_t, p_d, id)[0], off / off.sum() if off.sum() > 0 else p_t


def without_the_token(p_t, p_d, id):
    rest = p_t.clone()
    rest[id] = 0.0
    return solution(p_t, p_d, id)[0], rest / rest.sum() if rest.sum() > 0 else p_t


MISTAKES = (
    Mistake(turned_over, "the ratio is upside down. A token that the draft likes more than the "
            "target does (p_d > p_t) has to be thinned out, and that is p_t / p_d.",
            "a usual first attempt"),
    Mistake(without_ratio, "it is kept with p_t itself. That is the rule for a draft that is "
            "certain (p_d = 1); one that was drawn with p_d has been thinned out once already.",
            "mutant `accept_without_ratio`"),
    Mistake(not_scaled, "the missing part is not divided by its sum, so it is no distribution: "
            "its sum is the probability of a rejection, which has been paid already.",
            "a residual passed to a sampler that takes any weights hides it"),
    Mistake(from_the_target, "the replacement is drawn from p_t. Then what the draft likes is "
            "served twice: once by kept drafts, once again by replacements.",
            "mutant `residual_not_subtracted`"),
    Mistake(both_signs, "the difference lost its sign: tokens of which p_d already gives too much "
            "may then replace themselves. Cut the negative part off.",
            "mutant `residual_not_clipped`"),
    Mistake(without_the_token, "only the rejected token is taken out of p_t. Other tokens that p_d "
            "covers in part still get too much.", "renormalising without the rejected id"),
)


def cases(lab: Lab) -> Iterator[Case]:
    for sampling, what in (
            (Sampling(1.0), "a place of mini's run at temperature 1, the whole vocabulary"),
            (Sampling(0.8, 0, 0.95), "cut off at top_p 0.95, so that many probabilities are 0"),
            (Sampling(0.0), "greedy: both distributions hold a single 1")):
        steps = record(lab, "She was not at all", 12, sampling, seed=2).steps
        pairs = [(t, d) for s in steps for t, d in zip(s.targets, s.drafts, strict=False)]
        p_t, p_d = max(pairs, key=lambda pair: float((pair[0] - pair[1]).abs().sum()))
        more = p_d - p_t
        yield Case(what, (p_t, p_d, int((more if bool((more > 0).any()) else p_d).argmax())))
        if sampling.temperature == 1:
            likeliest = int((p_t - p_d).argmax())
            if p_d[likeliest] > 0:
                yield Case("a token that the target likes more than the draft is always kept",
                           (p_t, p_d, likeliest))
    half = torch.tensor([0.25, 0.75], dtype=torch.float64)
    yield Case("a draft that is the target's equal is never rejected", (half, half.clone(), 0))
