"""Exercise 6.2: how many tokens a step is expected to give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.exercises.record import Case, Mistake
from labkit.viz.speculation_data import record

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "6.2", "Tokens a step", "tokens_of_step"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 4
TOLERANCE = 1e-9
OBJECTIVE = """
The confidence c_k of slot k is the probability that its token is accepted *if all
tokens before it were*. One request sends all its slots to the target. How many tokens
will the step give on average? Count every accepted draft, and the token that the
target adds in any case: a replacement or a bonus.
"""
HELP = (
    """Expectations add up: ask for each slot alone with which probability its token enters
    the text, then sum. When does the token of slot 3 enter the text?""",
    """Slot k counts only if slots 1 to k were all accepted: c_1 * c_2 * ... * c_k. The
    target's own token is there in every step, also in one without drafts.""",
    """```python
    expected, alive = 1.0, 1.0
    for c in confidences:
        alive = ...          # this slot and all before it
        expected = ...
    return expected
    ```""",
)
AFTER = """This is what a scheduler counts with: tokens a step times steps a second is speed. The
check cannot see whether the confidences are true: with c too high the formula is
right and the promise is not, which is why they are calibrated."""


def solution(confidences):
    """Expected number of tokens of a step; confidences: floats c_1..c_n, maybe none."""
    expected, alive = 1.0, 1.0
    for c in confidences:
        alive = alive * c
        expected = expected + alive
    return expected


def alternative(confidences):
    """From the right: what slot k gives if it is reached."""
    rest = 1.0
    for c in reversed(list(confidences)):
        rest = 1.0 + c * rest
    return float(rest)


def summed(confidences):
    return 1.0 + float(sum(confidences))


def all_or_nothing(confidences):
    kept = 1.0
    for c in confidences:
        kept *= c
    return 1.0 + len(list(confidences)) * kept


def last_product(confidences):
    kept = 1.0
    for c in confidences:
        kept *= c
    return kept


def without_the_targets(confidences):
    return solution(confidences) - 1.0


def only_when_all_are_kept(confidences):
    return solution(confidences) - 1.0 + last_product(confidences)


MISTAKES = (
    Mistake(summed, "the confidences are added as they are, but c_k holds only if all slots before "
            "k were accepted: slot k enters the text with the product c_1 ... c_k.",
            "mutant `draft_survival_of_one_slot`"),
    Mistake(all_or_nothing, "a block is taken for all or nothing. After a rejection the drafts "
            "before it stay.", "block verification as in an earlier design"),
    Mistake(last_product, "this is the probability that all drafts stay, not a number of tokens.",
            "the product without the sum"),
    Mistake(without_the_targets, "the target's own token is missing. Every step adds one: the "
            "replacement of a rejected draft, or the bonus behind the last.",
            "accepted drafts counted as tokens a step"),
    Mistake(only_when_all_are_kept, "the target's token is counted only when all drafts stay. A "
            "rejected draft is replaced, so there is a token of the target then, too.",
            "the bonus taken for the only token that is added"),
)


def cases(lab: Lab) -> Iterator[Case]:
    steps = record(lab, "She was not at all", 12, seed=2).steps
    found = [s.confidence for s in max(steps, key=lambda s: len(s.slots)).slots]
    yield Case("the confidences of a step of mini", (found,))
    yield Case("confidences that differ from slot to slot", ([0.9, 0.5, 0.8],))
    yield Case("a slot that cannot survive stops all behind it", ([0.5, 0.0, 1.0, 1.0],))
    yield Case("a draft that is sure gives its slots and one more", ([1.0] * len(found),))
    yield Case("without drafts a step gives one token", ([],))
