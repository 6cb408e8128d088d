"""The distinct n-grams of a text: how often each occurs, and which of them share a table row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from labkit.config import ModelConfig
from labkit.primes import is_prime
from labkit.text.engram_hash import engram_multipliers


def expected_sharing(distinct: int, rows: int) -> float:
    """Share of `distinct` n-grams whose row another one reads too, if rows are drawn at random.

    Each of the others misses that row with probability 1 - 1/rows. (The birthday question,
    asked of one guest: does anybody share *my* birthday?)
    """
    if rows == 1:
        return float(distinct > 1)
    return -math.expm1((distinct - 1) * math.log1p(-1 / rows))


@dataclass(frozen=True)
class Ngrams:
    """The distinct n-grams of one order, numbered by first appearance.

    mixes   int64 [n]: XOR of class times multiplier, of one Engram layer
    counts  int64 [n]: how often each occurs
    """

    order: int
    mixes: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.mixes)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def sharing(self, rows: int) -> np.ndarray:
        """int64, sorted: for each n-gram that comes to share its row in a table of `rows` rows,
        how many distinct n-grams there were by then.

        The share among the first k is `np.searchsorted(found, k, "right") / k`.
        """
        n = len(self)
        # Row and number in one integer: a plain sort groups rows, earlier n-grams first.
        sorted_ = np.sort(self.mixes % rows * n + np.arange(n))
        row, number = sorted_ // n, sorted_ % n
        same = row[1:] == row[:-1]                         # has a predecessor in its row
        first = same & ~np.concatenate([[False], same[:-1]])
        # A later one shares from its own appearance on, the first from that of the second.
        later = number[1:]
        return np.sort(np.concatenate([later[same], later[first]]) + 1)

    def shared(self, rows: int, distinct: int | None = None) -> float:
        """Measured share of the first `distinct` n-grams (default: all) that share a row."""
        k = len(self) if distinct is None else distinct
        return float(np.searchsorted(self.sharing(rows), k, "right")) / k

    def hit_share(self, top: int) -> float:
        """Share of all look-ups that go to the `top` most frequent n-grams."""
        return float(np.sort(self.counts)[::-1][:top].sum()) / self.total


@dataclass(frozen=True)
class Census:
    """The n-grams of all orders of some texts, hashed as one Engram layer does.

    tokens  of the texts together; ngrams: order -> `Ngrams`
    """

    config: ModelConfig
    layer: int
    tokens: int
    ngrams: dict[int, Ngrams]


def census(config: ModelConfig, classes: torch.Tensor, texts: Sequence[Sequence[int]],
           layer: int) -> Census:
    """Count the n-grams of texts (ids), those that lie wholly inside a text."""
    N, V = config.engram_max_ngram_size, config.engram_compressed_vocab_size
    multipliers = engram_multipliers(layer, V, N)
    each = [classes.cpu()[torch.as_tensor(ids)].numpy() for ids in texts]
    found = {}
    joined = np.concatenate(each)                          # [T] classes of all texts
    _, numbers = np.unique(joined, return_inverse=True)    # number of the n-gram that ends here
    room = np.concatenate([np.arange(len(one)) for one in each])       # tokens before it
    mixes = joined * multipliers[0]
    for order in range(2, N + 1):
        back = np.roll(joined, order - 1)                  # class of the token n-1 back
        mixes = mixes ^ (back * multipliers[order - 1])
        numbers = np.unique(numbers * V + back, return_inverse=True)[1]
        whole = np.flatnonzero(room >= order - 1)
        _, at, counts = np.unique(numbers[whole], return_index=True, return_counts=True)
        by_appearance = np.argsort(at)
        at, counts = at[by_appearance], counts[by_appearance]
        found[order] = Ngrams(order, mixes[whole[at]], counts)
    return Census(config, layer, len(joined), found)


def table_sizes(config: ModelConfig, largest: int, steps: int = 2) -> list[int]:
    """Primes to try as table sizes: the config's first, fractions and multiples of it, largest.

    steps: how often the size is halved below the config's own.
    """
    own = next_prime(config.engram_vocab_size)
    found = [next_prime(own >> step) for step in range(steps, 0, -1)]
    size = own
    while size < largest:
        found.append(size)
        size = next_prime(2 * size)
    return [*found, largest]


def next_prime(n: int) -> int:
    """The least prime that is at least n."""
    while not is_prime(n):
        n += 1
    return n
