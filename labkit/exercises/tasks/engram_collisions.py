"""Exercise 2.4: how many n-grams share a row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit.exercises.record import Case, Mistake
from labkit.text.corpus import load_corpus
from labkit.text.engram_hash import engram_primes

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "2.4", "How many share a row", "sharing"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 3, 4
TOLERANCE = 1e-3
OBJECTIVE = """
A table has fewer rows than there are n-grams, so some of them share a row and blur each other's
memory. Suppose that the hash spreads `distinct` different n-grams over `rows` rows as if each drew
its row at random. Write the share of them, from 0 to 1, that is expected *not* to have its row for
itself: at least one other n-gram of the set reads it, too. (Within 0.1 % is close enough.)
"""
HELP = (
    """Take the place of one n-gram and ask about the others. It keeps its row for itself if every
    one of the *others* misses that row. All n-grams are in the same place, so the answer for one
    is the share of all.""",
    """One other n-gram misses the row with probability 1 - 1/rows. The others draw independently,
    so the probabilities multiply. How many others are there? Test with one n-gram: its share must
    be exactly 0.""",
    """```python
    alone = (1 - 1 / rows) ** ...      # every one of the others misses
    return 1 - ...
    ```""",
)
AFTER = """With as many n-grams as rows, 63 % share; at a third of that, still 28 %. The released
tables have 16 million rows each, and a large text has far more distinct n-grams than that: sharing
is the rule, and the several heads and the gate are there to live with it. The check cannot see
whether the hash of the model really spreads like chance (the figure above measures that), nor that
frequent n-grams are looked up more often than rare ones."""


def solution(distinct, rows):
    """Expected share of `distinct` n-grams that share a row with another one, 0..1.

    rows: of one table, each n-gram's row being drawn at random.
    """
    alone = (1 - 1 / rows) ** (distinct - 1)
    return 1 - alone


def alternative(distinct, rows):
    """By logarithms, which keep small shares exact."""
    return -math.expm1((distinct - 1) * math.log1p(-1 / rows))


def counts_itself(distinct, rows):
    return 1 - (1 - 1 / rows) ** distinct


def any_collision(distinct, rows):
    return 1 - math.exp(-distinct * (distinct - 1) / (2 * rows))


def load_factor(distinct, rows):
    return distinct / rows


def only_the_surplus(distinct, rows):
    occupied = rows * (1 - (1 - 1 / rows) ** distinct)
    return (distinct - occupied) / distinct


def share_of_rows(distinct, rows):
    none = (1 - 1 / rows) ** distinct
    one = distinct / rows * (1 - 1 / rows) ** (distinct - 1)
    return 1 - none - one


MISTAKES = (
    Mistake(counts_itself, "the exponent is the number of all n-grams, so each one is counted as "
            "its own rival: a single n-gram would share its row with itself.",
            "off by one in the birthday formula"),
    Mistake(any_collision, "this is the chance that *any* two of them meet, the party's birthday "
            "question, which is near 1 at once. Asked is the share of n-grams that are touched.",
            "the textbook formula 1 - exp(-n(n-1)/2m)"),
    Mistake(load_factor, "n-grams over rows is the mean number in a row; it is no share, passes 1, "
            "and counts pairs that meet in one row several times.", "load factor of a hash table"),
    Mistake(only_the_surplus, "only the later comers are counted: of two n-grams in a row one "
            "counts as undisturbed. Both share it.", "n minus the number of occupied rows"),
    Mistake(share_of_rows, "this is the share of *rows* that hold two or more; asked is the share "
            "of n-grams.", "the denominator of the other question"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c = lab.config
    prime = engram_primes(c)[0][0]
    text = load_corpus("heldout")["persuasion"][:20_000]
    classes = lab.model.engram_classes.cpu()[torch.tensor(lab.tokenizer.encode(text))].tolist()
    bigrams = set(zip(classes, classes[1:], strict=False))
    yield Case(f"the {len(bigrams):,} distinct bigrams of a passage in mini's first table of "
               f"{prime:,} rows", (len(bigrams), prime))
    yield Case("a single n-gram shares its row with nobody", (1, prime))
    yield Case("two n-grams meet once in as many tries as there are rows", (2, prime))
    yield Case("as many n-grams as rows", (prime, prime))
    yield Case("a table that is full many times over", (200_000, prime))
