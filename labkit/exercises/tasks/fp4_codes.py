"""Exercise 4.1: numbers to the sixteen codes of E2M1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit.exercises.record import Case, Mistake
from labkit.numerics.formats import encode_e2m1
from labkit.train.controls import cache_rounding

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "4.1", "Sixteen codes, ties to even", "e2m1_codes"
MINUTES, DIFFICULTY, IMPORTANCE = 15, 2, 5
TOLERANCE = 0.0
OBJECTIVE = """
Codes 0 to 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 (worth 8) is the sign. Write
the code of the value nearest to each number. Halfway between two values the *even code*
wins: 2.5 lies between 2 (code 4) and 3 (code 5) and becomes 2. What is larger than 6
becomes 6. The sign is that of the number, also where its magnitude rounds to zero: -0.1
has code 8, and so has -0.0.
"""
HELP = (
    """Treat the sign apart: find the code 0..7 of the magnitude, then add 8 where
    `torch.signbit(x)` says so (unlike `x < 0` it knows -0.0). Seven middles lie
    between the eight magnitudes; count how many of them a number has passed.""",
    """Counting with `>` sends each tie down, counting with `>=` sends it up. Apart
    from ties both counts are equal; at a tie they are neighbours, and one of them is
    even. Six is the last value, so numbers beyond it need no extra care.""",
    """```python
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    middles = (values[:-1] + values[1:]) / 2
    magnitude = x.abs()[..., None]
    down, up = (magnitude > middles).sum(-1), ...
    code = torch.where(down % 2 == 0, ..., ...)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)
    ```""",
)
AFTER = """Ties to even is no nicety: numbers that were bf16 before meet ties often
(the end of this notebook counts them), and sending them all one way shifts every
mean. The package gets the same codes from the bits of an fp32 number, without a
table. The check cannot see speed, nor what happens to a NaN: E2M1 has no code for it,
and the package refuses it."""


def solution(x):
    """E2M1 codes 0..15, uint8, of fp32 numbers of any shape; ties to the even code."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    middles = (values[:-1] + values[1:]) / 2
    magnitude = x.abs()[..., None]                     # [..., 1] against [7]
    down = (magnitude > middles).sum(-1)               # a tie stays below its middle
    up = (magnitude >= middles).sum(-1)                # a tie goes above it
    code = torch.where(down % 2 == 0, down, up)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def alternative(x):
    """The package's own encoder, which works on the bits."""
    return encode_e2m1(x)


def _magnitudes(x, count):
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    middles = (values[:-1] + values[1:]) / 2
    return count(x.abs()[..., None], values, middles)


def _signed(code, x):
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def halves_away_from_zero(x):
    return _signed(_magnitudes(x, lambda a, v, m: (a >= m).sum(-1)), x)


def halves_towards_zero(x):
    return _signed(_magnitudes(x, lambda a, v, m: (a - v).abs().argmin(-1)), x)


def truncates(x):
    return _signed(_magnitudes(x, lambda a, v, m: (a >= v[1:]).sum(-1)), x)


def sign_of_the_rounded_value(x):
    code = solution(x.abs())
    return code + 8 * ((x < 0) & (code > 0)).to(torch.uint8)


def twos_complement(x):
    code = solution(x.abs())
    return torch.where(torch.signbit(x), (16 - code) % 16, code).to(torch.uint8)


MISTAKES = (
    Mistake(halves_away_from_zero, "ties are rounded away from zero; halfway between two values "
            "the one with the even code wins.", "mutant `ties_away`; the school's rule"),
    Mistake(halves_towards_zero, "ties are rounded towards zero, as the first of two equal "
            "distances does in argmin, or bucketize; the even code wins.",
            "nearest value by argmin, bucketize with right=False"),
    Mistake(truncates, "numbers are cut off to the next smaller value instead of rounded to the "
            "nearest one.", "a cast to integer"),
    Mistake(sign_of_the_rounded_value, "the sign is lost where the magnitude rounds to zero: a "
            "small negative number has code 8, negative zero.", "x < 0 after rounding"),
    Mistake(twos_complement, "bit 3 is read as in two's complement, but it is a sign: -0.5 is "
            "code 9, 8 more than 0.5, not 15.", "four bits taken for an int4"),
)


def cases(lab: Lab) -> Iterator[Case]:
    layer = next(role.layer for role in lab.config.roles if role.kind == "full")
    tap = f"layers.{layer}.attn.compressed_kv"
    with cache_rounding(lab.model, False):
        run = lab.trace("It is a truth universally acknowledged, that a man", patterns=[tap])
    yield Case("numbers of the run, where few are ties", (run[tap][0, :4].float().cpu(),))
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    yield Case("ties go to the even code", (torch.tensor(middles + [-m for m in middles]),))
    yield Case("beyond the largest value there is only that",
               (torch.tensor([[6.0, 6.1, 7.0], [-8.0, 448.0, -1e30]]),))
    yield Case("zero has two codes", (torch.tensor([0.0, -0.0, 0.1, -0.1, -0.25, 1e-30, -1e-30]),))
