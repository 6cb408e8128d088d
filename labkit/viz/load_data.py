"""Many requests at once: what each policy would verify, and what comes of it.

A step of R requests is made of R proposals that the draft really made on held-out text, with
what became of them. The policies see the calibrated survivals alone; how many tokens a step
gives is then known twice, as expected and as it was. A step of R requests and B tokens takes
1 / SPS seconds, by rates that were measured on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from labkit.engine.batching import Measured
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
class Rates:
    """Steps a second. with_draft: R -> SPS of B = R .. R (1 + n); plain: R -> without the draft;
    largest: R up to which both are known."""

    with_draft: Callable[[int], StepRate]
    plain: Callable[[int], float]
    largest: int


def pooled(measured: Sequence[Measured], plain: Sequence[Measured]) -> Rates:
    """As measured: one curve over B for all R, times of the same B averaged."""
    seconds: list[dict[int, list[float]]] = [{}, {}]
    for found, points in zip((measured, plain), seconds, strict=True):
        for m in found:
            points.setdefault(m.tokens, []).append(m.seconds)
    one, other = (StepRate({b: len(s) / sum(s) for b, s in points.items()}) for points in seconds)
    return Rates(lambda requests: one, other, max(m.requests for m in measured))


def plane(measured: Sequence[Measured], plain: Sequence[Measured], slots: int) -> Rates:
    """seconds = fixed + each_request * R + each_token * B, by least squares.

    A few measured steps scatter. On a plane that does not fall with B, throughput has one summit.
    """
    fixed, request, token = _fit([[1.0, m.requests, m.tokens] for m in measured],
                                 [m.seconds for m in measured])
    base, each = _fit([[1.0, m.requests] for m in plain], [m.seconds for m in plain])
    least = min(m.seconds for m in (*measured, *plain)) / 10        # no step takes no time

    @cache
    def with_draft(requests: int) -> StepRate:
        return StepRate({b: 1 / max(least, fixed + request * requests + max(0.0, token) * b)
                         for b in range(requests, requests * (1 + slots) + 1)})

    return Rates(with_draft, lambda requests: 1 / max(least, base + each * requests),
                 max(m.requests for m in measured))


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares: one coefficient for each column."""
    x, y = torch.tensor(rows, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    return torch.linalg.lstsq(x, y[:, None]).solution[:, 0].tolist()


@dataclass(frozen=True)
class Load:
    """Proposals by kind of text, and step rates.

    pools  kind -> (survivals [N][n], number of drafts that survived [N])
    """

    pools: Mapping[str, tuple[list[list[float]], list[int]]]
    rates: Rates

    def policies(self, requests: int) -> dict[str, Policy]:
        """By their names in `palette.POLICIES`; those that count with rates have those of R."""
        rate = self.rates.with_draft(requests)
        return {"none": NoDraft(), "fixed": Fixed(self.slots), "threshold": Threshold(LEAST),
                "scheduler": PrefixScheduler(rate), "delayed": DelayedBudget(rate, DELAY)}

    @property
    def slots(self) -> int:
        return len(next(iter(self.pools.values()))[0][0])

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
        if not 1 <= requests <= self.rates.largest:
            raise InputError(f"{requests} requests: the rates were measured for 1 to "
                             f"{self.rates.largest}")
        batches = [self.batch(kind, requests, step) for step in range(STEPS)]
        found: dict[str, list[Choice]] = {}
        known = self.rates.with_draft(requests)
        for name, policy in self.policies(requests).items():
            found[name] = []
            for rows, outcomes in batches:
                lengths = policy.lengths(rows)
                policy.done()
                tokens = requests + sum(lengths)
                expected = requests + sum(sum(row[:n]) for row, n in zip(rows, lengths,
                                                                         strict=True))
                observed = requests + sum(min(n, k) for n, k in zip(lengths, outcomes,
                                                                    strict=True))
                rate = self.rates.plain(requests) if name == "none" else known(tokens)
                found[name].append(Choice(tuple(lengths), tokens, expected, observed, rate))
        return found

    def curve(self, kind: str, requests: int, step: int) -> list[tuple[int, float]]:
        """(B, tau * SPS(B)) as the best slots are admitted one by one, from B = R on."""
        rows, rate = self.batch(kind, requests, step)[0], self.rates.with_draft(requests)
        tokens, tau = requests, float(requests)
        found = [(tokens, tau * rate(tokens))]
        for a, _, _ in best_first(rows):
            tokens, tau = tokens + 1, tau + a
            found.append((tokens, tau * rate(tokens)))
        return found

    @cached_property
    def highest(self) -> float:
        """More tokens a second than any curve reaches: the end of a fixed axis."""
        loads = range(1, self.rates.largest + 1)
        most = max(y for kind in self.kinds for requests in loads for step in range(STEPS)
                   for _, y in self.curve(kind, requests, step))
        return 1.05 * max(most, *(r * self.rates.plain(r) for r in loads))


def load(trials: Mapping[str, Trials], temperatures: Sequence[float], rates: Rates) -> Load:
    """trials: by kind of text, what the draft proposed there."""
    pools = {}
    for kind, found in trials.items():
        a = calibrated(found.confidence_logits, temperatures).cumprod(-1)       # [N,n]
        pools[kind] = (a.tolist(), found.survived.sum(1).tolist())
    return Load(pools, rates)


def mean(choices: Sequence[Choice]) -> Mean:
    """Over the steps behind the first DELAY: tokens by seconds, both summed."""
    counted = choices[DELAY:]
    seconds = sum(1 / c.rate for c in counted)
    requests = len(counted[0].lengths)
    return Mean(sum(sum(c.lengths) for c in counted) / len(counted) / requests,
                sum(c.expected for c in counted) / seconds,
                sum(c.observed for c in counted) / seconds)
