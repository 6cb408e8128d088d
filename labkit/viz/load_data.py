"""Many requests at once: what each policy would verify, and what comes of it.

A step of R requests is made of R proposals that the draft really made on held-out text, with
what became of them. The policies see the calibrated survivals alone; how many tokens a step
gives is then known twice, as expected and as it was. A step of B tokens takes 1 / SPS(B)
seconds, by the rates that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from labkit.engine.calibration import calibrated
from labkit.engine.scheduling import (
    DelayedBudget,
    Fixed,
    NoDraft,
    Policy,
    PrefixScheduler,
    StepRate,
    Threshold,
    best_first,
)
from labkit.errors import InputError
from labkit.train.draft_figures import Trials

STEPS = 24          # of a load; means leave out the first DELAY, which the delayed budget needs
DELAY = 2
LEAST = 0.5
MIXED = "half and half"


@dataclass(frozen=True)
class Choice:
    """What one policy does in one step: lengths, B, and tokens as expected and as they were."""

    lengths: tuple[int, ...]
    tokens: int
    expected: float
    observed: int
    rate: float             # steps a second

    @property
    def throughput(self) -> float:
        """Tokens a second, expected: tau * SPS(B)."""
        return self.expected * self.rate


@dataclass(frozen=True)
class Mean:
    """Of a policy over the steps of a load: slots verified a request, tokens a second."""

    slots: float
    expected: float
    observed: float


@dataclass(frozen=True)
class Load:
    """Proposals by kind of text, and step rates with the draft and without it.

    pools  kind -> (survivals [N][n], number of drafts that survived [N])
    """

    pools: Mapping[str, tuple[list[list[float]], list[int]]]
    rate: StepRate
    plain: StepRate
    policies: Mapping[str, Policy] = field(init=False)

    def __post_init__(self) -> None:
        n = len(next(iter(self.pools.values()))[0][0])
        object.__setattr__(self, "policies", {
            "none": NoDraft(), "fixed": Fixed(n), "threshold": Threshold(LEAST),
            "scheduler": PrefixScheduler(self.rate), "delayed": DelayedBudget(self.rate, DELAY)})

    @property
    def slots(self) -> int:
        return len(next(iter(self.pools.values()))[0][0])

    @property
    def largest(self) -> int:
        """Most requests for which every B was measured."""
        return min(self.rate.largest // (1 + self.slots), self.plain.largest)

    @property
    def kinds(self) -> tuple[str, ...]:
        return (*self.pools, MIXED) if len(self.pools) > 1 else tuple(self.pools)

    def batch(self, kind: str, requests: int, step: int) -> tuple[list[list[float]], list[int]]:
        """Survivals and outcomes of the requests of a step; more requests begin with the same."""
        names = list(self.pools) if kind == MIXED else [kind]
        order = {name: torch.randperm(len(self.pools[name][1]), generator=torch.Generator()
                                      .manual_seed(step)).tolist() for name in names}
        rows, outcomes = [], []
        for r in range(requests):
            name = names[r % len(names)]
            at = order[name][r // len(names) % len(order[name])]
            rows.append(self.pools[name][0][at])
            outcomes.append(self.pools[name][1][at])
        return rows, outcomes

    def choices(self, kind: str, requests: int) -> dict[str, list[Choice]]:
        """Policy -> what it does in each of STEPS steps, one behind the other."""
        if not 1 <= requests <= self.largest:
            raise InputError(f"{requests} requests: the rates were measured for 1 to "
                             f"{self.largest}")
        batches = [self.batch(kind, requests, step) for step in range(STEPS)]
        found: dict[str, list[Choice]] = {}
        for name, policy in self.policies.items():
            policy.reset()
            rate = self.plain if name == "none" else self.rate
            found[name] = []
            for rows, outcomes in batches:
                lengths = policy.lengths(rows)
                policy.done()
                tokens = requests + sum(lengths)
                expected = requests + sum(sum(row[:n]) for row, n in zip(rows, lengths,
                                                                         strict=True))
                observed = requests + sum(min(n, k) for n, k in zip(lengths, outcomes,
                                                                    strict=True))
                found[name].append(Choice(tuple(lengths), tokens, expected, observed,
                                          rate(tokens)))
        return found

    def curve(self, kind: str, requests: int, step: int) -> list[tuple[int, float]]:
        """(B, tau * SPS(B)) as the best slots are admitted one by one, from B = R on."""
        rows, _ = self.batch(kind, requests, step)
        tokens, tau = requests, float(requests)
        found = [(tokens, tau * self.rate(tokens))]
        for a, _, _ in best_first(rows):
            tokens, tau = tokens + 1, tau + a
            found.append((tokens, tau * self.rate(tokens)))
        return found

    @cached_property
    def highest(self) -> float:
        """More tokens a second than any curve reaches: the end of a fixed axis."""
        most = max(y for kind in self.kinds for requests in range(1, self.largest + 1)
                   for step in range(STEPS) for _, y in self.curve(kind, requests, step))
        return 1.05 * max(most, *(b * self.plain(b) for b in range(1, self.largest + 1)))


def load(trials: Mapping[str, Trials], temperatures: Sequence[float], rate: StepRate,
         plain: StepRate) -> Load:
    """trials: by kind of text, what the draft proposed there."""
    pools = {}
    for kind, found in trials.items():
        a = calibrated(found.confidence_logits, temperatures).cumprod(-1)       # [N,n]
        pools[kind] = (a.tolist(), found.survived.sum(1).tolist())
    return Load(pools, rate, plain)


def straight(rate: StepRate) -> StepRate:
    """The same points on a line, seconds = fixed + each * B, by least squares.

    A few measured steps scatter; along a line of which `each` is not negative, throughput has
    one summit.
    """
    tokens = torch.tensor([float(b) for b in rate.points], dtype=torch.float64)
    seconds = torch.tensor([1 / r for r in rate.points.values()], dtype=torch.float64)
    off, middle = tokens - tokens.mean(), seconds.mean()
    each = max(0.0, float((off * (seconds - middle)).sum() / off.square().sum().clamp(min=1e-30)))
    least = float(seconds.min()) / 10                   # a step never takes no time
    return StepRate({int(b): 1 / max(least, float(middle) + each * float(o))
                     for b, o in zip(tokens, off, strict=True)})


def mean(choices: Sequence[Choice]) -> Mean:
    """Over the steps behind the first DELAY: tokens by seconds, both summed."""
    counted = choices[DELAY:]
    seconds = sum(1 / c.rate for c in counted)
    requests = len(counted[0].lengths)
    return Mean(sum(sum(c.lengths) for c in counted) / len(counted) / requests,
                sum(c.expected for c in counted) / seconds,
                sum(c.observed for c in counted) / seconds)
