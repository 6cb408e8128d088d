"""Exercise 6.3: how many slots of which requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.engine.scheduling import StepRate
from labkit.exercises.record import Case, Mistake
from labkit.viz.speculation_data import record

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "6.3", "The prefix scheduler", "verify_lengths"
MINUTES, DIFFICULTY, IMPORTANCE = 25, 4, 4
TOLERANCE = 0.0
OBJECTIVE = """
R requests share a step. Each has drafted some slots with survivals a_1 >= a_2 >= ...;
`rate(B)` says how many steps a second the machine makes with B tokens in a step.
Choose how many slots of each request are verified. Begin with none: B = R tokens are
read and tau = R tokens come out for certain. Go through the slots of all requests,
likeliest first (of equal ones the earlier slot, then the earlier request). Admit a
slot if it raises tau * rate(B), where it adds 1 to B and its a to tau. The first slot
that does not ends the search.
"""
HELP = (
    """Make one list of all slots with their request, sort it, and walk through it. As
    survivals of a request never rise, its slots come in their own order: any
    beginning of the list is a valid set of prefixes.""",
    """Python sorts tuples by their first element, then by the second: `(-a, slot, request)`
    gives the order asked for. Keep the best throughput so far and `break` at the
    first slot that does not exceed it, even where a later one might.""",
    """```python
    slots = sorted((-a, slot, request) for request, row in enumerate(survival)
                   for slot, a in enumerate(row))
    tokens = tau = len(survival)
    best = tau * rate(tokens)
    for minus_a, slot, request in slots:
        tokens, tau = ...
        if ...:
            break
        ...
    ```""",
)
AFTER = """The search stops early on purpose. A search of the whole curve finds more on a jagged
one, but then a slot may be admitted because of a slot behind it, whose confidence
depends on the token drafted before: some tokens are verified oftener than others, and
the text is biased. The check cannot see that bias, since it looks at lengths; the
coin below makes it visible."""


def solution(survival, rate):
    """How many slots of each request are verified.

    survival: every request's a_1 >= a_2 >= ..; rate(B): steps a second of B tokens.
    """
    slots = sorted((-a, slot, request) for request, row in enumerate(survival)
                   for slot, a in enumerate(row))
    lengths = [0] * len(survival)
    tokens, tau = len(survival), float(len(survival))
    best = tau * rate(tokens)
    for minus_a, _, request in slots:
        tokens, tau = tokens + 1, tau - minus_a
        if tau * rate(tokens) <= best:
            break
        best = tau * rate(tokens)
        lengths[request] += 1
    return lengths


def alternative(survival, rate):
    """The next slot of every request competes, as long as one is admitted."""
    lengths, R = [0] * len(survival), len(survival)
    tau, best = float(R), R * rate(R)
    while True:
        open_ = [(row[n], -n, -r) for r, (row, n) in enumerate(zip(survival, lengths, strict=True))
                 if n < len(row)]
        if not open_:
            return lengths
        a, _, r = max(open_)
        if (tau + a) * rate(R + sum(lengths) + 1) <= best:
            return lengths
        tau, lengths[-r] = tau + a, lengths[-r] + 1
        best = tau * rate(R + sum(lengths))


def _walk(survival, rate, order, tau=None, tokens=None, search=False):
    """Admission with one thing changed."""
    lengths, found = [0] * len(survival), [0] * len(survival)
    R = len(survival)
    tokens, tau = (R if tokens is None else tokens), float(R if tau is None else tau)
    best = tau * rate(max(1, tokens))
    for a, _, request in order:
        tokens, tau = tokens + 1, tau + a
        lengths[request] += 1
        if tau * rate(tokens) > best:
            best, found = tau * rate(tokens), list(lengths)
        elif not search:
            break
    return found


def _best_first(survival):
    return sorted(((a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row)),
                  key=lambda one: (-one[0], one[1], one[2]))


def looks_ahead(survival, rate):
    return _walk(survival, rate, _best_first(survival), search=True)


def in_order_of_requests(survival, rate):
    return _walk(survival, rate, [(a, j, r) for r, row in enumerate(survival)
                                  for j, a in enumerate(row)])


def one_threshold(survival, rate):
    return [sum(a >= 0.5 for a in row) for row in survival]


def without_own_tokens(survival, rate):
    return _walk(survival, rate, _best_first(survival), tau=0)


def anchors_not_read(survival, rate):
    return _walk(survival, rate, _best_first(survival), tokens=0)


def each_alone(survival, rate):
    return [solution([row], rate)[0] for row in survival]


MISTAKES = (
    Mistake(looks_ahead, "the whole curve is searched. Stop at the first slot that does not help: "
            "what lies behind it may not decide whether it is verified.",
            "mutant `scheduler_looks_ahead`"),
    Mistake(in_order_of_requests, "the slots are admitted request by request. Sort the slots of "
            "all requests by their survival first.", "a loop over requests, each filled in turn"),
    Mistake(one_threshold, "every slot above a fixed survival is verified, whatever the machine "
            "says: how many pay depends on the rates.", "policy `Threshold`"),
    Mistake(without_own_tokens, "tau begins at 0, but every request gives a token for certain: "
            "without these the first slots look better than they are.",
            "accepted drafts counted, own tokens forgotten"),
    Mistake(anchors_not_read, "B begins at 0, but the step reads the newest token of every request "
            "too.", "batch size counted in drafts"),
    Mistake(each_alone, "each request is scheduled as if it were alone. They share one step, so "
            "the tokens of the others count in B.", "a scheduler called once for each request"),
)


def cases(lab: Lab) -> Iterator[Case]:
    # A step takes as long as 8 tokens, and one for each that it reads.
    smooth = StepRate({b: 1 / (8 + b) for b in range(1, 65)})
    yield Case("three requests on a smooth curve",
               ([[0.45, 0.4, 0.1], [0.95, 0.9, 0.85, 0.3], [0.6, 0.5]], smooth))
    stairs = StepRate({b: (1.0, 0.36, 0.36)[min(b, 3) - 1] for b in range(1, 4)})
    yield Case("a curve on which the first slot does not pay, but two together would",
               ([[1.0, 1.0]], stairs))
    rows = [[s.survival for s in record(lab, text, 8, seed=2).steps[0].slots]
            for text in ("She was not at all", "It is a truth universally", "Mr. Darcy had")]
    yield Case("survivals that mini's draft expects", (rows, smooth))
    yield Case("equal survivals: the earlier slot, then the earlier request",
               ([[0.5, 0.5], [0.5, 0.5]], StepRate({2: 1.0, 3: 0.85, 4: 0.75, 5: 0.1, 6: 0.1})))
    yield Case("a request without slots, and one alone", ([[], [0.9]], smooth))
