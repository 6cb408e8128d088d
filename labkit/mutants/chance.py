"""Chi-square tests that say what they would have noticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch

ALPHA, POWER = 1e-4, 0.99


class ChiSquare(NamedTuple):
    """statistic: of the counts; limit: right code exceeds it with probability ALPHA;
    detectable: a law that is off by this total variation is noticed with probability POWER."""

    statistic: float
    limit: float
    detectable: float


def _above(df: int, x: float) -> float:
    """P(chi-square of df degrees of freedom > x)."""
    return float(torch.special.gammaincc(torch.tensor(df / 2).double(), torch.tensor(x / 2)))


def _solve(f: Callable[[float], float], low: float, high: float) -> float:
    """Where the falling function f crosses 0."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return high


def limit(df: int, alpha: float = ALPHA) -> float:
    """The statistic that right code exceeds with probability alpha."""
    return _solve(lambda x: _above(df, x) - alpha, 0.0, 40.0 + 10 * df)


def power(df: int, noncentrality: float, alpha: float = ALPHA) -> float:
    """P(statistic > limit) when the law is off: a Poisson mixture of central ones."""
    x, half = limit(df, alpha), noncentrality / 2
    return sum(math.exp(j * math.log(half) - half - math.lgamma(j + 1)) * _above(df + 2 * j, x)
               for j in range(int(half + 12 * math.sqrt(half) + 30)))


def detectable(df: int, draws: int, alpha: float = ALPHA, wanted: float = POWER) -> float:
    """A total variation that is noticed with probability `wanted`, wherever it lies.

    Noncentrality = draws * sum (q-p)^2 / p >= draws * (2 TV)^2 by Cauchy-Schwarz.
    """
    needed = _solve(lambda n: wanted - power(df, n, alpha), 1e-6, 1000.0)
    return math.sqrt(needed / draws) / 2


def chi_square(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> ChiSquare:
    """Counts and probabilities by outcome -> statistic, limit, detectable total variation.

    An outcome of probability 0 that was counted makes the statistic infinite.
    """
    draws = sum(counts.values())
    live = [key for key, p in law.items() if p > 0]
    if any(n and law.get(key, 0.0) <= 0 for key, n in counts.items()):
        return ChiSquare(math.inf, limit(len(live) - 1), detectable(len(live) - 1, draws))
    assert min(law[key] for key in live) * draws >= 5, "too few draws for the rarest outcome"
    statistic = sum((counts.get(key, 0) - draws * law[key]) ** 2 / (draws * law[key])
                    for key in live)
    return ChiSquare(statistic, limit(len(live) - 1), detectable(len(live) - 1, draws))
