"""Exercise 10.2: does it fit, and by how much not?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "10.2", "Gigabytes and gibibytes", "missing_gib"
MINUTES, DIFFICULTY, IMPORTANCE = 5, 1, 3
TOLERANCE = 1e-9
OBJECTIVE = """
A checkpoint has so many *bytes*; a card's memory is given in GiB (2^30 bytes). Compute how many
GiB are missing on `cards` cards to hold the checkpoint; 0 if it fits.
"""
HELP = (
    """Bring both sides to the same unit first. A GiB is 2^30 = 1,073,741,824 bytes, a GB 10^9:
    they differ by 7 %.""",
    """`size / 2**30` are the GiB of the checkpoint. What is missing cannot be negative.""",
    """```python
    has = cards * gib                      # GiB
    needs = size / 2**30                   # GiB
    return max(0.0, ...)
    ```""",
)
AFTER = """Weights alone do not serve anybody: caches and work space come on top. The check cannot
see them, nor that weights are rarely cut into equal parts."""


def solution(size, cards, gib):
    """GiB that are missing.

    size: bytes of the checkpoint; cards: how many; gib: memory of each, in GiB.
    """
    return max(0.0, size / 2**30 - cards * gib)


def alternative(size, cards, gib):
    """In bytes."""
    left = size - cards * gib * 1024**3
    return left / 1024**3 if left > 0 else 0.0


def decimal(size, cards, gib):
    return max(0.0, size / 1e9 - cards * gib)


def decimal_cards(size, cards, gib):
    return max(0.0, (size - cards * gib * 1e9) / 2**30)


def negative(size, cards, gib):
    return size / 2**30 - cards * gib


MISTAKES = (
    Mistake(decimal, "the checkpoint is in GB (10^9) and the cards in GiB (2^30).",
            "file managers and cards, which count differently"),
    Mistake(decimal_cards, "the cards are taken as GB, but their memory is given in GiB.",
            "data sheets read as decimal"),
    Mistake(negative, "where it fits nothing is missing: the answer is 0, not a negative number.",
            "a difference without a maximum"),
)


def cases(lab: Lab) -> Iterator[Case]:
    yield Case("the released checkpoint on four cards of 95.59 GiB", (510_286_023_000, 4, 95.59))
    yield Case("the same on eight cards of 141 GB, which are 131.3 GiB",
               (510_286_023_000, 8, 131.3))
    yield Case("half of it on one card", (255_143_011_500, 1, 95.59))
