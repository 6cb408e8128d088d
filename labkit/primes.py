"""Hash moduli of the Engram tables: distinct primes just above `engram_vocab_size`.

Layers, then orders 2..N, then heads take the next prime that nobody has taken; the cursor
restarts at `engram_vocab_size` - 1 for every order, the set of taken primes does not.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.config import ModelConfig

# These bases make Miller-Rabin exact below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def is_prime(n: int) -> bool:
    """Exact for n < 3.3e24."""
    if n < 2:
        return False
    for p in _WITNESSES:
        if n % p == 0:
            return n == p
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _WITNESSES:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def engram_primes(config: ModelConfig) -> list[list[int]]:
    """Per Engram layer its moduli, order-major then head: [layers][(N-1)*heads]."""
    return [list(layer) for layer in _primes(
        len(config.engram_layer_ids), config.engram_max_ngram_size,
        config.engram_n_heads, config.engram_vocab_size)]


def engram_rows(config: ModelConfig) -> list[int]:
    """Table rows of each Engram layer: the sum of its moduli (config `engram_num_embeddings`)."""
    return [sum(layer) for layer in engram_primes(config)]


@functools.lru_cache(maxsize=32)
def _primes(layers: int, orders: int, heads: int, start: int) -> tuple[tuple[int, ...], ...]:
    taken: set[int] = set()
    out = []
    for _layer in range(layers):
        row = []
        for _order in range(2, orders + 1):
            cursor = start - 1
            for _head in range(heads):
                cursor += 1
                while cursor in taken or not is_prime(cursor):
                    cursor += 1
                taken.add(cursor)
                row.append(cursor)
        out.append(tuple(row))
    return tuple(out)
