"""How many drafted slots of each request the target verifies in a step.

A verified slot costs a place in the target's batch and yields a token with the probability that
it survives: a_j = c_1 c_2 .. c_j, where c_j is the draft's confidence that slot j is accepted if
all slots before it are. With R requests in a step, every request emits one token for certain.
With B = R + (slots verified) tokens in the batch and SPS(B) steps a second, the throughput to be
expected is

    tau * SPS(B),    tau = R + sum of a over the verified slots.

Whoever chooses the lengths may not look ahead. Confidence c_{j+1} depends on the token drafted at
slot j. A rule that admits slot j only if slot j+1 looks good verifies some tokens oftener than
others, and the text is no longer distributed as the target's: it favours tokens after which the
draft is sure of itself. Every policy here decides on slot j from what was drafted before slot j
of that request, in admitted slots of others, and in steps that are over. All of them are
lossless; they differ in speed alone. A step that fails and is tried again drafts the same
tokens, so it is not over: what a policy keeps of a step counts from `Policy.done` on.

Source: DSpark paper (DeepSpec repository), hardware-aware prefix scheduler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

from labkit.errors import InputError

Survival = Sequence[Sequence[float]]    # one row of a_1 >= a_2 >= .. per request


def survival(confidences: Sequence[float]) -> list[float]:
    """Confidences c_1..c_n of one request -> a_1..a_n, a_j = c_1 * .. * c_j.

    InputError for a confidence outside 0..1.
    """
    values = [float(c) for c in confidences]
    for j, c in enumerate(values, 1):
        if not 0 <= c <= 1:
            raise InputError(f"the confidence of slot {j} is {c}: it must be a probability")
    return list(accumulate(values, mul))


# ------------------------------------------------------------------------------ SPS
class StepRate:
    """SPS(B): steps a second of the target with B tokens in its batch, from measured points.

    Between two points the *seconds* of a step are interpolated linearly, as more tokens add about
    the same time each. With fewer tokens than were measured the rate is that of the fewest, which
    is too low if anything: a batch that drains goes on, and rates, whatever they are, do not
    touch the text. Beyond the most tokens nothing is known and nothing is answered.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """points: tokens -> steps a second. InputError for none, or values that are no rates."""
        for tokens, rate in points.items():
            if not _whole(tokens) or tokens < 1:
                raise InputError(f"a step of {tokens!r} tokens: it must be a whole number above 0")
            if not isinstance(rate, (int, float)) or not 0 < rate < math.inf:
                raise InputError(f"{rate!r} steps a second with {tokens} tokens: the rate must be "
                                 "a positive number")
        if not points:
            raise InputError("no step rate was measured: give the rate of one batch at least")
        self.points = dict(sorted((int(b), float(rate)) for b, rate in points.items()))
        self._tokens = list(self.points)

    @property
    def smallest(self) -> int:
        return self._tokens[0]

    @property
    def largest(self) -> int:
        return self._tokens[-1]

    def __call__(self, tokens: int) -> float:
        """Steps a second with so many tokens; InputError for none, or more than were measured."""
        if not 1 <= tokens <= self.largest:
            raise InputError(f"no step rate for {tokens} tokens: it was measured for "
                             f"{self.smallest} to {self.largest}; measure it there too")
        tokens = max(tokens, self.smallest)
        if tokens in self.points:
            return self.points[tokens]
        at = bisect_left(self._tokens, tokens)
        low, high = self._tokens[at - 1 : at + 1]
        share = (tokens - low) / (high - low)
        return 1 / ((1 - share) / self.points[low] + share / self.points[high])

    def to_dict(self) -> dict[str, list]:
        """For JSON: {"tokens": [..], "steps_per_second": [..]}, tokens ascending."""
        return {"tokens": self._tokens, "steps_per_second": list(self.points.values())}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> StepRate:
        """What `to_dict` gave; InputError for anything else."""
        if not isinstance(kept, Mapping) or set(kept) != {"tokens", "steps_per_second"}:
            raise InputError("a step rate has two lists, tokens and steps_per_second: "
                             "measure it anew")
        tokens, rates = kept["tokens"], kept["steps_per_second"]
        if not (isinstance(tokens, list) and isinstance(rates, list)
                and len(tokens) == len(rates) == len({str(b) for b in tokens})):
            raise InputError("a step rate needs as many steps_per_second as different tokens: "
                             "measure it anew")
        for b in tokens:
            if not _whole(b):
                raise InputError(f"a step of {b!r} tokens: it must be a whole number above 0")
        return cls(dict(zip(tokens, rates, strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepRate) and self.points == other.points

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StepRate({self.points})"


# ------------------------------------------------------------------------------ policies
class Policy(ABC):
    """Chooses verify lengths, step by step: `lengths`, and `done` when the step has been taken."""

    @property
    def limit(self) -> int | None:
        """The most slots that it will ever want of a request; None: as many as there are."""
        return None

    @property
    def drafts(self) -> bool:
        """False: it never verifies a slot, so nothing need be drafted."""
        return self.limit != 0

    @abstractmethod
    def lengths(self, survival: Survival) -> list[int]:
        """Survivals of every request's slots -> a verify length 0..n for each.

        Rows may differ in length and may be empty. InputError for a row that rises or leaves
        0..1, as `survival` never does. Asked again before `done`, it is the same step again.
        """

    def done(self) -> None:  # noqa: B027
        """The step of the last `lengths` is over: its tokens are decided."""

    def reset(self) -> None:  # noqa: B027  (most policies keep nothing)
        """Forget the steps so far: another batch begins."""


@dataclass(frozen=True)
class Fixed(Policy):
    """Always so many slots, or all there are."""

    slots: int

    def __post_init__(self) -> None:
        if not _whole(self.slots) or self.slots < 0:
            raise InputError(f"a fixed length of {self.slots!r}: it must be a whole number, at "
                             "least 0")

    @property
    def limit(self) -> int:
        return self.slots

    def lengths(self, survival: Survival) -> list[int]:
        return [min(self.slots, len(row)) for row in _checked(survival)]


@dataclass(frozen=True)
class NoDraft(Fixed):
    """Plain decoding: one token a step."""

    slots: int = field(default=0, init=False)


@dataclass(frozen=True)
class Threshold(Policy):
    """The slots that survive with at least this probability."""

    min_survival: float

    def __post_init__(self) -> None:
        least = self.min_survival
        if not isinstance(least, (int, float)) or isinstance(least, bool) or not 0 <= least <= 1:
            raise InputError(f"a threshold of {least!r}: it must be a probability, 0 to 1")

    def lengths(self, survival: Survival) -> list[int]:
        return [sum(a >= self.min_survival for a in row) for row in _checked(survival)]


@dataclass(frozen=True)
class PrefixScheduler(Policy):
    """The hardware-aware prefix scheduler: the best slots one by one, as long as each one pays.

    Starts with no slots. Goes through the slots of all requests in the order of `best_first`, and
    admits each if it raises tau * SPS(B); the first that does not ends it. Stopping there is what
    keeps it from looking ahead: a slot behind may pay again on a jagged curve, but whether it
    does depends on tokens that have not been admitted.

    Slots beyond the largest measured batch are not admitted, as nobody knows what they cost.
    InputError when the requests alone are more tokens than were measured.
    """

    rate: StepRate

    def lengths(self, survival: Survival) -> list[int]:
        rows = _checked(survival)
        found = [0] * len(rows)
        if not rows:
            return found
        tokens, tau = len(rows), float(len(rows))
        best = tau * self.rate(tokens)
        for a, _, request in best_first(rows):
            tokens, tau = tokens + 1, tau + a
            if tokens > self.rate.largest or tau * self.rate(tokens) <= best:
                break
            best = tau * self.rate(tokens)
            found[request] += 1
        return found


@dataclass
class DelayedBudget(Policy):
    """The production variant: a budget from old confidences, spent on today's best slots.

    The budget of a step is the number of slots that maximises tau * SPS(B) for today's number of
    requests and the survivals of `delay` steps ago. Those steps are over, so the whole curve may
    be searched, jagged or not, and there is time to do it while the device works. The budget then
    goes to the first slots of today in the order of `best_first`; which slots these are is
    decided one by one, each by what is already admitted. Of equal budgets the smallest is taken;
    the first `delay` steps of a batch verify nothing. For the measured range, see
    `PrefixScheduler`.
    """

    rate: StepRate
    delay: int = 2
    history: deque[list[float]] = field(init=False)     # survivals of the last `delay` steps
    # Of the step under way. It enters the history when the step is over: a step that is tried
    # again would otherwise find its own confidences there, as those of a step before.
    staged: list[float] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not _whole(self.delay) or self.delay < 1:
            raise InputError(f"a delay of {self.delay!r} steps: it must be a whole number, at "
                             "least 1, as a budget from today's confidences would bias the text")
        self.history = deque(maxlen=self.delay)

    def lengths(self, survival: Survival) -> list[int]:
        rows = _checked(survival)
        found = [0] * len(rows)
        if not rows:
            return found
        old = self.history[0] if len(self.history) == self.delay else []
        slots = best_first(rows)
        for _, _, request in slots[: self._budget(len(rows), old)]:
            found[request] += 1
        self.staged = [a for a, _, _ in slots]
        return found

    def done(self) -> None:
        if self.staged is not None:
            self.history.append(self.staged)
            self.staged = None

    def reset(self) -> None:
        self.history.clear()
        self.staged = None

    def _budget(self, requests: int, old: Sequence[float]) -> int:
        """The best number of slots beside so many requests; `old` survivals, best first."""
        budget, tau, best = 0, float(requests), requests * self.rate(requests)
        for n, a in enumerate(old[: self.rate.largest - requests], 1):
            tau += a
            if tau * self.rate(requests + n) > best:
                budget, best = n, tau * self.rate(requests + n)
        return budget


def best_first(rows: Survival) -> list[tuple[float, int, int]]:
    """All slots (a, slot, request) that can survive at all, likeliest first.

    Ties go to the earlier slot, then to the earlier request. As no row rises, the slots of a
    request come in their own order, and any number of first elements is a prefix of each.
    """
    slots = [(a, slot, request) for request, row in enumerate(rows)
             for slot, a in enumerate(row) if a > 0]
    return sorted(slots, key=lambda one: (-one[0], one[1], one[2]))


# ------------------------------------------------------------------------------ checks
def _checked(survival: Survival) -> list[list[float]]:
    rows = [[float(a) for a in row] for row in survival]
    for request, row in enumerate(rows):
        before = 1.0
        for j, a in enumerate(row, 1):
            if not 0 <= a <= before:        # NaN too
                raise InputError(
                    f"survival {a} of request {request}, slot {j}, after {before}: it must lie "
                    "within 0..1 and never rise; make it with engine.scheduling.survival")
            before = a
    return rows


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
