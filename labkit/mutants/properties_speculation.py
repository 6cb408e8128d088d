"""Properties of speculative decoding: whatever is drafted and scheduled, the text is the target's.

Exact, by going through every course of chance on toys (`labkit.mutants.enumeration`).
"""

from __future__ import annotations

from labkit.engine.scheduling import (
    DelayedBudget,
    Fixed,
    Policy,
    PrefixScheduler,
    StepRate,
    Threshold,
)
from labkit.mutants.checks import PROPERTIES, collect
from labkit.mutants.enumeration import KINDS, STAIRS, Toy, bias, coin, random_toy

prop = collect(PROPERTIES)
EXACT = 1e-12       # of probability: float64, a few products and sums
JAGGED = StepRate({1: 1.0, 2: 0.8, 3: 0.42, 4: 0.42, 5: 0.4, 6: 0.4})


@prop("verified_law", "drafted and verified tokens are distributed as plain sampling's, exactly")
def verified_law() -> str | None:
    for kind in KINDS:
        for vocabulary, block in ((2, 3), (3, 2)):
            toy = random_toy(7, vocabulary, block, kind)
            wrong = _biased(f"{kind} tables, block {block}", toy, Fixed(block), 1, block + 1)
            if wrong:
                return wrong
    return None


@prop("scheduled_law", "and so are they when confidences decide how many are verified")
def scheduled_law() -> str | None:
    for toy, requests, rate, count in ((coin(), 1, STAIRS, 4), (random_toy(2), 2, JAGGED, 2)):
        policies: list[Policy] = [PrefixScheduler(rate), Threshold(0.8),
                                  DelayedBudget(rate, delay=1), DelayedBudget(rate, delay=2)]
        for policy in policies:
            wrong = _biased(type(policy).__name__, toy, policy, requests, count)
            if wrong:
                return wrong
    return None


def _biased(name: str, toy: Toy, policy: Policy, requests: int, count: int) -> str | None:
    off, said = bias(toy, policy, requests, count)
    return f"{name}: {said} (total variation {off:.3g})" if off > EXACT else None
