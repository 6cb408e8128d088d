"""Exercise 10.3: how many long texts a machine holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "10.3", "How many long texts fit", "streams_that_fit"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 4
TOLERANCE = 0.0
OBJECTIVE = """
A machine has `memory` bytes in all, of which the weights take `weights`. Each text of `tokens`
tokens adds `grows` bytes a token and `fixed` bytes that do not depend on its length (windows of
all layers, the draft's windows). How many texts fit at once? Every byte is used once: caches are
spread over the cards, not copied to each.
"""
HELP = (
    """What is left beside the weights, divided by what one text takes, rounded down.""",
    """One text takes `tokens * grows + fixed` bytes. If the weights alone do not fit, no text
    does.""",
    """```python
    free = max(0, memory - weights)
    return int(free // (...))
    ```""",
)
AFTER = """For eight cards of 141 GB this gives hundreds of texts of a million tokens, far above the
24 that are claimed: memory for caches is not what limits them there. The check cannot see what
does: work space, copies for speed, and time."""


def solution(memory, weights, tokens, grows, fixed):
    """Texts that fit at once, int; all sizes in bytes, grows: bytes a token."""
    free = max(0, memory - weights)
    return int(free // (tokens * grows + fixed))


def alternative(memory, weights, tokens, grows, fixed):
    """Adding one at a time, by bisection."""
    low, high = 0, 1 << 40
    while low < high:
        middle = (low + high + 1) // 2
        fits = weights + middle * (tokens * grows + fixed) <= memory
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def weights_forgotten(memory, weights, tokens, grows, fixed):
    return int(memory // (tokens * grows + fixed))


def fixed_forgotten(memory, weights, tokens, grows, fixed):
    return int(max(0, memory - weights) // (tokens * grows))


def rounded_up(memory, weights, tokens, grows, fixed):
    return -int(-max(0, memory - weights) // (tokens * grows + fixed))


def below_zero(memory, weights, tokens, grows, fixed):
    return int((memory - weights) // (tokens * grows + fixed))


MISTAKES = (
    Mistake(weights_forgotten, "the weights need their place as well.", "memory / cache"),
    Mistake(fixed_forgotten, "what every text takes besides, whatever its length, is missing; for "
            "short texts it is most of all.", "the 890 bytes alone"),
    Mistake(rounded_up, "the last text does not fit whole: round down.", "ceil for floor"),
    Mistake(below_zero, "if the weights do not fit, no text does; less than none is no answer.",
            "a difference without a maximum"),
)


def cases(lab: Lab) -> Iterator[Case]:
    fixed = 43 * 67_584
    yield Case("a million tokens on eight cards of 141 GB",
               (8 * 141 * 10**9, 510_286_023_000, 1_048_576, 890, fixed))
    yield Case("short chats of 2,000 tokens", (8 * 141 * 10**9, 510_286_023_000, 2_000, 890, fixed))
    yield Case("a machine that does not hold the weights",
               (4 * 96 * 10**9, 510_286_023_000, 1_048_576, 890, fixed))
